"""The main part of the script of a run that differs: the two runs, and the comparison of what differed."""

from __future__ import annotations

VIEWS = {
    "weights": "{name: value.tolist() for name, value in module.state_dict().items()}",
    "optimizers": (
        "[value.tolist() for each in trainer.optimizers for state in each.state_dict()['state'].values()"
        " for value in state.values() if value is not None]"
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
        events.append((trainer.current_epoch, trainer.global_step, "batch", batch_idx, str(batch)))
    def on_validation_end(self, trainer, module):
        events.append((trainer.current_epoch, trainer.global_step, "validated", str(trainer.callback_metrics)))
    def on_train_epoch_end(self, trainer, module):
        events.append((trainer.current_epoch, trainer.global_step, "epoch ended", str(trainer.callback_metrics)))"""


def compared(found: list[str], path: str | None, cut: list[str] | None = None) -> str:
    """Return the main part: the whole run, the resumed one, and what is left of each of what differed.

    Args:
        found: what differed, "<aspect>: ..." each.
        path: the checkpoint to resume from, within the folder; None where it is the first run that differs.
        cut: lines that make the cut run in `f"{folder}/part"`, which "auto" goes on with; None for a run of its own.
    """
    aspects = [each.split(":")[0] for each in found]
    aspects = [name for name in dict.fromkeys(aspects) if name in (*VIEWS, "events")] or ["weights"]
    events = "events" in aspects
    # Of a run that goes on in a folder of its own the rows, as the events, are the last of the whole.
    ends = [name for name in aspects if name == "events" or (name == "rows" and cut is None)]
    lines = [EVENTS] if events else []
    lines += ["def left(folder, ckpt_path=None, callbacks=()):"]
    lines += ["    events.clear()"] if events else []
    lines += [f"    trainer, module = run(folder, ckpt_path, {'[Events(), *callbacks]' if events else 'callbacks'})"]
    lines += ["    return {", *[f'        "{name}": {VIEWS.get(name, "list(events)")},' for name in aspects], "    }"]
    lines += ["with tempfile.TemporaryDirectory() as folder:", '    whole = left(f"{folder}/whole")']
    lines += cut or []
    ckpt_path = '"auto"' if cut is not None else f'f"{{folder}}/{path}"'
    lines += [f'    part = left(f"{{folder}}/part", {ckpt_path})'] if path or cut is not None else ["    part = whole"]
    if ends:
        lines += [f"for name in {ends}:", "    whole[name] = whole[name][len(whole[name]) - len(part[name]) :]"]
    lines += ["for name in whole:", "    if whole[name] != part[name]:"]
    lines += ["        print(name, whole[name], part[name], sep='\\n')", "sys.exit(whole != part)"]
    return "\n".join(lines)
