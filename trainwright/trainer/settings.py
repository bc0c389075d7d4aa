"""Settings: the Trainer's numbers and switches, checked together before anything is started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from trainwright.duration import to_seconds
from trainwright.faults.nan_policy import POLICIES
from trainwright.memory.activation_checkpointing import ActivationCheckpointing

DEFAULT_MAX_EPOCHS = 1000

REPLACED = {
    "gpus": "pass devices=, with accelerator='gpu'",
    "resume_from_checkpoint": "pass ckpt_path= to trainer.fit",
    "auto_lr_find": "pass a LearningRateFinder in callbacks=, or call tw.Tuner(trainer).lr_find(module)",
    "auto_scale_batch_size": "pass a BatchSizeFinder in callbacks=, or call tw.Tuner(trainer).scale_batch_size(module)",
    "replace_sampler_ddp": "pass use_distributed_sampler=",
    "checkpoint_callback": "pass enable_checkpointing=, and a ModelCheckpoint in callbacks=",
    "progress_bar_refresh_rate": "pass TQDMProgressBar(refresh_rate=...) in callbacks=, or enable_progress_bar=False",
    "epochs": "pass max_epochs=",
    "gradient_checkpointing": "pass activation_checkpointing=True",
    "steps": "pass max_steps=",
}
"""Arguments of earlier trainers, and what replaces them."""

LEAST_NUMBERS = {
    "max_epochs": -1, "min_epochs": 0, "min_steps": 0, "num_sanity_val_steps": -1, "max_steps": -1, "num_nodes": 1,
    "check_val_every_n_epoch": 1, "log_every_n_steps": 0, "accumulate_grad_batches": 1, "reload_dataloaders_every_n_epochs": 0,
}  # fmt: skip
MAY_BE_NONE = (
    "max_epochs", "min_epochs", "min_steps", "num_sanity_val_steps", "check_val_every_n_epoch", "log_every_n_steps",
)  # fmt: skip

ALLOWED: dict[str, tuple[Any, ...]] = {
    "gradient_clip_algorithm": ("norm", "value", None),
    "deterministic": (True, False, "warn", None),
    "nan_policy": POLICIES,
    "accumulate_by": ("batches", "tokens"),
    **dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_report", "benchmark"),
        (True, False, None),
    ),
    **dict.fromkeys(
        (
            "inference_mode", "use_distributed_sampler", "detect_anomaly", "barebones", "sync_batchnorm",
            "enable_autolog_hparams", "fused_optimizers", "detect_syncs",
        ),
        (True, False),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The limits, intervals and switches of a run, as the Trainer's docstring describes them."""

    num_nodes: int = 1
    fast_dev_run: bool | int = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | timedelta | dict[str, float] | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | str | timedelta | dict[str, float] | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    enable_report: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    inference_mode: bool = False
    use_distributed_sampler: bool = True
    detect_anomaly: bool = False
    detect_syncs: bool = False
    memory_snapshot: int | str | None = None
    nan_policy: str | None = None
    barebones: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    enable_autolog_hparams: bool = True
    accumulate_by: str = "batches"
    activation_checkpointing: Any = False
    compile: bool | dict[str, Any] = False
    fused_optimizers: bool = True
    overfit: int | float = 0.0
    """The `overfit_batches` whose limits a run has taken."""
    is_trial: bool = False

    def __post_init__(self) -> None:
        problems = [*self._wrong_numbers(), *self._wrong_choices(), *self._wrong_times()]
        problems = problems or list(self._conflicts())  # compares settings, so each has to be valid first
        if problems:
            raise ValueError("Trainer was given wrong settings: " + "; ".join(problems) + ".")

    def _wrong_numbers(self) -> Iterable[str]:
        for name, least in LEAST_NUMBERS.items():
            yield from _whole_number(self, name, least)
        for name in ("train", "val", "test", "predict"):
            yield from _limit(self, f"limit_{name}_batches")
        yield from _limit(self, "overfit_batches")
        clip = self.gradient_clip_val
        if clip is not None and not (_is_number(clip) and clip >= 0):
            yield f"gradient_clip_val={clip!r}: expected a number above 0, or 0 or None for no limit"
        when = self.memory_snapshot
        if when not in (None, "on_oom") and not (_is_number(when) and isinstance(when, int) and when >= 1):
            yield f"memory_snapshot={when!r}: expected 'on_oom', a number of optimizer steps of at least 1, or None"
        if not isinstance(self.fast_dev_run, bool):
            yield from _whole_number(self, "fast_dev_run", 0)

    def _wrong_choices(self) -> Iterable[str]:
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            if not isinstance(value, (str, bool, type(None))) or value not in allowed:
                *first, last = map(repr, allowed)
                yield f"{name}={value!r}: expected {', '.join(first)} or {last}"
        options: object = self.compile
        if not isinstance(options, (bool, dict)) or (
            isinstance(options, dict) and type(options.get("whole", True)) is not bool
        ):
            yield f"compile={options!r}: expected True, False or a dict of torch.compile's options and 'whole' (a bool)"
        try:
            checkpointing = ActivationCheckpointing.read(self.activation_checkpointing)
            if self.compile and checkpointing is not None and checkpointing.offload:
                yield "compile= cannot trace the 'offload' of activation_checkpointing; omit one of them"
        except ValueError as error:
            yield str(error).rstrip(".")

    def _wrong_times(self) -> Iterable[str]:
        interval = self.val_check_interval
        is_wrong = isinstance(interval, float) and not 0.0 < interval <= 1.0
        if is_wrong or (isinstance(interval, int) and (isinstance(interval, bool) or interval < 1)):
            yield (
                f"val_check_interval={interval!r}: expected a number of batches of at least 1 (an int), a fraction of the "
                "epoch above 0.0 and up to 1.0 (a float), or a time"
            )
        for name in ("max_time", "val_check_interval"):
            value = getattr(self, name)
            if value is None or (name == "val_check_interval" and isinstance(value, (int, float))):
                continue
            try:
                to_seconds(value, name=name, allows_zero=name == "max_time")
            except (TypeError, ValueError) as error:
                yield str(error).rstrip(".")

    def _conflicts(self) -> Iterable[str]:
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            yield (
                "check_val_every_n_epoch=None counts batches across epochs, so val_check_interval has to be a number of "
                f"batches (int) or a time, not {self.val_check_interval!r}"
            )
        if self.max_epochs is not None and -1 < self.max_epochs < (self.min_epochs or 0):  # -1 is unlimited
            yield f"min_epochs={self.min_epochs} is above max_epochs={self.max_epochs}"
        if -1 < self.max_steps < (self.min_steps or 0):
            yield f"min_steps={self.min_steps} is above max_steps={self.max_steps}"
        if self.memory_snapshot is not None and self.fast_dev_run:
            yield f"fast_dev_run writes no file, but memory_snapshot={self.memory_snapshot!r} asks for one. Omit one"
        if self.barebones:
            names = (
                "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_report",
                "num_sanity_val_steps", "fast_dev_run", "detect_anomaly", "detect_syncs", "log_every_n_steps",
            )  # fmt: skip
            wanted = ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name))
            if wanted:
                yield f"barebones=True omits what costs time, but {wanted} asks for it. Omit one"

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that have to be the same on every rank."""
        own = ("enable_", "detect_", "benchmark")  # each rank may print and look for errors in its own way
        return {name: value for name, value in vars(self).items() if not name.startswith(own)}

    @property
    def effective(self) -> Settings:
        """The settings of a run, after fast_dev_run, overfit_batches and barebones have changed them."""
        changes: dict[str, Any] = {}
        if self.overfit_batches:
            few = self.overfit_batches
            changes.update(limit_train_batches=few, limit_val_batches=few, overfit_batches=0.0, overfit=few)
        if self.fast_dev_run:  # after overfit_batches, whose limits it replaces
            few = int(self.fast_dev_run)
            changes.update(
                max_epochs=1, max_steps=few, min_epochs=None, min_steps=None, num_sanity_val_steps=0,
                val_check_interval=1.0, check_val_every_n_epoch=1, log_every_n_steps=1, max_time=None,
                limit_train_batches=few, limit_val_batches=few, limit_test_batches=few, limit_predict_batches=few,
            )  # fmt: skip
        if self.barebones:
            changes.update(
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                enable_report=False, num_sanity_val_steps=0, log_every_n_steps=0,
            )  # fmt: skip
        return replace(self, **changes)

    @property
    def last_epoch(self) -> int | None:
        """The number of epochs to train, or None if unlimited."""
        if self.max_epochs is None:
            return DEFAULT_MAX_EPOCHS if self.max_steps == -1 and self.max_time is None else None
        return None if self.max_epochs == -1 else self.max_epochs

    @property
    def clip_norm(self) -> float | None:
        return self.gradient_clip_val or None if self.gradient_clip_algorithm != "value" else None

    @property
    def clip_value(self) -> float | None:
        return self.gradient_clip_val or None if self.gradient_clip_algorithm == "value" else None

    @property
    def log_every(self) -> int:
        """The steps between two rows of step values, 0 for none."""
        return 50 if self.log_every_n_steps is None else self.log_every_n_steps

    @property
    def sanity_steps(self) -> int | float:
        """The validation batches to run before training, inf for all."""
        steps = self.num_sanity_val_steps
        return 2 if steps is None else float("inf") if steps == -1 else steps

    @property
    def validation_seconds(self) -> float | None:
        """The time between two validations, or None if they are not due by time."""
        interval = self.val_check_interval
        if interval is None or isinstance(interval, (int, float)):
            return None
        return to_seconds(interval, name="val_check_interval")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole_number(settings: Settings, name: str, least: int) -> list[str]:
    value, is_optional = getattr(settings, name), name in MAY_BE_NONE
    if (value is None and is_optional) or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return []
    if name == "num_sanity_val_steps" and value == float("inf"):  # as the attribute shows -1
        return []
    meaning = f" (-1 is {'all' if name == 'num_sanity_val_steps' else 'unlimited'})" if least == -1 else ""
    problem = f"{name}={value!r}: expected an integer of at least {least}{meaning}{', or None' if is_optional else ''}"
    if name == "accumulate_grad_batches" and isinstance(value, dict):
        problem += f"; for a number that changes pass GradientAccumulationScheduler({value!r}) in callbacks="
    return [problem]


def _limit(settings: Settings, name: str) -> list[str]:
    value = getattr(settings, name)
    if value is None or (_is_number(value) and value >= 0 and (isinstance(value, int) or value <= 1.0)):
        return []
    return [f"{name}={value!r}: expected a number of batches (int), a fraction from 0.0 to 1.0 (float) or None for all"]
