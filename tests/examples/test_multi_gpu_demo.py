"""The example examples/multi_gpu_demo: the script on the ranks of a job, and the notebook in a real kernel.

python tests/examples/test_multi_gpu_demo.py      # runs the notebook and keeps its outputs in it
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from jobs import run_job

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "multi_gpu_demo.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
TIMES = re.compile(r"^(.{20}) +[\d.]+ +([\d.]+ %)$", re.MULTILINE)


def run_script(folder: Path) -> str:
    argv = [SCRIPT.name, "--epochs", "3", "--folder", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "argv", argv):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_the_demo_explains_common_mistakes_of_two_strategies(tmp_path: Path) -> None:
    output, other = run_job(run_script, 2, tmp_path)
    assert other == "", "rank 0 alone prints"
    accuracies = dict(re.findall(r"^(ddp|deepspeed_stage_2) +[\d.]+ +([\d.]+) %$", output, re.MULTILINE))
    assert float(accuracies["ddp"]) > 80
    assert accuracies["deepspeed_stage_2"] == accuracies["ddp"]
    (said,) = re.findall(
        r"^sync_dist: val_acc is (\S+) without it, (\S+) with it, and (\S+) over", output, re.MULTILINE
    )
    assert len(set(said)) == 1
    assert "in 3 epochs the image used least was used 3 times, the one used most 3 times" in output
    assert "a save on rank 0 alone: RuntimeError: the ranks have met in different calls: rank 0 in a save of" in output
    assert re.search(r"a layer that no loss uses: RuntimeError: .*step: spare_layer\.weight, spare_layer\.bias", output)
    assert (tmp_path / "strategies.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "alone.ckpt").exists()


def execute(folder: Path) -> Any:
    """Return the notebook with the outputs that it has here."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from notebook_client import run_notebook

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, variables):  # which the kernel inherits
        run_notebook(notebook, folder, record_timing=False)
    return notebook


def outputs(notebook: Any) -> list[str]:
    """Return the outputs of the cells: text without times, and the kinds of other outputs."""
    shown = [
        "".join("".join(each.get("text", "")) or " ".join(sorted(each.get("data", {}))) for each in cell["outputs"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    return [TIMES.sub(r"\1 \2", each) for each in shown]


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_shows_what_it_shows_anywhere(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    kept = outputs(nbformat.read(NOTEBOOK, as_version=4))
    found = outputs(execute(tmp_path))
    assert [each for each in found if "accuracy" in each]
    for mine, theirs in zip(found, kept, strict=True):
        # Other processors round otherwise, which an image of 360 may notice.
        assert re.sub(r"[\d.]*\.\d+", "", mine) == re.sub(r"[\d.]*\.\d+", "", theirs)
        for one, other in zip(re.findall(r"\d*\.\d+", mine), re.findall(r"\d*\.\d+", theirs), strict=True):
            assert float(one) == pytest.approx(float(other), rel=0.02)
    synced = next(each for each in found if "without sync_dist" in each)
    assert len(set(re.findall(r"0\.\d+", synced))) == 1


def test_the_notebook_is_kept_with_its_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    said = "\n".join(outputs(notebook))
    assert re.search(r"^one process +\S+ %\nddp +\S+ %\nDeepSpeed, stage 2 +\S+ %$", said, re.MULTILINE)
    assert "callbacks[0].lock (lock) cannot be copied" in said
    assert "image/png" in said
    assert str(Path.home()) not in said
    assert "Traceback" not in said


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as place:
        nbformat.write(execute(Path(place)), NOTEBOOK)
