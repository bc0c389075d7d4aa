"""The checkpoint that ckpt_path means, damaged checkpoints, and the folder of a resumed run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ACCELERATOR, ON_HOST, QUIET, SAVING, Classifier, assert_equal, make_loader, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainwright as tw
from trainwright.checkpoint.discovery import find_candidates, find_checkpoints

QUIET_BAR: dict[str, Any] = {"accelerator": ACCELERATOR, "enable_progress_bar": False, "enable_model_summary": False}


def fit(folder: Path, epochs: int, ckpt_path: Any = None, *, callbacks: Any = None, **kwargs: Any) -> tw.Trainer:
    saving = callbacks or tw.ModelCheckpoint(str(folder), save_top_k=-1, filename="{epoch}")
    trainer = tw.Trainer(max_epochs=epochs, callbacks=saving, **SAVING)
    trainer.fit(Classifier(), make_loader(), ckpt_path=ckpt_path, **kwargs)
    return trainer


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def drop(path: Path) -> None:
    path.unlink()


DAMAGES = {
    "a flipped bit": (
        lambda folder: flip(folder / "model-00000.safetensors"),
        "model-00000.safetensors does not match",
    ),
    "a missing file": (lambda folder: drop(folder / "rank-00000.json"), "rank-00000.json is missing"),
    "a missing manifest": (lambda folder: drop(folder / "manifest.json"), r"has no manifest\.json"),
    "half a manifest": (lambda folder: (folder / "manifest.json").write_text('{"sha'), "does not match its own digest"),
    "nothing in it": (lambda folder: [drop(each) for each in folder.iterdir()], r"has no manifest\.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_is_damaged(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ "last" says so and changes nothing, "auto" goes on from the one before, and neither removes anything."""
    saving = {"save_top_k": -1, "filename": "{epoch}-{step}"}
    whole = weights(fit(tmp_path / "whole", 3).model)
    fit(tmp_path, 2, callbacks=tw.ModelCheckpoint(str(tmp_path), **saving))
    make, what = DAMAGES[damage]
    newest = tmp_path / "epoch=1-step=22.ckpt"
    make(newest)
    left = sorted(os.listdir(newest))
    for call in ("fit", "test"):
        trainer = tw.Trainer(
            max_epochs=3,
            callbacks=tw.ModelCheckpoint(str(tmp_path), **saving),
            **SAVING,
        )
        module = Classifier()
        before = weights(module)
        with pytest.raises(
            tw.CheckpointError, match=rf"epoch=1-step=22\.ckpt.*{what}.*ckpt_path='auto' falls back"
        ) as error:
            getattr(trainer, call)(module, make_loader(), ckpt_path="last")
        assert str(error.value).count("epoch=1-step=22.ckpt:") <= 1
        assert_equal(weights(module), before)
    with pytest.warns(UserWarning, match=rf"skips .*epoch=1-step=22\.ckpt, which is damaged and is left .*{what}"):
        trainer = fit(tmp_path, 3, "auto", callbacks=tw.ModelCheckpoint(str(tmp_path), **saving))
    assert trainer.resume_source == f"{tmp_path}/epoch=0-step=11.ckpt"
    assert_equal(weights(trainer.model), whole)
    assert sorted(os.listdir(newest)) == left
    names = {Path(each.path).name for each in find_checkpoints(str(tmp_path))}
    assert {"epoch=0-step=11.ckpt", "epoch=1-step=22-v1.ckpt", "epoch=2-step=33.ckpt"} <= names
    # With no intact checkpoint, a fit starts from scratch, and an evaluation raises.
    for name in names:
        flip(tmp_path / name / "state.json")
    capsys.readouterr()
    with pytest.warns(UserWarning, match="skips .* which is damaged"):
        fresh = fit(tmp_path, 1, "auto", callbacks=tw.ModelCheckpoint(str(tmp_path), **saving))
    assert (fresh.resume_source, fresh.global_step) == (None, 11)
    assert (
        f"no checkpoint found in {tmp_path} that a fit can resume from; starting from scratch"
        in capsys.readouterr().out
    )


