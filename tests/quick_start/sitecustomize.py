"""Makes an interpreter that a test starts collect less garbage, by its PYTHONPATH.

torch makes 170,000 objects when it is imported, and its compiler as many again. None of them are garbage. Python would look
at them again and again while it imports more, and several times when it ends: a third of the CPU time of a process that does
little else. So they are frozen, and with them what the program has made before, which is then freed when nothing refers to
it. Full collections become rarer. Later objects are collected as ever.
"""

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LARGE = {"torch", "torch._dynamo"}


class Freezer:
    """A finder that freezes the objects of large packages once they are imported."""

    @staticmethod
    def find_spec(name: str, path: "Sequence[str] | None" = None, target: object = None) -> "ModuleSpec | None":
        spec = PathFinder.find_spec(name, path) if name in LARGE else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                was_enabled = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                finally:
                    if was_enabled:
                        gc.enable()
                gc.freeze()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Freezer)
young, middle, _ = gc.get_threshold()
gc.set_threshold(young, middle, 1000)
