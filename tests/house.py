"""The measures of the project's structure and prose, and the limits that they may not leave.

    python tests/house.py                  a table of the measures, with the limit and the worst place
    python tests/house.py --list MEASURE   every place that a measure counts, the worst first
    python tests/house.py --lower          lower the limits to the present values; none is raised

The limits are in house_limits.json and `test_ratchets.py` checks them. A value above its limit fails. So does a value far
below it: by more than 5 %, and by more than 2 (100 for lines, 0.2 for a rate of prose). Such a change lowers the limit too.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from house_prose import page_measures, prose_measures, test_name_measures
from package import FUNCTIONS, PROJECT, ROOT, Measure, Place, Source, repeated
from private_names import USES

LIMITS = Path(__file__).with_name("house_limits.json")
FIT = "trainwright/trainer/fit.py"
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
DOCUMENTED = {"_exit", "_getframe", "_fields", "_replace", "_asdict"}
"""Names with an underscore that Python documents, for os, sys and named tuples."""

# -- limits --------------------------------------------------------------------------------------------------------------


def measures() -> dict[str, Measure]:
    package, tests = ([Source(path) for path in sorted(part.rglob("*.py"))] for part in (ROOT, PROJECT / "tests"))
    groups = [sizes(package, tests), complexity(package), names(package), run_attributes(package), circles(package)]
    groups += [rng_holders(package), any_annotations(package), foreign_names(package)]
    groups += [prose_measures(package, tests), test_name_measures(tests), page_measures()]
    return {measure.name: measure for group in groups for measure in group}


def breaches(found: Mapping[str, Measure], limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for every measure that has no limit, is above it, or is far below it."""
    new = [name for name in found if name not in limits]
    texts = [f"{name} is {found[name].value} and has no limit; add it to {LIMITS.name}" for name in new]
    for name, limit in limits.items():
        measure = found.get(name) or Measure(name, "No folder of this name is left.", [], 0)
        if measure.value > limit:
            places = "".join(f"\n    {at}  {text}" for at, text in measure.places[:10])
            texts.append(f"{name} is {measure.value}, above its limit of {limit}. {measure.definition}{places}")
        elif measure.value < limit - max(0.05 * limit, 2 * measure.step):
            lower = "run `python tests/house.py --lower`"
            texts.append(f"{name} is {measure.value}, far below its limit of {limit}: {lower}")
    return texts


def lowered(found: Mapping[str, Measure], limits: Mapping[str, float]) -> dict[str, float]:
    """Return the limits, lowered to the values. A new folder gets a limit, and the limit of a folder that is gone is dropped.

    Limits of lines are multiples of 50, so that a fix has room. Those of rates are multiples of 0.1, because deleting other
    prose raises a rate a little.
    """
    rounded = {name: round(math.ceil(each.value / each.step) * each.step, 1) for name, each in found.items()}
    return {name: min(value, limits.get(name, value)) for name, value in rounded.items()}


def limits_now() -> dict[str, float]:
    return dict(json.loads(LIMITS.read_text())) if LIMITS.exists() else {}


# -- structure -----------------------------------------------------------------------------------------------------------


def sizes(package: list[Source], tests: list[Source]) -> Iterator[Measure]:
    def by_size(files: list[Source]) -> list[Place]:
        return [file.at() for file in sorted(files, key=lambda file: -file.num_lines)]

    def lines(name: str, text: str, files: list[Source]) -> Measure:
        return Measure(name, text, by_size(files), sum(file.num_lines for file in files), step=50)

    yield Measure("package_files", "Python files of the package.", by_size(package))
    yield lines("package_lines", "Lines of the package.", package)
    yield lines("test_lines", "Lines of the Python files in tests/.", tests)
    for part in sorted({file.part for file in package}):
        text = "Lines of a folder; `base` is the files in no folder."
        yield lines(f"lines.{part}", text, [file for file in package if file.part == part])
    counts = sorted(((code_lines(file), file.at()[0]) for file in package), reverse=True)
    places, total = [(at, f"{count} lines of code") for count, at in counts], sum(count for count, _ in counts)
    text = "Lines of the package without blank lines, comments and docstrings."
    yield Measure("code_lines", text, places, total, step=50)
    small = [file for file in package if file.num_lines <= 60 and file.stem != "__init__"]
    yield Measure("small_files", "Files of the package with at most 60 lines; not __init__.", by_size(small)[::-1])


