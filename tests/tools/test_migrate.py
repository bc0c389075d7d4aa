"""`trainwright migrate` rewrites imports, keeps the other bytes, and names missing counterparts."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from package import ROOT

from trainwright.__main__ import check_names
from trainwright.tools.migrate import migrate, migrate_command

SCRIPTS = ROOT.parent / "tests" / "examples"


def rewritten(text: str) -> str:
    migrated, remarks = migrate(text)
    assert remarks == []
    exec(migrated, {})  # every import finds its names
    return migrated


@pytest.mark.parametrize(("before", "after"), [
    ("import lightning as L", "import trainwright as L"),
    ("import lightning.pytorch as pl", "import trainwright as pl"),
    ("import pytorch_lightning", "import trainwright as pytorch_lightning"),
    ("import os, pytorch_lightning as pl, sys", "import os, trainwright as pl, sys"),
    ("import pytorch_lightning.callbacks", "import trainwright as pytorch_lightning"),
    ("import lightning.pytorch.callbacks.timer as t", "import trainwright.callbacks as t"),
    ("from lightning import pytorch as pl", "from trainwright import pytorch as pl"),
    ("from lightning.pytorch import callbacks", "from trainwright import callbacks"),
    ("from pytorch_lightning import Trainer as T", "from trainwright import Trainer as T"),
    ("from lightning.pytorch.callbacks.timer import Timer", "from trainwright.callbacks import Timer"),
    ("from lightning.pytorch.strategies import DDPStrategy", "from trainwright.strategies import DDPStrategy"),
    ("from pytorch_lightning.cli import LightningCLI", "from trainwright.cli import LightningCLI"),
    ("from lightning.fabric import seed_everything", "from trainwright import seed_everything"),
    ("from lightning_fabric.loggers import CSVLogger", "from trainwright.loggers import CSVLogger"),
    (
        "from lightning.pytorch.trainer.states import TrainerFn",
        "from trainwright.trainer.run_position import TrainerFn",
    ),
    (
        "from lightning.pytorch.core.optimizer import LightningOptimizer",
        "from trainwright.engine.prepared import PreparedOptimizer as LightningOptimizer",
    ),
    (
        "from lightning.pytorch.utilities.exceptions import MisconfigurationException",
        "from builtins import ValueError as MisconfigurationException",
    ),
    (
        "from lightning.pytorch.utilities.model_summary import ModelSummary",
        "from trainwright.callbacks.model_summary import LayerSummary as ModelSummary",
    ),
    ("import accelerate", "import trainwright as accelerate"),
    ("from accelerate.utils import \\\n    set_seed", "from trainwright import \\\n    set_seed"),
    (
        "if True:\r\n\tfrom lightning.pytorch.utilities import grad_norm, rank_zero_only  # both\r\nx = 1",
        (
            "if True:\r\n\tfrom trainwright.gradient_norms import grad_norm\r\n"
            "\tfrom trainwright import rank_zero_only  # both\r\nx = 1"
        ),
    ),
    (
        "if True: a = 'é'; from lightning.pytorch.utilities import grad_norm, rank_zero_only; b = 2",
        (
            "if True: a = 'é'; from trainwright.gradient_norms import grad_norm; "
            "from trainwright import rank_zero_only; b = 2"
        ),
    ),
    (
        "from lightning.pytorch.callbacks import (\n    Timer,  # stays\n    EarlyStopping as Stop,\n)\n",
        "from trainwright.callbacks import (\n    Timer,  # stays\n    EarlyStopping as Stop,\n)\n",
    ),
])  # fmt: skip
def test_imports_are_rewritten(before: str, after: str) -> None:
    assert rewritten(before) == after


@pytest.mark.parametrize("text", ["import lightning_utilities as L", "from .lightning import a", "x = 'lightning'", ""])
def test_other_texts_stay(text: str) -> None:
    assert migrate(text) == (text, [])


def test_a_script_of_lightning_becomes_ours() -> None:
    ours = (SCRIPTS / "lightning_style.py").read_text()
    theirs = ours.replace("import trainwright as L", "import lightning as L").replace(
        "from trainwright.", "from lightning.pytorch."
    )
    assert theirs != ours
    assert migrate(theirs) == (ours, [])


@pytest.mark.parametrize(("text", "name", "advice"), [
    ("from lightning.pytorch.plugins.io import AsyncCheckpointIO", "AsyncCheckpointIO", "async_save=True"),
    ("from lightning.pytorch.accelerators import Accelerator", "Accelerator", "trainer.accelerator is"),
    ("from lightning.fabric import Fabric", "lightning.fabric.Fabric", "tw.Accelerator"),
    ("import lightning.fabric as fabric", "lightning.fabric", "tw.Accelerator"),
    ("import lightning.pytorch.utilities.seed as s", "lightning.pytorch.utilities.seed", "no counterpart"),
    ("from pytorch_lightning.tuner.lr_finder import _LRFinder", "_LRFinder", "private"),
    ("from lightning.pytorch.utilities import Nonsense", "Nonsense", "no counterpart"),
    ("from accelerate.logging import get_logger", "accelerate.logging.get_logger", "logging.getLogger"),
    ("from accelerate.tracking import GeneralTracker", "GeneralTracker", r"subclass tw\.Logger"),
])  # fmt: skip
def test_a_name_without_counterpart_stays_and_is_listed(text: str, name: str, advice: str) -> None:
    migrated, (remark,) = migrate(f"\n{text}\n")
    assert migrated == f"\n{text}\n"
    assert (remark.line, name in remark.name) == (2, True)
    assert re.search(advice, remark.advice)


def test_a_statement_keeps_the_names_without_counterpart() -> None:
    migrated, (remark,) = migrate("from lightning import Trainer, Fabric, LightningModule as M")
    assert migrated == "from trainwright import Trainer, LightningModule as M\nfrom lightning import Fabric"
    assert remark.name == "lightning.Fabric"


def test_uses_of_missing_names_are_listed() -> None:
    _, remarks = migrate(
        "import pytorch_lightning as pl, accelerate\n"
        "pl.Trainer().fit(pl.callbacks.Timer.on_fit_end)\n"
        "pl.utilities.rank_zero.rank_zero_only()\n"
        "pl.utilities.grad_norm\n"
        "pl.Fabric.launch\n"
        "accelerate.utils.set_seed(1)\n"
    )
    assert [remark[:2] for remark in remarks] == [
        (3, "pl.utilities.rank_zero.rank_zero_only"),
        (4, "pl.utilities.grad_norm"),
        (5, "pl.Fabric.launch"),
        (6, "accelerate.utils.set_seed"),
    ]
    assert [remark.advice for remark in remarks] == [
        "use pl.rank_zero_only",
        "use trainwright.gradient_norms.grad_norm",
        "for your own loop use pl.Accelerator",
        "use accelerate.set_seed",
    ]


def test_the_command_prints_a_difference_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os\nimport lightning as L\nL.Fabric()")
    assert migrate_command([str(path)], check_names) == 1
    assert path.read_text() == "import os\nimport lightning as L\nL.Fabric()"
    assert capsys.readouterr().out == (
        f"--- {path}\n+++ {path}\n@@ -1,3 +1,3 @@\n import os\n-import lightning as L\n+import trainwright as L\n L.Fabric()\n"
        f"\\ No newline at end of file\n{path}:3: L.Fabric: for your own loop use L.Accelerator\n"
    )


def test_write_changes_only_the_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, link = tmp_path / "train.py", tmp_path / "link.py"
    kept = b"# -*- coding: latin-1 -*-\r\nx = '\xe9'\r\n\x0c\r\nimport "
    path.write_bytes(kept + b"lightning as L")
    path.chmod(0o750)
    link.symlink_to(path)
    assert migrate_command(["--write", str(link)], check_names) == 0
    assert path.read_bytes() == kept + b"trainwright as L"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert migrate_command([str(link), "--write"], check_names) == 0
    assert capsys.readouterr().out == f"{link}: rewritten\n{link}: no import to rewrite\n"
    assert sorted(os.listdir(tmp_path)) == ["link.py", "train.py"]


@pytest.mark.parametrize(("name", "data", "message"), [
    ("a.py", b"import lightning\nx = (\n", r"a\.py:2: '\(' was never closed\. Nothing was written"),
    ("a.py", b"\nfrom lightning.pytorch import *", r"a\.py:2: `from lightning\.pytorch import \*` hides the names"),
    ("a.py", b"x = '\xff'", r"a\.py:1: invalid or missing encoding declaration\. Nothing was written"),
    ("a.py", b"\n\nx = '\xff'", r"a\.py: 'utf-8' codec can't decode byte 0xff.*Nothing was written"),
    ("a.py", b"import lightning\0", r"null bytes.*Nothing was written"),
    ("a.ipynb", b"{}", r"a\.ipynb: this is a notebook\. Save it as a script"),
    ("missing.py", None, r"missing\.py: No such file or directory"),
])  # fmt: skip
def test_a_script_that_cannot_be_migrated_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(SystemExit) as ended:
        migrate_command([str(path), "--write"], check_names)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, path.exists()) == (2, "", data is not None)
    assert re.search(message, printed.err)
    assert data is None or path.read_bytes() == data
