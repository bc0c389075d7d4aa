"""Upper limits of counts: coupling between files, public names, phrases, and the measures of `house.py`.

If a change lowers a count, lower its limit.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import house
import pytest
from package import FILES, PROJECT, Measure, declared, is_self, name_of, tree_of
from small import QUIET

import trainwright as tw

Places = dict[str, list[str]]
"""By file: the places, as "line: source"."""


@pytest.fixture(autouse=True, scope="module")
def no_search_for_garbage() -> Iterator[None]:
    """The syntax trees are millions of objects, and searching them again and again takes a third of the time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


MOST_FOREIGN_WRITES = 10
FOREIGN_WRITES: dict[str, int] = {"trainer/remote_call.py": 2, "trainer/trainer.py": 1, "trainer/training_run.py": 1}
"""Attributes assigned outside their class's file, by the file that assigns them."""
LIBRARIES_ATTRIBUTES = {
    *("all_gather", "benchmark", "close", "data", "forward", "param_groups", "total", "training"),
    *("_buffers", "_close", "_modules", "_parameters", "_version", "_workers"),
}
"""Attributes of torch, DeepSpeed and tqdm objects that a class of the package declares too."""


@functools.cache
def coupling() -> tuple[Places, Places]:
    """Return the foreign writes and the private uses.

    A foreign write is `x.a = ...` (plain, augmented, in a `for` or `with`, or `del`), `setattr(x, "a", ...)`, or
    `vars(x)["a"] = ...`, where x is not self or cls and `a` is declared by a class of another file and not by one of this
    file. Attributes of other libraries' objects, such as `parameter.grad`, do not count, nor do properties with a setter.

    A private use is `x._a` under the same rule, with `super()._a` exempt, or the import of a private name.
    """
    writes, uses = defaultdict(list), defaultdict(list)
    for path in FILES:
        file = name_of(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainwright"):
                uses[file] += [f"{node.lineno}: {each.name}" for each in node.names if re.match(r"_(?!_)", each.name)]
            for owner, attribute, is_written in accesses(node):
                files = set() if attribute in LIBRARIES_ATTRIBUTES else declared().get(attribute, set())
                if files and file not in files and not is_self(owner):
                    place = f"{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
                    if is_written and not attribute.startswith("__"):
                        writes[file].append(place)
                    if re.match(r"_(?!_)", attribute) and ast.unparse(owner) != "super()":
                        uses[file].append(place)
    return tuple({file: places for file, places in found.items() if places} for found in (writes, uses))  # type: ignore[return-value]


def accesses(node: ast.AST) -> Iterator[tuple[ast.expr, str, bool]]:
    """Yield (object, attribute, whether it is written) of a node."""
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr, not isinstance(node.ctx, ast.Load)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        if isinstance(node.args[1], ast.Constant):
            yield node.args[0], str(node.args[1].value), True
    elif (
        isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    ):
        container = node.value
        if isinstance(container, ast.Call) and ast.unparse(container.func) == "vars":
            yield container.args[0], str(node.slice.value), True
        elif isinstance(container, ast.Attribute) and container.attr == "__dict__":
            yield container.value, str(node.slice.value), True


def check_table(found: Places, known: dict[str, int], most: int) -> None:
    """Fail if there are more places in all than allowed, and list the files that have more than the table says."""
    more = {file: places for file, places in found.items() if len(places) > known.get(file, 0)}
    text = [f"{file}: {len(places)}, not {known.get(file, 0)}: {places}" for file, places in more.items()]
    assert sum(map(len, found.values())) <= most, "\n".join(text)


def test_attributes_are_assigned_by_their_owner() -> None:
    check_table(coupling()[0], FOREIGN_WRITES, MOST_FOREIGN_WRITES)


def test_private_names_stay_in_their_file() -> None:
    check_table(coupling()[1], {}, 0)


MOST_PUBLIC_NAMES = 65


def test_a_trainer_has_few_public_names() -> None:
    names = public_names()
    assert len(names) <= MOST_PUBLIC_NAMES, names


def public_names() -> list[str]:
    """Return the public names of a Trainer, without the arguments of its constructor."""
    arguments = inspect.signature(tw.Trainer).parameters
    return [name for name in dir(tw.Trainer(**QUIET)) if not name.startswith("_") and name not in arguments]


FLOORS = [
    "timeline", "checkpoint_choice run_position settings sources", "logged_value parts", "vendor stop",
    "metrics", "uneven_round", "logbook", "hooks training_data", "epoch_batches run", "evaluate remote_call status",
    "prepared_run", "training_run", "saving", "optimization", "epoch_end preparation", "resume", "fit", "trainer",
    "tuner",
]  # fmt: skip
"""trainer/ from the ground up: a file imports only from lower floors, under TYPE_CHECKING too."""


def trainer_imports() -> dict[str, set[str]]:
    """Return the imports of the files of trainer/ within trainer/, including those for annotations."""
    names = {path.stem for path in FILES if path.parent.name == "trainer"} - {"__init__"}
    found: dict[str, set[str]] = {}
    for path in FILES:
        if path.parent.name == "trainer" and path.stem in names:
            modules = {
                node.module for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.module
            }
            found[path.stem] = {each.split(".")[-1] for each in modules if each.startswith("trainwright.trainer.")}
    return found


def imports_up() -> list[str]:
    floor = defaultdict(int, {name: number for number, names in enumerate(FLOORS) for name in names.split()})
    return [
        f"{name} -> {other}"
        for name, others in trainer_imports().items()
        for other in sorted(others)
        if floor[other] >= floor[name]
    ]


def test_no_import_runs_back_up_in_trainer() -> None:
    placed = [name for names in FLOORS for name in names.split()]
    assert sorted(placed) == sorted(trainer_imports()), "FLOORS names each file of trainer/ once"
    found = imports_up()
    assert not found, found


def test_measures_keep_their_limits() -> None:
    found = house.breaches(house.measures(), house.limits_now())
    assert not found, "\n".join(found)


def test_limits_can_only_fall() -> None:
    rate = Measure("rate", "", [], 4.52, step=0.1)
    found = {
        "lines": Measure("lines", "", [], 930, step=50),
        "more": Measure("more", "", [("a.py:1", "a")]),
        "rate": rate,
    }
    limits = {"lines": 1000, "more": 0, "rate": 5.0, "lines.gone": 7}
    assert house.lowered(found, limits) == {"lines": 950, "more": 0, "rate": 4.6}
    above, rate_below, gone = house.breaches(found, limits)
    assert above.startswith("more is 1, above its limit of 0.")
    assert above.endswith("a.py:1  a")
    assert rate_below.startswith("rate is 4.52, far below its limit of 5.0")
    assert gone.startswith("lines.gone is 0, far below its limit of 7")
    assert house.breaches({"new": Measure("new", "", [])}, {}) == [
        "new is 0 and has no limit; add it to house_limits.json"
    ]


BANNED_PHRASES = (
    "anew|go on|goes on|going on|gone on|went on|stands?(?! in)|stood|standing|nobody|whoever|somebody|told|at hand|but for|"
    "(?:in|into) (?:its|their|whose|the) stead|(?:take|takes|taken|took|taking) up|(?:come|comes|came|coming) to|for ever|"
    "(?:each|every) so many|and (?:the|its|their) like|without a word|(?:for|to|by) who|(?:let|lets|letting) go|"
    "mend(?:s|ed|ing)?|(?:share|shares|shared|sharing) out|appointments?|lifelines?|failure boards?|echo(?:es)?|ghosts?|heard|"
    "judge[sd]?|stated|follow parameters|late reductions?|settle[sd]?|whereabouts|handover|(?:hand|hands|handed) over"
)
"""Neither in pages nor in the package's docstrings, comments, other strings and defined names (`is_told` is "is told")."""
PAGES = sorted(path for folder in (".", "docs", "benchmarks", "examples") for path in (PROJECT / folder).glob("*.md"))


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the strings, comments and defined names of a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, words_of(node.name)
        elif isinstance(node, ast.arg):
            yield node.lineno, words_of(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.lineno, words_of(node.id if isinstance(node, ast.Name) else node.attr)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    yield 0, words_of(path.stem)


def words_of(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name).strip()


def test_banned_phrases_do_not_come_back() -> None:
    pattern = re.compile(rf"\b(?:{BANNED_PHRASES})\b".replace(" ", r"\s+"), re.IGNORECASE)
    texts = [(path, line, text) for path in FILES for line, text in texts_of(path)]
    texts += [(path, 1, path.read_text()) for path in PAGES]
    found = [
        f"{path}:{line + text.count(chr(10), 0, match.start())}: {match[0]}"
        for path, line, text in texts
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)