def code_lines(file: Source) -> int:
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    used = {line for token in tokens if token.type not in silent for line in range(token.start[0], token.end[0] + 1)}
    for node in file.of(ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used -= set(range(node.lineno, node.end_lineno + 1))
    return len(used)


def complexity(package: list[Source]) -> Iterator[Measure]:
    functions: list[Any] = [(file, *entry) for file in package for entry in complexities(file).items()]

    def worst(index: int, above: int = 0) -> list[Place]:
        chosen = sorted((entry for entry in functions if entry[2][index] > above), key=lambda entry: -entry[2][index])
        return [file.at(node, f"{node.name} {counts[index]}") for file, node, counts in chosen]

    text = (
        "1 + if, elif, ternary, for, while, except, case, further and/or operands, comprehension ifs; nested ones apart"
    )
    highest = max(counts[0] for *_, counts in functions)
    yield Measure("complexity_worst", f"Highest complexity of a function: {text}.", worst(0), highest)
    yield Measure("complexity_above_15", f"Functions with a complexity above 15: {text}.", worst(0, above=15))
    text = "complexity + loops of comprehensions, asserts, and the branches of nested functions"
    yield Measure("wide_above_15", f"Functions with a wide complexity above 15: {text}.", worst(1, above=15))
    fit = next(file for file in package if file.path == FIT)
    yield Measure("fit_lines", "Lines of trainer/fit.py.", [fit.at()], fit.num_lines)
    for name in ("fit_epoch", "train_batch"):
        node, counts = next(entry[1:] for entry in functions if entry[0] is fit and entry[1].name == name)
        body, places = node.body[bool(ast.get_docstring(node)) :], [fit.at(node, name)]
        lines = body[-1].end_lineno - body[0].lineno + 1
        yield Measure(f"{name}_lines", f"Lines of {name}'s body, without its docstring.", places, lines)
        yield Measure(f"{name}_complexity", f"Complexity of {name}.", places, counts[0])


def complexities(file: Source) -> dict[Any, list[int]]:
    """Return the complexity and the wide complexity of every function of a file."""
    found: dict[Any, list[int]] = {}
    pending: list[tuple[Any, list[Any]]] = [(file.tree, [])]
    while pending:
        node, inside = pending.pop()
        if isinstance(node, FUNCTIONS):
            found[node], inside = [1, 1], [*inside, node]
        branches = len(node.values) - 1 if isinstance(node, ast.BoolOp) else int(isinstance(node, BRANCHES))
        branches += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        for function in inside:
            found[function][0] += branches if function is inside[-1] else 0
            found[function][1] += branches + isinstance(node, (ast.comprehension, ast.Assert))
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def names(package: list[Source]) -> Iterator[Measure]:
    stems, classes, setters = defaultdict(list), defaultdict(list), []
    for file in package:
        if file.stem not in ("__init__", "__main__", "base", "strategy", "vendor"):
            stems[file.stem].append(file.at())
        for owner in file.of(ast.ClassDef):
            classes[owner.name].append(file.at(owner, owner.name))
            for method in (node for node in owner.body if isinstance(node, FUNCTIONS)):
                if assignment := only_assignment(method):
                    setters.append(file.at(method, f"{owner.name}.{method.name}: {assignment[:70]}"))
    text = "File names in several folders; not __init__, __main__, base, strategy, vendor."
    yield Measure("repeated_file_names", text, repeated(stems))
    yield Measure("repeated_class_names", "Class names that several files define.", repeated(classes))
    text = "Public methods whose body is one assignment to attributes of self; no property setters."
    yield Measure("setters", text, setters)
    yield Measure("setters_in_trainer", text, [place for place in setters if "/trainer/" in place[0]])


def only_assignment(method: Any) -> str:
    """Return the text of a public method's body if it only assigns attributes of self, and "" otherwise."""
    body: list[Any] = method.body[bool(ast.get_docstring(method)) :]
    is_property = any("setter" in ast.unparse(decorator) for decorator in method.decorator_list)
    is_assignment = len(body) == 1 and isinstance(body[0], (ast.Assign, ast.AugAssign, ast.AnnAssign))
    if method.name.startswith("_") or is_property or not is_assignment:
        return ""
    targets = body[0].targets if isinstance(body[0], ast.Assign) else [body[0].target]
    is_own = all(re.fullmatch(r"\(?self\.\w+(, self\.\w+)*\)?", ast.unparse(target)) for target in targets)
    return ast.unparse(body[0]) if is_own else ""


def run_attributes(package: list[Source]) -> Iterator[Measure]:
    uses: dict[str, Place] = {}
    for file in package:
        if file.part == "trainer" and not any(node.name.endswith("Run") for node in file.of(ast.ClassDef)):
            for node in file.of(ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id == "run":
                    uses.setdefault(node.attr, file.at(node, f"run.{node.attr}"))
    text = "Distinct attributes of the variable `run` in trainer/, outside the files that define a class ...Run."
    yield Measure("run_attributes", text, sorted(uses.values()))


def rng_holders(package: list[Source]) -> Iterator[Measure]:
    places: dict[Any, Place] = {}
    for file in (file for file in package if file.part in ("trainer", "callbacks")):
        for owner in file.of(ast.ClassDef):
            fields = [(node, node.target) for node in owner.body if isinstance(node, ast.AnnAssign)]
            stored = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute)]
            for node, target in [*fields, *((node, node) for node in stored if isinstance(node.ctx, ast.Store))]:
                name = ast.unparse(target).removeprefix("self.")
                if re.fullmatch(r"(\w*_)?(rng|generators?)(_\w+)?", name):
                    places.setdefault((file, owner, name), file.at(node, f"{owner.name}.{name}"))
        for node in file.of(ast.Assign):
            if any(getattr(getattr(part, "func", None), "id", "") == "rng_state" for part in ast.walk(node.value)):
                places[node] = file.at(node, ast.unparse(node))
    text = "Attributes named after generators or the RNG, and variables set to rng_state(), in trainer/ and callbacks/."
    yield Measure("rng_holders", text, list(places.values()))