def test_what_auto_and_last_say_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(tmp_path, 1, "auto")
    assert trainer.resume_source is None
    assert "starting from scratch" in capsys.readouterr().out
    again = fit(tmp_path, 1, "auto")  # it has ended
    assert (again.resume_source, again.global_step) == (f"{tmp_path}/epoch=0.ckpt", 11)
    other = tw.Trainer(callbacks=tw.ModelCheckpoint(str(tmp_path / "none")), **SAVING)
    for name, what in (("last", "no checkpoint was saved in"), ("auto", "no complete checkpoint found in")):
        with pytest.raises(FileNotFoundError, match=rf"ckpt_path='{name}': {what} {tmp_path}/none") as caught:
            other.test(Classifier(), make_loader(), ckpt_path=name)
        assert isinstance(caught.value, tw.CheckpointError)
    for missing in (str(tmp_path / "missing.ckpt"), "lst", "Auto"):
        with pytest.raises(FileNotFoundError, match=r"it does not exist.*Or pass 'best', 'last' or 'auto'"):
            other.fit(Classifier(), make_loader(), ckpt_path=missing)
    with pytest.raises(ValueError, match=r"ckpt_path='auto' needs a ModelCheckpoint, but .* has none"):
        tw.Trainer(**QUIET).fit(Classifier(), make_loader(), ckpt_path="auto")
    trial = tw.Trainer(fast_dev_run=True, **QUIET_BAR)
    trial.fit(Classifier(), make_loader(), ckpt_path="auto")
    assert trial.global_step == 1


