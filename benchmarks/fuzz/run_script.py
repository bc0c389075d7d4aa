"""The main part of the script for a run that differs: the two runs, and the comparison."""

from __future__ import annotations

VIEWS = {
    "weights": "{name: value.tolist() for name, value in module.state_dict().items()}",
    "optimizers": (
        "[{name: {key: torch.as_tensor(value).tolist() for key, value in state.items() if value is not None}"
        " for name, state in each.state_dict()['state'].items()} for each in trainer.optimizers]"
    ),
    "rates": "[group['lr'] for each in trainer.optimizers for group in each.param_groups]",
    "counters": "{**trainer.state.state_dict(), 'saves': 0}",
    "metrics": "{name: float(value) for name, value in sorted(trainer.callback_metrics.items())}",
    "random": "torch.rand(3).tolist()",
    "stopping": "[each.state_dict() for each in trainer.callbacks if isinstance(each, tw.EarlyStopping)]",
    "schedulers": "[each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]",
    "kept": "sorted(each.name for each in Path(folder, 'best').iterdir())",
    "rows": "Path(folder, 'logs/version_0/metrics.csv').read_text().splitlines()",
}
EVENTS = """\
events = []
class Events(tw.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        events.append((trainer.current_epoch, trainer.global_step, "batch", str(batch)))
    def on_validation_end(self, trainer, module):
        events.append((trainer.current_epoch, trainer.global_step, "validated", str(trainer.callback_metrics)))
    def on_train_epoch_end(self, trainer, module):
        events.append((trainer.current_epoch, trainer.global_step, "ended", str(trainer.callback_metrics)))"""


def compared(found: list[str], path: str | None, cut: list[str] | None = None) -> str:
    """Return the main part: the whole run, the resumed one, and the first thing in which they differ.

    Args:
        found: what differed, "<aspect>: ..." each.
        path: the checkpoint to resume from, within the folder, or None.
        cut: lines that make the cut run in `f"{folder}/part"`, from which "auto" resumes; None for a separate run.
    """
    aspects = [each.split(":")[0] for each in found]
    aspect = next((name for name in aspects if name in (*VIEWS, "events")), "weights")
    lines = [EVENTS] if aspect == "events" else []
    lines += ["def left(folder, ckpt_path=None):"]
    lines += ["    events.clear()"] if aspect == "events" else []
    lines += [f"    trainer, module = run(folder, ckpt_path{', [Events()]' if aspect == 'events' else ''})"]
    lines += [f"    return {VIEWS.get(aspect, '[*events]')}"]
    lines += ["with tempfile.TemporaryDirectory() as folder:", '    whole = left(f"{folder}/whole")', *(cut or [])]
    ckpt_path = '"auto"' if cut is not None else f'f"{{folder}}/{path}"'
    lines += [f'    part = left(f"{{folder}}/part", {ckpt_path})'] if path or cut is not None else ["    part = whole"]
    if aspect == "events" or (aspect == "rows" and cut is None):
        lines += ["whole = whole[len(whole) - len(part) :]  # a run of its own has the last ones"]
    return "\n".join([*lines, f"print({aspect!r}, whole, part, sep='\\n')", "sys.exit(whole != part)"])
