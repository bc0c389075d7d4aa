"""ModelCheckpoint: which epochs are saved, which of them are kept, and where."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.store import is_checkpoint, remove_checkpoint, same_place, sweep_temporaries

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer

SUFFIX = ".ckpt"
FIELD = r"\{([^{}:]+)(:[^{}]*)?\}"
"""A field of a file name's template: a name and, if wanted, its format."""


class ModelCheckpoint(Callback):
    """Saves at the end of an epoch, after its validation, and keeps the best.

    Args:
        dirpath: where to save, a path or an fsspec URL; by default `checkpoints` in the logger's folder of the run.
        filename: a template of the name, with {epoch}, {step} and metrics, such as "{epoch}-{val_acc:.3f}".
        monitor: the metric to judge by; None keeps the newest.
        mode: "min" or "max": which value of it is better.
        save_top_k: how many to keep: -1 for all, 0 for none; without monitor -1, 0 or 1.
        save_last: keep the newest too, whatever its metric.
        every_n_epochs: epochs between two saves.
        save_weights_only: leave out optimizers and counters; a run cannot be resumed from such a checkpoint.
        auto_insert_metric_name: write {epoch} as "epoch=3" rather than "3".

    A checkpoint whose metric is not finite never counts among the best. The newest checkpoint, and the one that the run was
    resumed from, are never deleted before another one is there.
    """

    runs_last = True

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        *,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_epochs: int = 1,
        save_weights_only: bool = False,
        auto_insert_metric_name: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is unknown; choose from min, max.")
        if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
            raise ValueError(f"save_top_k={save_top_k!r} is not accepted; pass a number of checkpoints, or -1 for all.")
        if monitor is None and save_top_k > 1:
            raise ValueError(
                f"save_top_k={save_top_k} needs a metric to judge by; pass monitor='val_loss' with a name that you log, or "
                "save_top_k=1 (the newest), 0 or -1."
            )
        if re.sub(FIELD, "", filename or "").strip("{}") != re.sub(FIELD, "", filename or ""):
            raise ValueError(
                f"filename={filename!r} has a brace without its pair; write fields as {{epoch}} or {{val_loss:.3f}}."
            )
        if isinstance(every_n_epochs, bool) or not isinstance(every_n_epochs, int):
            raise TypeError(f"every_n_epochs={every_n_epochs!r} is no whole number; pass a number of epochs.")
        for name, text in (("filename", filename), ("monitor", monitor)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name}={text!r} is a {type(text).__name__}; accepted are a str and None.")
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs={every_n_epochs} is below 1; pass a number of epochs.")
        self.dirpath = str(dirpath).rstrip("/") if dirpath is not None else None
        self.filename = filename if filename is not None else "{epoch}-{step}"
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self.every_n_epochs, self.save_weights_only = every_n_epochs, save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.best_k_models: dict[str, float] = {}
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.last_model_path = ""

    @property
    def state_key(self) -> str:
        settings = ("monitor", "mode", "save_top_k", "every_n_epochs", "filename")
        return f"ModelCheckpoint({', '.join(f'{name}={getattr(self, name)}' for name in settings)})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_k_models": dict(self.best_k_models),
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the kept checkpoints, as far as they still exist in this run's own folder."""

        def is_ours(path: str) -> bool:
            return same_place(path.rpartition("/")[0], self.dirpath or "") and is_checkpoint(path)

        self.best_k_models = {path: score for path, score in state["best_k_models"].items() if is_ours(path)}
        self.last_model_path = state["last_model_path"] if is_ours(state["last_model_path"]) else ""
        self._judge()

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if self.dirpath is None and stage == "fit":
            self.dirpath = f"{trainer.log_dir or trainer.default_root_dir}/checkpoints"
        if stage == "fit" and trainer.is_global_zero and self.dirpath is not None:
            sweep_temporaries(self.dirpath)  # what killed writers have left

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0 and (self.save_top_k or self.save_last):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        """Collective: every rank decides alike, by rank 0's score."""
        score = self._score(trainer)
        is_best = self._is_among_best(score)
        if not is_best and not self.save_last:
            return
        path = trainer.engine.agreed(self._free_path(trainer))
        # The state that is saved with it knows of itself: a resumed run finds its own checkpoint among the kept ones.
        kept_before, last_before = dict(self.best_k_models), self.last_model_path
        dropped = self._admit(path, score) if is_best else []
        self.last_model_path = path
        self._judge()
        try:
            is_saved = trainer.save_checkpoint(path, self.save_weights_only)
        except BaseException:
            self.best_k_models, self.last_model_path = kept_before, last_before
            self._judge()
            raise
        if last_before and last_before not in self.best_k_models and last_before not in dropped:
            dropped.append(last_before)
        for each in dropped if is_saved and trainer.is_global_zero else ():
            if not same_place(each, trainer.resume_source or "") and is_checkpoint(each):
                remove_checkpoint(each)

    def _score(self, trainer: Trainer) -> float | None:
        if self.monitor is None:
            return None
        return float(trainer.engine.agreed(str(trainer.monitored(self.monitor, "ModelCheckpoint"))))

    def _is_among_best(self, score: float | None) -> bool:
        if self.save_top_k == 0 or (score is not None and not math.isfinite(score)):
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k or score is None:
            return True
        return self._rank(score) < max(self._rank(each) for each in self.best_k_models.values())

    def _admit(self, path: str, score: float | None) -> list[str]:
        """Take a checkpoint among the kept ones; return those that it pushes out."""
        self.best_k_models[path] = score if score is not None else 0.0
        if self.save_top_k == -1 or len(self.best_k_models) <= self.save_top_k:
            return []
        others = [each for each in self.best_k_models if each != path]
        worst = max(others, key=lambda each: self._rank(self.best_k_models[each]))
        del self.best_k_models[worst]
        return [worst]

    def _judge(self) -> None:
        """Say which of the kept ones is the best: the newest where nothing is monitored."""
        if not self.best_k_models:
            self.best_model_path, self.best_model_score = "", None
        elif self.monitor is None:
            self.best_model_path, self.best_model_score = list(self.best_k_models)[-1], None
        else:
            self.best_model_path = min(self.best_k_models, key=lambda path: self._rank(self.best_k_models[path]))
            self.best_model_score = self.best_k_models[self.best_model_path]

    def _rank(self, score: float) -> float:
        return score if self.mode == "min" else -score

    def _free_path(self, trainer: Trainer) -> str:
        """Return the path for this save; a name that is taken, by another run, gets a version."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        name = self.format_name({**values, "epoch": trainer.current_epoch, "step": trainer.global_step})
        path, version = f"{self.dirpath}/{name}{SUFFIX}", 1
        while is_checkpoint(path):
            path, version = f"{self.dirpath}/{name}-v{version}{SUFFIX}", version + 1
        return path

    def format_name(self, values: dict[str, Any]) -> str:
        """Return the file name that the template gives with these values.

        Raises:
            ValueError: the template asks for a metric that was not logged.
        """

        def written(match: re.Match[str]) -> str:
            name, spec = match.group(1), match.group(2) or ""
            if name not in values:
                raise ValueError(
                    f"filename={self.filename!r} asks for {name!r}, which was not logged; there are "
                    f"{', '.join(sorted(values))}."
                )
            text = format(values[name], spec[1:])
            label = name.replace("/", "_")
            return f"{label}={text}" if self.auto_insert_metric_name else text

        return re.sub(FIELD, written, self.filename)

    def __repr__(self) -> str:
        return f"ModelCheckpoint({json.dumps(self.monitor)}, mode={self.mode!r}, save_top_k={self.save_top_k})"