def test_what_is_no_damage_is_an_error(tmp_path: Path) -> None:
    """Another model or an unknown format is an error: a fall back would lose an intact checkpoint."""
    fit(tmp_path, 2)

    class Wider(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.more = tw.Module()
            self.more.layer = self.net[0]
            self.extra = type(self.net[0])(2, 2)

    trainer = tw.Trainer(callbacks=tw.ModelCheckpoint(str(tmp_path)), **SAVING)
    with pytest.raises(tw.CheckpointError, match="another model"):
        trainer.fit(Wider(), make_loader(), ckpt_path="auto")
    manifest = tmp_path / "epoch=1.ckpt" / "manifest.json"
    content = json.loads(manifest.read_bytes())["manifest"]
    content["format_version"] = 99
    text = json.dumps(content, separators=(",", ":")).encode()
    manifest.write_bytes(b'{"sha256": "%s", "manifest": ' % hashlib.sha256(text).hexdigest().encode() + text + b"}\n")
    for name in ("auto", "last"):
        with pytest.raises(tw.CheckpointError, match=r"epoch=1\.ckpt.*format version 99; this trainwright reads"):
            fit(tmp_path, 3, name)


def test_fit_ignores_checkpoints_with_only_weights(tmp_path: Path) -> None:
    """A fit resumes from the newest full checkpoint of all folders, and an evaluation uses the newest weights."""

    def both() -> list[tw.Callback]:
        return [
            tw.ModelCheckpoint(str(tmp_path / "a"), every_n_train_steps=6, filename="{step}"),
            tw.ModelCheckpoint(str(tmp_path / "b"), every_n_train_steps=4, filename="{step}", save_weights_only=True),
            tw.ModelCheckpoint(str(tmp_path / "a"), every_n_train_steps=3, filename="w-{step}", save_weights_only=True),
        ]

    fit(tmp_path, 1, callbacks=both())
    assert sorted(path.name for each in "ab" for path in (tmp_path / each).iterdir()) == [
        "step=6.ckpt", "step=8.ckpt", "w-step=9.ckpt",
    ]  # fmt: skip
    assert [each.weights_only for each in find_candidates(str(tmp_path / "a"))] == [False, True]
    resumed = fit(tmp_path, 1, "last", callbacks=both())
    assert resumed.resume_source == f"{tmp_path}/a/step=6.ckpt"
    tested = tw.Trainer(callbacks=both(), **SAVING)
    tested.test(Classifier(), make_loader(), ckpt_path="last", verbose=False)
    # Both runs have saved there, and the resumed run's checkpoint is newer.
    assert tested.ckpt_path == f"{tmp_path}/a/w-step=9-v1.ckpt"
    shutil.rmtree(tmp_path / "a" / "step=6.ckpt")
    assert fit(tmp_path, 1, "auto", callbacks=both()).resume_source is None
    # At one step the full checkpoint wins, although the weights were saved after it.
    saving = [tw.ModelCheckpoint(str(tmp_path / "c"), filename="a"),
              tw.ModelCheckpoint(str(tmp_path / "c"), filename="z-weights", save_weights_only=True)]  # fmt: skip
    fit(tmp_path, 1, callbacks=saving)
    assert fit(tmp_path, 2, "last", callbacks=[saving[0]]).resume_source == f"{tmp_path}/c/a.ckpt"


def test_verify_chooses_the_check_of_digests(tmp_path: Path) -> None:
    trainer = fit(tmp_path, 1)
    path = f"{tmp_path}/epoch=0.ckpt"
    flip(tmp_path / "epoch=0.ckpt" / "model-00000.safetensors")
    accelerator = tw.Accelerator(cpu=ON_HOST)
    accelerator.prepare(module := Classifier(), module.configure_optimizers())
    calls = {
        "fit": lambda verify: fit(tmp_path / "other", 2, path, verify=verify),
        "test": lambda verify: tw.Trainer(**QUIET).test(Classifier(), make_loader(), ckpt_path=path, verify=verify),
        "validate": lambda verify: trainer.validate(Classifier(), make_loader(), ckpt_path=path, verify=verify),
        "predict": lambda verify: trainer.predict(Classifier(), make_loader(), ckpt_path=path, verify=verify),
        "load": lambda verify: Classifier.load_from_checkpoint(path, verify=verify),
        "load_state": lambda verify: accelerator.load_state(path, verify=verify),
    }
    for name, call in calls.items():
        with pytest.raises(tw.CheckpointError, match=r"model-00000\.safetensors does not match its digest"):
            call("full")
        for verify in ("size", "off"):
            call(verify)
        with pytest.raises(ValueError, match=r"verify='fast' is unknown; choose from full, size, off"):
            call("fast")
        assert name
    with pytest.raises(ValueError, match="verify=True is unknown"):
        tw.Trainer(**QUIET).fit(Classifier(), make_loader(), verify=True)  # type: ignore[arg-type]


def logged(folder: Path, epochs: int, ckpt_path: Any = None, logger: Any = None, **settings: Any) -> tw.Trainer:
    trainer = tw.Trainer(
        max_epochs=epochs,
        default_root_dir=folder,
        logger=logger,
        log_every_n_steps=2,
        callbacks=tw.ModelCheckpoint(save_top_k=-1, every_n_train_steps=5),
        **{**QUIET_BAR, **settings},
    )
    trainer.fit(Classifier(), make_loader(), ckpt_path=ckpt_path)
    return trainer


def test_a_run_goes_on_in_the_newest_run_folder_by_number(tmp_path: Path) -> None:
    for _ in range(2):
        logged(tmp_path, 1)
    logs = tmp_path / "trainwright_logs"
    (logs / "version_1").rename(logs / "version_10")
    logged(tmp_path, 1).log_dir  # version_11
    (logs / "version_11").rename(logs / "version_9")
    (logs / "version_12" / "checkpoints").mkdir(parents=True)  # it was left before its first checkpoint
    os.utime(logs / "version_0")
    trainer = logged(tmp_path, 2, "auto")
    assert trainer.log_dir == f"{tmp_path}/trainwright_logs/version_10"
    assert trainer.resume_source == f"{trainer.log_dir}/checkpoints/epoch=0-step=10.ckpt"
    assert Path(trainer.checkpoint_callback.best_model_path).parent == logs / "version_10" / "checkpoints"
    assert logged(tmp_path, 2).log_dir == f"{logs}/version_13"  # a new run gets a new folder


def test_a_path_goes_on_or_branches_off(tmp_path: Path) -> None:
    whole = logged(tmp_path / "whole", 2)
    expected = Path(f"{whole.log_dir}/metrics.csv").read_bytes()
    run = logged(tmp_path / "part", 2, max_steps=17)
    first = tmp_path / "part" / "trainwright_logs" / "version_0"
    newest, older = (first / "checkpoints" / f"epoch={name}.ckpt" for name in ("1-step=15", "0-step=10"))
    assert run.log_dir == str(first)
    before = (first / "metrics.csv").read_bytes()
    branch = logged(tmp_path / "part", 2, older)
    assert branch.log_dir == f"{tmp_path}/part/trainwright_logs/version_1"
    assert (first / "metrics.csv").read_bytes() == before  # the rows of the other run stay
    # After the whole folder has moved, the run still belongs to it.
    (tmp_path / "part").rename(tmp_path / "moved")
    moved = Path(str(newest).replace("/part/", "/moved/"))
    resumed = logged(tmp_path / "moved", 2, moved)
    assert resumed.log_dir == str(tmp_path / "moved" / "trainwright_logs" / "version_0")
    assert Path(f"{resumed.log_dir}/metrics.csv").read_bytes() == expected
    assert_equal(weights(resumed.model), weights(whole.model))
    # A checkpoint of another root begins a run of this one.
    assert logged(tmp_path / "other", 2, moved).log_dir == f"{tmp_path}/other/trainwright_logs/version_0"


def test_a_resumed_run_keeps_versions_of_several_loggers(tmp_path: Path) -> None:
    def loggers() -> list[Any]:
        return [tw.CSVLogger(tmp_path, version=0), tw.TensorBoardLogger(tmp_path), tw.CSVLogger(tmp_path, name="other")]

    logged(tmp_path, 2, logger=loggers(), max_steps=17)
    resumed = logged(tmp_path, 2, "auto", logger=loggers())
    whole = logged(tmp_path / "whole", 2, logger=tw.CSVLogger(tmp_path / "whole"))
    expected = Path(f"{whole.log_dir}/metrics.csv").read_bytes()
    assert [each.version for each in resumed.loggers] == [0, 0, 0]
    for place in ("trainwright_logs", "other"):
        assert (tmp_path / place / "version_0" / "metrics.csv").read_bytes() == expected
    assert sorted(os.listdir(tmp_path / "other")) == ["version_0"]
    # The same trainer can resume its run. Without a logger that has a folder, checkpoints are in the root.
    bare = logged(tmp_path / "bare", 1, logger=False)
    assert bare.checkpoint_callback.dirpath == f"{tmp_path}/bare/checkpoints"
    again = logged(tmp_path / "bare", 2, "last", logger=False)
    assert again.resume_source == f"{tmp_path}/bare/checkpoints/epoch=0-step=10.ckpt"


def test_event_files_have_each_number_once(tmp_path: Path) -> None:
    """Rows that were logged at a checkpoint's step after the save, by runs that failed there, appear once too."""

    class Breaks(tw.Callback):
        def on_validation_end(self, trainer: tw.Trainer, module: Any) -> None:
            if trainer.global_step == 22:
                trainer.logger.flush()
                raise RuntimeError("here")

    def run(folder: Path, *callbacks: tw.Callback) -> dict[str, list[tuple[int, float]]]:
        trainer = tw.Trainer(
            max_epochs=3,
            default_root_dir=folder,
            logger=tw.TensorBoardLogger(folder),
            log_every_n_steps=2,
            callbacks=[tw.ModelCheckpoint(every_n_train_steps=11), *callbacks],
            **QUIET_BAR,
        )
        with pytest.raises(RuntimeError, match="here") if callbacks else contextlib.nullcontext():
            trainer.fit(Classifier(), make_loader(), make_loader(), ckpt_path="auto")
        assert trainer.logger.version == 0
        accumulator = EventAccumulator(trainer.log_dir, size_guidance={"scalars": 0})
        accumulator.Reload()
        scalars = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
        return {tag: sorted((each.step, each.value) for each in found) for tag, found in scalars.items()}

    whole = run(tmp_path / "whole")
    assert [step for step, _ in whole["val_loss"]] == [10, 21, 32]
    for _ in range(2):
        broken = run(tmp_path / "part", Breaks())
        assert [step for step, _ in broken["val_loss"]] == [10, 21]
    assert run(tmp_path / "part") == whole


def two_ranks(folder: Path) -> dict[str, Any]:
    def train(epochs: int, ckpt_path: str | None = None, module: Any = None) -> tw.Trainer:
        trainer = tw.Trainer(max_epochs=epochs, devices=2, default_root_dir=folder, log_every_n_steps=1,
                             callbacks=tw.ModelCheckpoint(save_top_k=-1), **QUIET_BAR)  # fmt: skip
        trainer.fit(module or Classifier(), make_loader(), ckpt_path=ckpt_path)
        return trainer

    rank = int(os.environ["RANK"])
    told: dict[str, Any] = {"first": train(2).log_dir}
    trainer = train(2, "auto")
    told["ended"] = (trainer.log_dir, trainer.global_step)
    path = Path(trainer.resume_source or "")
    trainer.engine.barrier()
    if rank == 0:
        flip(path / "model-00000.safetensors")
        flip(path / "state.json")
    trainer.engine.barrier()
    for name, model in (("last", None), ("auto", "wider")):
        module = Classifier()
        if model:
            module.extra = torch.nn.Linear(2, 2)
        try:
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                train(3, name, module)
        except tw.CheckpointError as error:
            told[name] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(3, "auto")
    told["said"] = [str(each.message) for each in caught if "auto' skips" in str(each.message)]
    told["resumed"] = (trainer.log_dir, trainer.resume_source, trainer.global_step)
    return told


def test_two_ranks_choose_alike(tmp_path: Path) -> None:
    first, second = run_job(two_ranks, 2, tmp_path)
    logs = f"{tmp_path}/trainwright_logs/version_0"
    (said,), none = first.pop("said"), second.pop("said")
    assert none == []
    assert "step=12.ckpt, which is damaged" in said
    assert first == second
    assert first["first"] == logs
    assert first["ended"] == (logs, 12)
    assert first["last"].count("step=12.ckpt: ") <= 2  # two ranks, so two file names
    assert "does not match its digest: it is damaged" in first["last"]
    assert first["auto"].count("extra.bias") == 1
    assert not first["auto"].startswith("rank 1")
    assert first["resumed"] == (logs, f"{logs}/checkpoints/epoch=0-step=6.ckpt", 18)


def test_auto_finds_an_earlier_run_if_something_was_logged_before(tmp_path: Path) -> None:
    def start(max_steps: int) -> tw.Trainer:
        logger = tw.CSVLogger(tmp_path)
        logger.log_hyperparams({"width": 8})  # begins a folder
        trainer = tw.Trainer(max_epochs=1, max_steps=max_steps, logger=logger, **QUIET_BAR)
        trainer.fit(Classifier(), make_loader(), ckpt_path="auto")
        return trainer

    assert start(3).resume_source is None
    resumed = start(6)
    assert resumed.resume_source == f"{tmp_path}/trainwright_logs/version_0/checkpoints/epoch=0-step=3.ckpt"
    assert resumed.global_step == 6
    assert start(7).resume_source == f"{tmp_path}/trainwright_logs/version_0/checkpoints/epoch=0-step=6.ckpt"


def test_a_refused_run_leaves_the_rows(tmp_path: Path) -> None:
    trainer = logged(tmp_path, 1)
    before = Path(f"{trainer.log_dir}/metrics.csv").read_bytes()

    class Other(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    again = tw.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=tw.ModelCheckpoint(), **QUIET_BAR)
    with pytest.raises(tw.CheckpointError, match="saved by AdamW"):
        again.fit(Other(), make_loader(), ckpt_path="auto")
    assert Path(f"{trainer.log_dir}/metrics.csv").read_bytes() == before
    assert sorted(os.listdir(f"{tmp_path}/trainwright_logs")) == ["version_0"]
    again.fit(Classifier(), make_loader())
    assert again.log_dir == f"{tmp_path}/trainwright_logs/version_1"


def test_the_folder_of_the_checkpoints_may_hold_the_logs_too(tmp_path: Path) -> None:
    for epochs in (1, 2):
        trainer = tw.Trainer(
            max_epochs=epochs, default_root_dir=tmp_path, callbacks=tw.ModelCheckpoint(tmp_path), **QUIET_BAR
        )
        trainer.fit(Classifier(), make_loader(), ckpt_path="auto")
        assert trainer.global_step == 11 * epochs
    assert (tmp_path / "trainwright_logs").is_dir()
