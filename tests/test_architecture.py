"""The shape of the code: the order of imports, the length of files, and code that stays in one place."""

from __future__ import annotations

import ast
import importlib
import re
import sys

import pytest
from interpreters import run_command
from package import FILES, ROOT, imports, part_of, tree_of

from trainwright.strategies import STRATEGIES

LAYERS = [
    {"errors"},
    {
        "arguments",
        "duration",
        "metric_direction",
        "optim",
        "paths",
        "plain_forms",
        "plots",
        "tensor_names",
        "value_kinds",
    },
    {"gradient_norms", "history"},
    {"devices"},
    {"distributed"},
    {"rank_zero"},
    {"faults"},
    {"hyperparameters", "precision", "checkpoint", "loggers", "profilers"},
    {"overrides"},
    {"data"},
    {"module_hooks"},
    {"strategies", "callbacks", "module"},
    {"memory"},
    {"engine"},
    {"trainer", "raw_loop"},
    {"cli", "tools"},
]
"""A layer imports the layers before it. Within a layer a part imports only itself."""
LAUNCH_MAY_IMPORT = {"devices", "distributed", "errors", "launch"}
LONGEST_FILE = 400
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
BANNED_WORDS = ("utils", "helpers", "misc", "common", "manager", "handler", "connector", "impl")


def test_imports_run_one_way() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        for module, line, at_import in imports(tree_of(path)):
            names = module.split(".")
            if names[0] == "trainwright" and len(names) > 1 and not _may_import(part, names[1], at_import):
                wrong.append(f"{path}:{line} imports {module}")
    assert not wrong


def _may_import(part: str, target: str, at_import: bool) -> bool:
    if part in ("__init__", "__main__"):
        return True
    if part == "launch":
        return target in LAUNCH_MAY_IMPORT
    if target == "launch":
        return part == "tools" or (part == "engine" and not at_import)
    own, other = (next(i for i, layer in enumerate(LAYERS) if name in layer) for name in (part, target))
    return other < own or target == part


def test_only_the_command_line_names_the_tools() -> None:
    """`__main__.py` registers them, and the ladder's file of overrides names its observer."""
    for path in FILES:
        if part_of(path) not in ("tools", "__main__"):
            assert "trainwright.tools" not in path.read_text(), path


