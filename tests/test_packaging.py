"""The packages of a release: the wheel's contents and version, and a training in an otherwise empty environment."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from interpreters import run_command
from package import FILES, tree_of
from packaging.version import Version

import trainwright as tw

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = ("omegaconf", "onnxscript", "peft", "pydantic")
"""Imported where a user's objects come from it, by the one method that needs it, or for the types of DeepSpeed."""
DISTRIBUTION_OF = {"yaml": "PyYAML"}
"""Modules whose distribution has another name."""
EXTRAS = (
    "deepspeed", "fairscale", "torchao", "tensorboard", "cli", "rich", "monitor", "wandb", "mlflow", "plot",
    "examples", "s3", "ray",
)  # fmt: skip


def test_what_the_package_imports_is_declared() -> None:
    declared = {"trainwright", *OPTIONAL}
    for each in [
        *PROJECT["dependencies"],
        *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra]),
    ]:
        declared.add(re.split(r"[><=!\[]", each)[0])
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                assert DISTRIBUTION_OF.get(name, name) in declared, f"{path}: {name}"


def run(*command: str | Path, folder: Path) -> str:
    done = run_command(command, folder=folder, seconds=800)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make release-check` has built, or a new one."""
    folder = Path(os.environ.get("TRAINWRIGHT_DIST") or tmp_path_factory.mktemp("wheel"))
    if not any(folder.iterdir()):
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_version_is_that_of_the_changelog() -> None:
    """An Unreleased entry is for a later version than the released ones."""
    newest, *earlier = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest in ("Unreleased", tw.__version__)
    assert all(Version(tw.__version__) > Version(each) for each in earlier)


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "trainwright/py.typed" in names
    assert all(name.startswith(("trainwright/", "trainwright-")) for name in names)
    assert {Path(name).suffix for name in names if not name.startswith("trainwright-")} == {
        ".py",
        ".pyi",
        ".toml",
        ".typed",
    }
    in_tree = {str(path.relative_to(ROOT)) for path in (ROOT / "trainwright").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == in_tree
    assert any(name.endswith("LICENSE") for name in names)
    assert f"trainwright-{tw.__version__}.dist-info/METADATA" in names


@pytest.mark.slow
@pytest.mark.timeout(900)  # torch is installed into a new environment
def test_the_wheel_trains_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv/bin/python"
    install = (python, "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt")
    run(*install, wheel, "scikit-learn", folder=tmp_path)  # whose digits the README's program reads
    # -I: neither PYTHONPATH nor the working directory, so the installed package is imported.
    where = run(python, "-I", "-c", "import trainwright; print(trainwright.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    program = re.search(r"A complete program:\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program[1].replace("max_epochs=15", "max_epochs=1"))
    run(tmp_path / "venv/bin/trainwright", "launch", "--cpu", "train.py", folder=tmp_path)
    assert "launch" in run(tmp_path / "venv/bin/trainwright", "--help", folder=tmp_path)
    assert f"trainwright: {tw.__version__}\n" in run(tmp_path / "venv/bin/trainwright", "env", folder=tmp_path)
    assert list((tmp_path / "trainwright_logs/version_0/checkpoints").glob("*.ckpt/manifest.json"))
    run(python, "-m", "pip", "check", folder=tmp_path)
