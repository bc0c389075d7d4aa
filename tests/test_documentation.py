"""The pages and the docstrings are right: code blocks run, docstring examples are doctests, and all names exist.

A reader adds a block to a program, and `reader.py` has the names of this program. Blocks run unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import support_table
import torch
from jobs import run_job
from reader import Classifier, Example, examples, failures_of, make_loader, run_block, run_examples
from test_architecture import LAYERS
from torch import nn
from torch.distributed.run import get_args_parser

import trainwright as tw
from trainwright import __main__ as command_line
from trainwright.cli import TrainwrightCLI
from trainwright.launch import cli
from trainwright.launch.config import KEYS, find_config, resolve
from trainwright.tools.ladder.ladder import Ladder
from trainwright.tools.trials import Trials

ROOT = Path(tw.__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for part in ("docs", "benchmarks", "examples", "tests") for path in (ROOT / part).rglob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_RUN = 0
"""A ratchet: blocks that a page marks as ones that cannot run here, by `<!-- not run: the reason -->` above them."""


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    kind: str
    text: str
    reason: str | None
    """Why it cannot run here."""

    @property
    def devices(self) -> int:
        """How many processes it asks for."""
        return max([1, *map(int, re.findall(r"devices=(\d+)", self.text))])


def blocks() -> Iterator[Block]:
    pattern = re.compile(r"(?:^<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text()
        for found in pattern.finditer(text):
            line = text[: found.start(2)].count("\n") + 1
            yield Block(f"{page.relative_to(ROOT)}:{line}", found[2], found[3], found[1])


BLOCKS = list(blocks())
PYTHON = list({block.text: block for block in BLOCKS if block.kind == "python" and block.reason is None}.values())
"""A block that two pages show runs once."""
TRAIN_ON_SEVERAL = [
    block for block in PYTHON if block.devices > 1 and re.search(r"\.fit\(|^for ", block.text, re.MULTILINE)
]


# -- the tests -------------------------------------------------------------------------------------------------------


def marked(block: Block) -> Any:
    """Compiling kernels takes seconds, and so do new interpreters and large packages."""
    is_slow = re.search(r"compile=True|MLFlow|Wandb|transformers import|strategy=\"fsdp\"|weights\(2\)", block.text)
    return pytest.param(block, id=block.place, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("block", [marked(block) for block in PYTHON])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # from torch's compiler
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # from peft
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # from MLflow's use of SQLAlchemy
def test_a_code_block_runs(block: Block, tmp_path: Path) -> None:
    """Run a block as a program on one process, or on the ranks of a job."""
    (tmp_path / "block.py").write_text(block.text)
    if block in TRAIN_ON_SEVERAL:
        run_job(run_block, block.devices, tmp_path)
    else:
        run_block(tmp_path)


def test_few_blocks_are_marked_as_not_run() -> None:
    assert len([block for block in BLOCKS if block.reason is not None]) <= NOT_RUN
    assert {block.kind for block in BLOCKS} <= {
        "",
        "python",
        "console",
        "yaml",
        "diff",
    }  # tests/examples/test_first_program.py
    assert len(PYTHON) >= 11


def test_the_support_page_shows_the_tables_of_the_tests() -> None:
    assert support_table.PAGE.read_text() == support_table.page(), "run: python tests/support_table.py"


# -- commands --------------------------------------------------------------------------------------------------------

PROGRAMS = ("make", "python", "pip", "trainwright", "torchrun", "srun", "mpirun")
PLACEHOLDERS = {
    "PATH": "run.ckpt", "runs/mine": "run.ckpt", "OUT.safetensors": "out.safetensors", "FILE": "weights.pt",
    "OUT.ckpt": "out.ckpt",
}  # fmt: skip
"""Files of a reader."""


class Command(NamedTuple):
    """A command that a page shows: its variables, and the program with its arguments."""

    place: str
    variables: dict[str, str]
    words: list[str]


def commands() -> Iterator[Command]:
    """Yield the commands of the blocks (a column of words after two blanks or more is a remark), then those within lines."""
    for block in BLOCKS:
        for line in block.text.splitlines() if block.kind in ("", "console") else ():
            yield from command_of(block.place, re.split(r"\s{2,}|\s#", line.strip())[0])
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for text in re.findall(r"`([^`]+)`", line):
                yield from command_of(f"{page.relative_to(ROOT)}:{number}", text)


def command_of(place: str, text: str) -> Iterator[Command]:
    with contextlib.suppress(ValueError):  # no closing quote: an excerpt of code
        words = shlex.split(text)
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        if len(words) > 1 and words[0] in PROGRAMS:
            yield Command(place, variables, words)


def after(word: str) -> list[list[str]]:
    """Return the arguments of the commands that run a program, with any launcher."""
    return [each.words[each.words.index(word) + 1 :] for each in COMMANDS if word in each.words]


COMMANDS = list(commands())
LAUNCHES = [rest for name, *rest in after("trainwright") if name == "launch" and rest and rest != ["--help"]]
OTHERS = [
    words
    for words in after("trainwright")
    if words[0] in ("config", "test", "ladder", "estimate", "env", "runs", "plot") and words[1:]
]
CONFIGS = [block for block in BLOCKS if block.kind == "yaml"]
CHECKPOINTS = [rest for name, *rest in after("trainwright") if name == "checkpoint" and rest and "|" not in rest[0]]


def test_make_knows_each_target_and_variable() -> None:
    asked = [(each.variables, words) for each in COMMANDS if "make" in each.words for words in [each.words[1:]]]
    assert len(asked) > 20
    for variables, words in asked:
        for word in words:
            name, is_variable, _ = word.partition("=")
            if is_variable:
                variables = {**variables, name: ""}
            else:
                assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), word
        for name in variables:
            assert re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE), name


def test_each_script_takes_the_options_that_are_shown() -> None:
    for words in after("python"):
        script, *options = words
        if script in ("train.py", "...") or script.startswith("-"):  # files of the reader
            continue
        source = (ROOT / script).read_text()
        for name in re.findall(r"^import (\w+)$", source, re.MULTILINE):  # a module beside it may have its options
            beside = (ROOT / script).with_name(f"{name}.py")
            source += beside.read_text() if beside.exists() else ""
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in source, (script, option)


def test_the_install_page_names_the_pinned_torch() -> None:
    """pip replaces a CPU build of any other version."""
    pinned = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert f"torch {pinned[1]} on" in (ROOT / "docs/install.md").read_text()


def test_the_extras_that_pip_is_given_exist() -> None:
    for words in after("pip"):
        assert words[0] == "install"
        for word in words[1:]:
            for extra in re.findall(r"\[(.+)\]", word):
                assert extra in PROJECT["optional-dependencies"]
            assert not word.endswith(".txt") or (ROOT / word).is_file()


@pytest.mark.parametrize("arguments", LAUNCHES, ids=" ".join)
def test_trainwright_launch_accepts_what_is_shown(arguments: list[str], monkeypatch: Any, capsys: Any) -> None:
    started: list[Any] = []
    monkeypatch.setattr(cli, "supervise", lambda *given, **_: started.append(given) or 0)
    script = next((word for word in arguments if word.endswith(".py")), "train.py")
    assert script == "train.py" or (ROOT / script).is_file()
    Path(script).parent.mkdir(parents=True, exist_ok=True)
    Path(script).touch()
    if script not in arguments:  # an option without a command
        arguments = [*arguments, "60", script]
    Path("cluster.yaml").write_text(CONFIGS[0].text)
    assert cli.launch_command(arguments, command_line.check_names) == 0
    said = capsys.readouterr().out
    assert script in (said if {"--dry-run", "--emit"} & set(arguments) else started[0][0].command)


@pytest.mark.parametrize("block", CONFIGS, ids=lambda block: block.place)
def test_launch_accepts_the_configs_that_are_shown(block: Block) -> None:
    Path("shown.yaml").write_text(block.text)
    config = find_config("shown.yaml")
    resolve({}, config, command_line.check_names, {})
    assert set(config.values) | {"env"} >= set(KEYS) - {"nodes"}  # in place of num_nodes and node_rank


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_the_other_commands_do_what_is_shown(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CONFIG", str(Path("mine.yaml").absolute()))
    for number in range(2):  # the runs of a reader
        Path(f"trainwright_logs/version_{number}").mkdir(parents=True)
        Path(f"trainwright_logs/version_{number}/metrics.csv").write_text("step,epoch,val_loss,val_acc\n8,0,0.5,0.9\n")
    Path("mine.yaml").write_text("devices: 2")
    monkeypatch.setattr("builtins.input", lambda _: "yes" if _.endswith("[no] ") else "")
    monkeypatch.setattr(Trials, "run", lambda self, strategies: print(strategies) or 0)
    monkeypatch.setattr(Ladder, "run", lambda self: print(self.names) or 0)
    for script in (word for word in words if word.endswith(".py")):
        Path(script).parent.mkdir(parents=True, exist_ok=True)
        Path(script).touch()
    monkeypatch.setattr("sys.argv", ["trainwright", *words])
    assert command_line.main() == 0
    assert capsys.readouterr().out


def test_torchrun_accepts_what_is_shown() -> None:
    shown = after("torchrun")
    assert shown
    for words in shown:
        assert get_args_parser().parse_args(words).training_script == "train.py"


class LibraryModel(nn.Linear):
    """It has the methods by which a model of transformers is known."""

    config = SimpleNamespace(to_json_string=lambda: "{}")
    save_pretrained = print


@pytest.mark.parametrize("words", CHECKPOINTS, ids=" ".join)
def test_trainwright_checkpoint_does_what_is_shown(words: list[str], monkeypatch: Any, capsys: Any) -> None:
    trainer, module = tw.Trainer(max_epochs=1, barebones=True), Classifier()
    module.described = LibraryModel(1, 1)
    trainer.fit(module, make_loader())
    trainer.save_checkpoint("run.ckpt")
    torch.save(Classifier().state_dict(), "weights.pt")
    monkeypatch.setattr("sys.argv", ["trainwright", "checkpoint", *(PLACEHOLDERS.get(word, word) for word in words)])
    assert command_line.main() == 0
    assert capsys.readouterr().out


SOURCES = "".join(
    path.read_text()
    for folder in ("trainwright", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


@functools.cache
def options_of_a_program() -> set[str]:
    """Return the options that a TrainwrightCLI makes of signatures, without the parts after a dot."""
    cli = TrainwrightCLI(Classifier, args=[], run=False)
    names = {name.partition(".")[0] for name in cli.parser.get_defaults().keys()}  # noqa: SIM118 - a Namespace
    return names | {
        name for method in ("fit", "test") for name in inspect.signature(getattr(tw.Trainer, method)).parameters
    }


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    if page.name == "CHANGELOG.md":  # it describes the past
        return
    for path in re.findall(r"`((?:tests|benchmarks|examples|trainwright|docs|\.ci)/[\w./-]*)`", text):
        assert (ROOT / path).exists() or path == "benchmarks/out", path
    for option in re.findall(r"`(--[a-z_-]+)", text):
        assert f'"{option}"' in SOURCES or option.removeprefix("--") in options_of_a_program(), option
    for name in set(re.findall(r"\btw\.(\w+)", text)):
        assert hasattr(tw, name), name


def test_the_architecture_is_the_one_that_is_held() -> None:
    """The layers are the same as in the test of imports, and all named files exist."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (floors,) = re.findall(r"^```\n(errors\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [set(line.split(", ")) for line in floors.splitlines()] == LAYERS
    there = {path.name for folder in ("trainwright", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"\b\w+\.py\b", text)) - there == set()


# -- docstrings ------------------------------------------------------------------------------------------------------

EXAMPLES = list(examples())
ALONE = [each for each in EXAMPLES if not each.is_for_several]
WITHOUT_EXAMPLES = {"__version__": "a text, which has the docstring of str"}
"""A ratchet: public names whose docstring shows no example, with the reason."""


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, id=each.place, marks=pytest.mark.launch if each.starts_processes else ()) for each in ALONE],
)
@pytest.mark.filterwarnings("ignore:3 samples are longer")  # the example of a warning
def test_examples_of_docstrings_work(example: Example) -> None:
    assert not failures_of(example)


@pytest.mark.parametrize("needs_deepspeed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_examples_of_several_processes_run(needs_deepspeed: bool, tmp_path: Path) -> None:
    """In one job, since importing DeepSpeed takes seconds."""
    chosen = [each for each in EXAMPLES if each.is_for_several and each.needs_deepspeed == needs_deepspeed]
    (tmp_path / "places.json").write_text(json.dumps([each.place for each in chosen]))
    for said in run_job(run_examples, 2, tmp_path):
        assert said == {each.place: "" for each in chosen}


def test_every_public_name_shows_an_example() -> None:
    without = {name for name in tw.__all__ if ">>> " not in (inspect.getdoc(getattr(tw, name)) or "")}
    assert without == set(WITHOUT_EXAMPLES)


def test_no_example_is_skipped() -> None:
    assert not [each.place for each in EXAMPLES if "doctest: +SKIP" in each.text]