def any_annotations(package: list[Source]) -> Iterator[Measure]:
    places = []
    for file in package:
        for node in file.of(*FUNCTIONS, ast.arg, ast.AnnAssign):
            annotation = node.returns if isinstance(node, FUNCTIONS) else node.annotation
            if annotation and any(getattr(part, "id", "") == "Any" for part in ast.walk(annotation)):
                places.append(file.at(node, ast.unparse(annotation)))
    yield Measure("any_annotations", "Annotations of the package that contain `Any`.", places)


# -- coupling ------------------------------------------------------------------------------------------------------------


def circles(package: list[Source]) -> Iterator[Measure]:
    modules = {file.module: file for file in package}
    edges = {name: dict(imports(file, modules)) for name, file in modules.items()}
    text = "Files in the largest circle of imports"
    annotations = f"{text}, those under TYPE_CHECKING and in functions included; without those of __init__ files."
    for name, definition, is_at_import in (
        ("circle_without_init", annotations, False),
        ("circle_at_import", f"{text} that run at import time.", True),
    ):
        reached = {
            start: {end for end, runs in edges[start].items() if (runs if is_at_import else file.stem != "__init__")}
            for start, file in modules.items()
        }
        for middle in modules:  # the transitive closure, after Warshall
            for targets in reached.values():
                if middle in targets:
                    targets |= reached[middle]
        largest = max(({b for b in reached[a] if a in reached[b]} for a in modules), key=len)
        yield Measure(name, definition, [modules[module].at() for module in sorted(largest)])


