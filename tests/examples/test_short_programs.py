"""The short programs of examples/ train, make something to look at, and print a number that is checked here."""

from __future__ import annotations

import re
import sys
import types
import warnings
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from forked import run_python

FOLDER = Path(__file__).parents[2] / "examples"
SHORT = ("first", "four_tricks", "gpt", "graph", "images", "interruption", "lora", "stream", "sweep", "text")


def needs(*modules: str) -> Any:
    missing = [each for each in modules if find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")


def run(name: str, *arguments: str, warnings_are: str | None = "error") -> str:
    """Run an example, and return its output."""
    done = run_python(FOLDER / f"{name}.py", *arguments, warnings_are=warnings_are)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def said(output: str, name: str) -> str:
    found: list[str] = re.findall(rf"^{name}: (.*)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


def load(name: str) -> types.ModuleType:
    """Import an example without running it."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        spec.loader.exec_module(module)
    return module


def is_a_picture(path: str) -> bool:
    content = Path(path).read_bytes()
    return content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000


def test_they_are_short() -> None:
    assert max(len((FOLDER / f"{name}.py").read_text().splitlines()) for name in SHORT) < 100


@pytest.mark.slow
@needs("sklearn", "matplotlib")
def test_four_tricks_runs_with_all_of_them() -> None:
    output = run("four_tricks", "--epochs", "3")
    assert said(output, "batches and steps") == "237, 60"  # 79 batches an epoch in windows of 4, the last one of 3
    assert float(said(output, "loss scale")) >= 1024
    assert re.search(r"^ *9 +\d\.\d\d +\d\.\d\d +\d\.\d\d +27$", output, re.MULTILINE)
    assert is_a_picture(said(output, "picture"))
    assert float(said(output, "test accuracy")) > 0.9


@pytest.mark.slow
def test_gpt_is_trained_and_continues_a_text() -> None:
    Path("mine.txt").write_text("# Not part of it.\n" + "Shall I compare thee to a summer's day?\n" * 120)
    output = run("gpt", "--text", "mine.txt", "--steps", "150")
    assert float(said(output, "val_loss")) < 0.5
    assert float(said(output, "tokens/s").replace(",", "")) > 0
    assert "#" not in output
    assert "day?\nShall I compare" in output.rpartition("--- after ")[2]


def test_the_bundled_text_is_whole() -> None:
    header, *sonnets = (FOLDER / "data/sonnets.txt").read_text().strip().split("\n\n")
    assert header.startswith("# William Shakespeare")
    assert {len(each.splitlines()) for each in sonnets} == {14}
    assert len(set(sonnets)) == 32


@pytest.mark.slow
@needs("matplotlib")
def test_images_are_classified() -> None:
    output = run("images", "--epochs", "14")
    assert 0.4 < float(said(output, "without augmentation")) < 1
    assert float(said(output, "with augmentation")) > 0.7
    assert is_a_picture(said(output, "picture"))


@pytest.mark.slow
def test_docstrings_are_classified() -> None:
    output = run("text", "--epochs", "6", "--ask", "Wait until the lock is free.", "Check that two values are equal.")
    assert said(output, "asyncio") == "Wait until the lock is free."
    assert said(output, "unittest") == "Check that two values are equal."
    assert float(said(output, "val_acc")) > 0.75 > 0.4 > float(said(output, "always the most frequent package"))


@pytest.mark.slow
@needs("networkx", "matplotlib")
def test_the_club_is_divided() -> None:
    output = run("graph")
    wrong = said(output, "members on the wrong side").split(", ")
    assert float(said(output, "val_acc")) == 1 - len(wrong) / 32
    assert len(wrong) < 5
    assert is_a_picture(said(output, "picture"))


@pytest.mark.slow
@pytest.mark.launch
def test_interruption_resumes_from_its_stop() -> None:
    output = run("interruption")
    assert re.findall(r"exit code (\d+)", output) == ["130", "0"]
    assert output.count("resumed here") == 1
    assert said(output, "losses that differ") == "0 of 200"


@pytest.mark.slow
@needs("datasets")
def test_the_stream_is_trained() -> None:
    output = run("stream", "--steps", "250")
    assert float(said(output, "val_acc")) > 0.85
    made = load("imdb/made")
    assert len(set(said(output, "for").split()) & set(made.GOOD.split())) >= 8
    assert len(set(said(output, "against").split()) & set(made.BAD.split())) >= 8


@pytest.mark.slow
@needs("peft", "transformers")
def test_lora_is_trained_and_saved() -> None:
    output = run("lora", "--steps", "200", warnings_are=None)  # from peft
    assert said(output, "without the adapter") == "mnopqrstuvwx"
    assert said(output, "with the adapter") == "mlkjihgfedcb"
    sizes = re.findall(r"^trained ([\d,]+) of ([\d,]+) weights, (\d+) KiB", output, re.MULTILINE)
    (model, all_of_it, whole), (adapter, both, part) = (
        tuple(int(each.replace(",", "")) for each in row) for row in sizes
    )
    assert model == all_of_it
    assert both == model + adapter
    assert adapter < model / 4
    assert part < whole / 3


@pytest.mark.slow
@needs("sklearn")
def test_the_sweep_has_a_best_rate() -> None:
    output = run("sweep", "--rates", "0.0001", "0.03", "--epochs", "1")
    assert re.findall(r"^ *(\S+) +\d+\.\d{4} +\d\.\d{4} +runs/sweep/lr=\1$", output, re.MULTILINE) == ["0.03", "0.0001"]
    assert said(output, "best learning rate") == "0.03"
    page = Path("runs/sweep/curves.html").read_text()
    assert "lr=0.03" in page
    assert "lr=0.0001" in page


def test_the_tour_has_every_example() -> None:
    tour = load("tour")
    modules = {"tour.py", "faults/story.py", "imdb/archive.py", "imdb/made.py", "imdb/reviews.py"}
    there = {path.relative_to(FOLDER).as_posix() for kind in ("*.py", "*.ipynb") for path in FOLDER.rglob(kind)}
    names = [each.name for each in tour.EXAMPLES]
    assert sorted(names) == sorted(there - modules)


def run_tour(tour: types.ModuleType, *arguments: str) -> int:
    with mock.patch.object(sys, "argv", ["tour.py", *arguments]), pytest.raises(SystemExit) as ended:
        tour.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_tour_goes_on_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tour = load("tour")
    scripts = {
        "good.py": "import sys; print('loss: 3\\nloss: 2', *sys.argv[1:])",
        "bad.py": "raise ValueError('no such rate')",
        "mute.py": "print('nothing of the kind')",
        "two.py": "raise ValueError(\"devices=2 is more than the 1 of 'cuda' that torch sees\")",
        "endless.py": "import time; time.sleep(600)",
        "last.py": "print('loss: 1')",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    needed = {"mute.py": "json", "last.py": "json no_such_module sklearn_of_old"}
    made = [tour.Example(name, "-e 1", "(loss: .*)", needed.get(name, "")) for name in scripts]
    with mock.patch.multiple(tour, FOLDER=tmp_path, EXAMPLES=made):
        assert run_tour(tour, "good", "bad", "mute", "two", "last") == 1
        output = capsys.readouterr().out
        assert re.search(r"^good.py +ok +\d+\.\d s  loss: 2 -e 1$", output, re.MULTILINE)
        assert re.search(
            r"^bad.py +failed .* exit code 1; ValueError: no such rate; runs/tour/bad.py.txt$", output, re.MULTILINE
        )
        assert re.search(r"^mute.py +failed .* printed no result; runs/tour/mute.py.txt$", output, re.MULTILINE)
        assert re.search(r"^two.py +skipped .* devices=2 is more than the 1 of 'cuda'", output, re.MULTILINE)
        assert re.search(r"^last.py +skipped .* pip install no_such_module sklearn_of_old$", output, re.MULTILINE)
        assert output.endswith("\nfailed: bad.py, mute.py\n")
        assert run_tour(tour, "endless", "--timeout", "0.2") == 1
        assert " not over after 0.2 s; runs/tour/endless.py.txt\n" in capsys.readouterr().out
        assert run_tour(tour, "good") == 0
        assert capsys.readouterr().out.startswith("1 of 1: good.py  ok\n")
        assert run_tour(tour, "godo") == 2
        assert "no example begins with godo; there are good.py, bad.py" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.launch
@needs("nbclient", "nbformat", "ipykernel", "matplotlib")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the client
def test_the_notebook_runs(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nbformat
        from notebook_client import run_notebook
    notebook = nbformat.read(FOLDER / "raw_loop/notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    run_notebook(notebook, tmp_path)
    printed = ["".join(each.get("text", "") for each in cell.get("outputs", [])) for cell in notebook.cells]
    assert [text.count("epoch ") for text in printed if "epoch " in text] == [1, 8]
    assert float(said(printed[-1], "test accuracy")) > 0.9
    assert any("image/png" in each.get("data", {}) for each in notebook.cells[-1]["outputs"])