def test_tools_import_public_names_only() -> None:
    """A name is public if the `__all__` of its module has it. For an imported module, the attributes that are read
    count."""
    private = []
    for path in FILES:
        if part_of(path) != "tools":
            continue
        tree = tree_of(path)
        read = {(ast.unparse(node.value), node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.Import):
                assert {each.name for each in node.names if each.name.startswith("trainwright")} <= {"trainwright"}, (
                    path
                )
            if not isinstance(node, ast.ImportFrom) or not module.startswith("trainwright"):
                continue
            if module.startswith("trainwright.tools"):
                continue
            for name in (each.name for each in node.names):
                is_module = ROOT.parent.joinpath(*module.split("."), f"{name}.py").exists()
                used = [attribute for owner, attribute in read if owner == name] if is_module else [name]
                public = importlib.import_module(f"{module}.{name}" if is_module else module).__all__
                private += [f"{path}:{node.lineno} uses {module}: {each}" for each in used if each not in public]
    assert not private


def test_plots_import_nothing_of_ours() -> None:
    for path in FILES:
        if part_of(path) == "plots":
            modules = [module for module, _, _ in imports(tree_of(path)) if module.startswith("trainwright")]
            assert all(module.startswith("trainwright.plots") for module in modules), path


def test_files_stay_short() -> None:
    too_long = []
    for path in FILES:
        lines = len(path.read_text().splitlines())
        for node in ast.walk(tree_of(path)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if lines > LONGEST_FILE:
            too_long.append(f"{path} has {lines} lines without docstrings")
    assert not too_long


def test_names_are_nouns() -> None:
    for path in FILES:
        words = path.stem.split("_")
        words += [node.name.lower() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
        for word in words:
            found = word.replace("simple", "")  # holds "impl"
            assert not any(banned in found for banned in BANNED_WORDS), f"{path}: {word}"


def test_no_strategy_is_named_outside_its_folder() -> None:
    names = {name for name in STRATEGIES if name != "single_device"}
    for path in FILES:
        if part_of(path) in ("strategies", "__init__"):
            continue
        for node in ast.walk(tree_of(path)):
            assert not (isinstance(node, ast.Name) and node.id.endswith("Strategy") and node.id != "Strategy"), path
            if isinstance(node, ast.Compare):
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not constants & names, f"{path}:{node.lineno} compares with a strategy's name"


def test_the_environment_is_read_in_two_places() -> None:
    for path in FILES:
        relative = str(path.relative_to(ROOT))
        if relative == "distributed/environment.py" or relative.startswith("launch/"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
                pytest.fail(f"{relative}:{node.lineno} reads the environment")


PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE = {"torch.save", "torch.package", "torch.serialization.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"} | {
    "numpy.load", "np.load", "torch.jit.load"
}  # fmt: skip


def test_nothing_is_pickled_or_loaded_unsafely() -> None:
    """Checkpoints contain no pickle, and foreign files are read only by torch's restricted reader."""
    for path in FILES:
        if path.relative_to(ROOT).as_posix() == "launch/notebook.py":
            continue  # work between two processes of one user, of which nothing is kept
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {name for each in node.names for name in each.name.split(".")}
                names |= set((getattr(node, "module", None) or "").split("."))
                assert not PICKLES & names, f"{path}:{node.lineno}"
                assert "checkpoint" not in path.parts or not {"importlib", "runpy", "code"} & names, (
                    f"{path}:{node.lineno}"
                )
            if isinstance(node, ast.Name) and "checkpoint" in path.parts:
                assert node.id not in ("eval", "exec", "compile", "__import__", "globals"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert path.name == "foreign_formats.py", f"{path}:{node.lineno}"
                assert any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
            elif isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in UNSAFE, f"{path}:{node.lineno}"


AUDIT = """
import sys, threading, types, warnings
forbidden = []
def watch(event, args):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")):
        forbidden.append(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        forbidden.append(f"open {args[0]}")
def is_ours(value):
    kind = value if issubclass(type(value), (type, types.FunctionType, types.MethodType)) else type(value)
    return str(kind.__module__).startswith("trainwright")
def changes():
    hooks = (sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning)
    found = [str(entry) for entry in warnings.filters if entry not in filters]
    found += [str(entry) for entry in (*sys.meta_path, *sys.path_hooks, *hooks) if is_ours(entry)]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("trainwright", "__main__") and isinstance(module, types.ModuleType):
            found += [f"{name}.{key}" for key, value in vars(module).items() if key != "__name__" and is_ours(value)]
    return found
sys.dont_write_bytecode = True
import torch
filters = list(warnings.filters)
sys.addaudithook(watch)
import trainwright as tw
early = set(sys.modules)
tw.Trainer, tw.Accelerator, tw.Module
of_a_script = set(sys.modules)
print(changes())
[getattr(tw, name) for name in tw.__all__]
print(sorted(forbidden))
print("trainwright.trainer.trainer" in early, "torch.distributed.elastic.agent" in sys.modules, "deepspeed" in sys.modules)
print("torch._dynamo" in of_a_script, "torch.distributed.tensor" in of_a_script)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # which imports more of torch
filters = list(warnings.filters)
print(changes())
"""


@pytest.mark.launch
def test_importing_starts_nothing_writes_nothing_changes_no_other_package_and_is_lazy() -> None:
    done = run_command([sys.executable, "-W", "error", "-c", AUDIT])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "False False False", "False False", "[]"]


def test_kinds_of_accelerators_are_named_in_one_place() -> None:
    """Code for CUDA is in devices/cuda.py. Precisions and docstrings may mention it."""
    allowed = {"data/seeding.py": {"include_cuda"}}  # an argument that peers have, under their name
    for path in FILES:
        relative = str(path.relative_to(ROOT))
        # Names of peers are theirs.
        if relative in ("devices/cuda.py", "arguments.py") or part_of(path) == "precision":
            continue
        tree = tree_of(path)
        texts = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)}
        for node in ast.walk(tree):
            named = ""
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                named = ast.unparse(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in texts:
                named = node.value
            elif isinstance(node, (ast.Name, ast.arg)):
                named = node.id if isinstance(node, ast.Name) else node.arg
            if named not in {"cuda"} | allowed.get(relative, set()):  # `cuda` is devices/cuda.py, where it is imported
                assert "cuda" not in named.lower(), f"{relative}:{node.lineno} names {named!r}"


def test_where_tests_of_devices_lie() -> None:
    """`make test-device` looks for them only in these folders."""
    (line,) = re.findall(r'-m "device or gpu" .*', (ROOT.parent / "Makefile").read_text())
    folders = [ROOT.parent / each.rstrip(")") for each in line.split() if each.startswith("tests/")]
    marked = re.compile(r"\bmark\.(?:gpu|device)\b")
    for path in (ROOT.parent / "tests").rglob("test_*.py"):
        assert not marked.search(path.read_text()) or any(each in path.parents for each in folders), path
