"""Studies of optuna: trials that are pruned in a callback, and ranks whose studies chose different settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from small import QUIET, Classifier, make_loader

import trainwright as tw

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow


class Prunes(tw.Callback):
    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            return
        self.trial.report(float(trainer.callback_metrics["val_loss"]), trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def study(seed: int | None) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed), pruner=pruner)


def objective(trial: Any) -> float:
    module = Classifier(lr=trial.suggest_float("lr", 1e-5, 0.3, log=True))
    trainer = tw.Trainer(max_epochs=3, callbacks=[Prunes(trial)], **QUIET)
    trainer.fit(module, make_loader(), make_loader(20))
    return float(trainer.callback_metrics["val_loss"])


def test_trials_are_pruned() -> None:
    found = study(1)
    found.optimize(objective, n_trials=8)
    states = [each.state for each in found.trials]
    assert set(states) == {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED}
    assert found.best_value == min(each.value for each in found.trials if each.state.name == "COMPLETE")


def ranks_with_studies_of_their_own(folder: Path) -> dict[str, Any]:
    import os

    steps = []

    class Counts(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    trial = study(int(os.environ["RANK"])).ask()
    try:
        trainer = tw.Trainer(max_epochs=1, **{**QUIET, "devices": "auto"})
        trainer.fit(Counts(lr=trial.suggest_float("lr", 1e-5, 0.3, log=True)), make_loader())
    except ValueError as error:
        return {"error": str(error), "steps": len(steps)}
    return {"error": "", "steps": len(steps)}


def test_ranks_that_chose_differently_are_refused(tmp_path: Path) -> None:
    for found in run_job(ranks_with_studies_of_their_own, 2, tmp_path):
        assert found["steps"] == 0
        assert "the optimizers differ between ranks" in found["error"]
        assert "pass rank 0's to the others" in found["error"]
