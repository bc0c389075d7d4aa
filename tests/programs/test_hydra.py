"""Hydra: an app whose configuration makes the Trainer, on two processes and in a sweep, and a module with a
configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forked import run_python
from started import Started, python
from torch import nn

import trainwright as tw

hydra = pytest.importorskip("hydra")
omegaconf = pytest.importorskip("omegaconf")
pytestmark = pytest.mark.slow

APP = """
import json, logging, os, pathlib, time
import hydra
from omegaconf import DictConfig
import trainwright as tw
from small import Classifier, make_loader

LOG = logging.getLogger(__name__)
time.sleep(1.1 * int(os.environ.get("RANK", 0)))  # Hydra names its folders by the second


@hydra.main(version_base=None, config_path="conf", config_name="config")
def app(cfg: DictConfig) -> float:
    saver = tw.ModelCheckpoint(monitor="val_loss")
    trainer = tw.Trainer(**cfg.trainer, callbacks=[saver])
    module = Classifier(lr=cfg.lr)
    trainer.fit(module, make_loader(24), make_loader(12))
    LOG.info("rank %d is done", trainer.global_rank)
    told = {
        "rank": trainer.global_rank, "world": trainer.world_size, "lr": cfg.lr, "steps": trainer.global_step,
        "folder": os.getcwd(), "log_dir": os.path.isdir(trainer.log_dir), "best": os.path.isdir(saver.best_model_path),
        "absolute": os.path.abspath(saver.best_model_path),
    }
    pathlib.Path(cfg.told, f"{cfg.lr}-{trainer.world_size}-{trainer.global_rank}.json").write_text(json.dumps(told))
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    app()
"""
CONFIG = """
lr: 0.05
told: ???
trainer:
  max_epochs: 1
  devices: 1
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
hydra:
  job_logging:
    formatters: {simple: {format: "%(message)s"}}
"""


def run_app(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> list[dict[str, object]]:
    (folder / "conf").mkdir(parents=True)
    (folder / "conf" / "config.yaml").write_text(CONFIG)
    (folder / "app.py").write_text(APP)
    told = folder.parent / "told"
    told.mkdir()
    started = Started(python("app.py", *overrides, f"told={told}", *options), folder)
    try:
        assert started.wait() == 0, started.stdout + started.stderr
        started.check_nothing_left()
    finally:
        started.close()
    (folder / "printed").write_text(started.stdout + started.stderr)
    return [json.loads(each.read_text()) for each in sorted(told.iterdir())]


@pytest.mark.launch
def test_a_sweep_starts_processes_in_its_folders(tmp_path: Path) -> None:
    """Both processes run the same sweep. A job has one folder for both of them."""
    found = run_app(tmp_path / "app", "-m", "trainer.devices=2", "lr=0.02,0.03")
    assert [(each["lr"], each["rank"], each["steps"]) for each in found] == [
        (0.02, 0, 3), (0.02, 1, 3), (0.03, 0, 3), (0.03, 1, 3)
    ]  # fmt: skip
    assert all(each["log_dir"] and each["best"] for each in found), found
    assert found[0]["absolute"] == found[1]["absolute"] != found[2]["absolute"] == found[3]["absolute"]
    assert len(list((tmp_path / "app" / "multirun").glob("*/*"))) == 1
    assert "[rank1] rank 1 is done" in (tmp_path / "app" / "printed").read_text()


@pytest.mark.launch
def test_hydras_working_directory_has_the_outputs(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    found = run_app(folder, "trainer.devices=2", "hydra.job.chdir=True", options=("--config-name", "config"))
    first, second = found
    assert (first["world"], second["world"]) == (2, 2)
    assert first["folder"] == second["folder"]
    assert all(each["log_dir"] and each["best"] for each in found), found
    assert len(list((folder / "outputs").glob("*/*"))) == 1


class Configured(tw.Module):
    def __init__(self, cfg: omegaconf.DictConfig) -> None:  # type: ignore[name-defined]
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(8, cfg.model.width)

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()  # type: ignore[index]

    def configure_optimizers(self) -> object:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.cfg.lr)


def test_a_module_keeps_its_configuration(tmp_path: Path) -> None:
    from small import QUIET, make_loader

    text = "{model: {width: 5, sizes: [1, 2]}, lr: 0.1, name: '${model.width} wide'}"
    module = Configured(omegaconf.OmegaConf.create(text))
    trainer = tw.Trainer(max_epochs=1, **{**QUIET, "logger": tw.CSVLogger(tmp_path)})
    trainer.fit(module, make_loader(8))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = Configured.load_from_checkpoint(tmp_path / "end.ckpt")
    assert isinstance(again.hparams.cfg, omegaconf.DictConfig)
    assert again.hparams.cfg == module.hparams.cfg
    assert again.hparams.cfg.name == "5 wide"
    assert torch.equal(again.net.weight, module.net.weight)
    assert "width" in "".join(each.read_text() for each in tmp_path.rglob("hparams.yaml"))
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]!r}
from test_hydra import Configured
print(Configured.load_from_checkpoint({str(tmp_path / "end.ckpt")!r}).hparams.cfg.model.sizes)
"""
    done = run_python("-c", script, folder=tmp_path)
    assert done.stdout == "[1, 2]\n", done.stderr
