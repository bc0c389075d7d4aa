"""What benchmarks/gpu.py measures: its cases, the most important first, and which implementations run each."""

from __future__ import annotations

from dataclasses import dataclass

LABELS = {
    "by_hand": "by hand",
    "by_hand_fused": "by hand, `fused=True`",
    "trainwright": "trainwright `Trainer`, same flags",
    "trainwright_default": "trainwright `Trainer`, out of the box",
    "trainwright_raw": "trainwright `Accelerator`, same flags",
    "trainwright_background": "trainwright, `blocking=False`",
    "lightning": "Lightning `Trainer`",
    "accelerate": "Accelerate",
    "hf_trainer": "Transformers `Trainer`",
    "ignite": "Ignite",
}
PACKAGES = {
    "trainwright": "trainwright",
    "trainwright_default": "trainwright",
    "trainwright_raw": "trainwright",
    "trainwright_background": "trainwright",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "hf_trainer": "transformers",
    "ignite": "ignite",
}
"""What an implementation imports; by hand there is nothing to import."""
LOOPS = (
    "by_hand",
    "trainwright",
    "by_hand_fused",
    "trainwright_default",
    "trainwright_raw",
    "lightning",
    "accelerate",
    "hf_trainer",
    "ignite",
)
SAVES = ("by_hand", "trainwright", "trainwright_background", "lightning", "accelerate")
STARTS = ("by_hand", "trainwright", "lightning", "accelerate", "hf_trainer")
LOADER_BATCHES = 20_000
"""Batches of an epoch; a process ends before it has come to the last."""


@dataclass(frozen=True)
class Case:
    """One row of the plan.

    Args:
        name: what `--cases` takes.
        kind: "steps" (a loop, timed in turns), "save" (of a checkpoint) or "start" (of a process, up to its first step).
        model: "distilbert", "gpt", "resnet", "mlp" or "layers".
        batch: samples of a batch.
        length: tokens per sample; 0 for models without tokens.
        is_ragged: whether batches are padded to their longest sample, rather than all samples to `length`.
        precision: "fp32", "tf32", "16-mixed" or "bf16-mixed".
        compiled: "" (eager), "default" or "reduce-overhead".
        gib: roughly the device memory of one implementation, which limits how many warm up at once.
        num_workers: worker processes of the loader.
    """

    name: str
    kind: str = "steps"
    model: str = "distilbert"
    batch: int = 12
    length: int = 512
    is_ragged: bool = False
    precision: str = "bf16-mixed"
    compiled: str = ""
    gib: float = 6.0
    num_workers: int = 0

    @property
    def implementations(self) -> tuple[str, ...]:
        return {"steps": LOOPS, "save": SAVES, "start": STARTS}[self.kind]

    @property
    def first_guess_seconds(self) -> float:
        """An estimate of how long a visit takes on a GPU, until a similar one has been measured."""
        return {"steps": 90.0 if self.compiled else 45.0, "save": 50.0, "start": 120.0}[self.kind]

    @property
    def like(self) -> tuple[str, ...]:
        """A key for cases that take about the same time."""
        return (self.kind, "compiled" if self.compiled else "eager", self.model)


def _distilbert(batch: int, length: str, how: str) -> Case:
    compiled = {"compile": "default", "reduce-overhead": "reduce-overhead"}.get(how, "")
    return Case(
        name=f"distilbert-{batch}-{length}-{how}",
        batch=batch,
        is_ragged=length == "ragged",
        precision="bf16-mixed" if compiled else how,
        compiled=compiled,
        gib=(3.0 if batch == 12 else 6.0) * (1.6 if how in ("fp32", "tf32") else 1.0),
    )


def all_cases() -> list[Case]:
    """Return the cases, the most important first: one of each kind, then the rest of the grid."""
    first = [
        _distilbert(12, "512", "bf16-mixed"),
        Case("mlp", model="mlp", batch=8, length=0, precision="fp32", gib=1.0),
        Case("gpt", model="gpt", batch=8, length=1024, compiled="default", gib=9.0),
        Case("resnet", model="resnet", batch=128, length=0, gib=5.0, num_workers=4),
        Case("save", kind="save", model="layers", batch=16, length=0, precision="fp32", gib=3.0),
        _distilbert(12, "ragged", "16-mixed"),
        _distilbert(32, "512", "compile"),
        _distilbert(12, "512", "reduce-overhead"),
        Case("start", kind="start", model="mlp", batch=8, length=0, precision="fp32", gib=1.0),
        _distilbert(32, "ragged", "bf16-mixed"),
        _distilbert(12, "512", "tf32"),
        _distilbert(12, "512", "fp32"),
    ]
    grid = [
        _distilbert(batch, length, how)
        for length in ("512", "ragged")
        for how in ("bf16-mixed", "16-mixed", "compile", "tf32", "fp32", "reduce-overhead")
        for batch in (12, 32)
    ]
    return first + [case for case in grid if case not in first]