def imports(file: Source, modules: Mapping[str, Source]) -> Iterator[tuple[str, bool]]:
    """Yield the package's modules that a file imports, and whether at import time. Late imports come last."""
    guards = [node for node in file.of(ast.If) if "TYPE_CHECKING" in ast.unparse(node.test)]
    late = {child for node in (*guards, *file.of(*FUNCTIONS)) for child in ast.walk(node)}
    above = file.module.split(".")[: None if file.stem == "__init__" else -1]
    for node in sorted(file.of(ast.Import, ast.ImportFrom), key=lambda node: node not in late):
        names = {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = [*(above[: len(above) - node.level + 1] if node.level else ()), *filter(None, [node.module])]
            names = {".".join([*base, name]) for name in names}
            names = {name if name in modules else name.rpartition(".")[0] for name in names}
        yield from ((name, node not in late) for name in names if name in modules and name != file.module)


def foreign_names(package: list[Source]) -> Iterator[Measure]:
    listed = [(use.owner, name) for use in USES for name in use.names.split()]
    known = DOCUMENTED | {part for owner, name in listed for part in (*owner.split("."), name)}
    found: dict[str, list[tuple[bool, Place]]] = defaultdict(list)
    unlisted: dict[str, Place] = {}
    for file in package:
        for node, name, is_sure in mentions(file):
            found[name].append((file.stem == "vendor", file.at(node, name)))
            if is_sure and name not in known and re.match(r"_[^_]", name):
                unlisted.setdefault(name, file.at(node, name))
    outside = list[tuple[int, Place]]()
    for owner, name in [*listed, *(("", name) for name in unlisted)]:
        elsewhere, is_private = (
            [place for is_vendor, place in found[name] if not is_vendor],
            re.match(r"_[^_]|ds_", name),
        )
        if len(elsewhere) == len(found[name]) or (elsewhere and is_private):
            at = elsewhere[0][0] if elsewhere else "tests/private_names.py:1"
            outside.append((-len(elsewhere), (at, f"{owner}.{name}, {len(elsewhere)} uses".lstrip("."))))
    places = [("tests/private_names.py:1", f"{owner}.{name}") for owner, name in listed]
    yield Measure("foreign_listed", "Names of other packages that tests/private_names.py lists.", places)
    text = "Names of foreign_listed and foreign_unlisted that a file not named vendor.py uses."
    yield Measure("foreign_outside_vendor", text, [place for _, place in sorted(outside)])
    text = "Private names imported from other packages, or read from an import, that are not listed."
    yield Measure("foreign_unlisted", text, list(unlisted.values()))


def mentions(file: Source) -> Iterator[tuple[Any, str, bool]]:
    """Yield (node, name, is it surely another package's) for imported names, attributes, and strings that may be names."""
    foreign = set()
    for node in file.of(ast.Import, ast.ImportFrom):
        for alias in node.names if not getattr(node, "level", 0) else ():
            full = f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".").split(".")
            if full[0] != ROOT.name:
                foreign.add(alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else full[0]))
                yield from ((node, part, True) for part in full)
    for node in file.of(ast.Attribute, ast.Constant):
        if isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            start = getattr(root, "id", "") or getattr(getattr(root, "func", None), "id", "")
            if file.stem == "vendor" or root is not node.value or start not in ("self", "cls", "super"):
                yield node, node.attr, isinstance(root, ast.Name) and start in foreign
        elif isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield from ((node, part, node.value.split(".")[0] in foreign) for part in node.value.split("."))


def main(option: str = "", name: str = "") -> None:
    found, limits = measures(), limits_now()
    if option == "--list" and name in found:
        print(*map("  ".join, found[name].places), sep="\n")
    elif option == "--lower" and not name:
        lower = lowered(found, limits)
        LIMITS.write_text(json.dumps(lower, indent=1) + "\n")
        for name in sorted({*limits, *lower}):
            if limits.get(name) != lower.get(name):
                print(f"{name}: {limits.get(name, 'no limit')} -> {lower.get(name, 'no limit')}")
    elif option:
        sys.exit(f"{__doc__}\nThe measures are {', '.join(found)}.")
    else:
        for name, measure in found.items():
            place = "  ".join(measure.places[0] if measure.places else ())[:80]
            print(f"{name:24}{measure.value:>10}{limits.get(name, '-'):>10}  {place}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
