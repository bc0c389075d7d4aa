"""Packing of work for another process: classes of `__main__`, and an error that names the culprit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from interpreters import run_command
from torch import nn
from torch.utils.data import Dataset

from trainwright.launch.notebook import pack

LOCK = threading.Lock()
LARGE = numpy.ones((2, 1 << 18))


class Images(Dataset[Any]):
    def __init__(self, held: Any) -> None:
        self.parts = {"held": held}

    def __getitem__(self, index: int) -> Any:
        return self.parts


class Loading:
    """Leaves one of its locks out of its state."""

    def __init__(self) -> None:
        self.file, self.guard = LOCK, LOCK

    def __getstate__(self) -> dict[str, Any]:
        return {"guard": self.guard}


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(type(self).note)  # which refers to the module
        self.guard = LOCK

    def note(self, *args: Any) -> None:
        pass


def closing_over(held: Any) -> Callable[[], Any]:
    return lambda: held


def numbers() -> Any:
    yield 1


@pytest.mark.parametrize(("make", "place"), [
    (lambda path: Images(path.open("rb")), r"data\.parts\['held'\] \(BufferedReader\)"),
    (lambda path: Images(numbers()), r"data\.parts\['held'\] \(generator\) cannot be copied .*generator"),
    (lambda path: [1, Images(threading.Lock())], r"data\[1\]\.parts\['held'\] \(lock\)"),
    (lambda path: closing_over(threading.Lock()), r"data, its variable 'held' \(lock\)"),
    (lambda path: Loading(), r"data\.guard \(lock\)"),
    (lambda path: nn.ModuleDict({"a": Locked()}), r"data\.a\.guard \(lock\)"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_cannot_be_copied_is_named(make: Callable[[Path], Any], place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    text = rf"^trainer\.fit runs in new processes, and {place}.*cloudpickle has to copy it.*Make it where"
    with pytest.raises(TypeError, match=text):
        pack(tmp_path / "work", {"model": nn.Linear(2, 2), "data": make(tmp_path / "file")}, "trainer.fit")


CHILD = """
import sys, torch
work = torch.load(sys.argv[1], weights_only=False)
layer, images = work["layer"], work["images"]
assert type(layer).__name__ == "Tied" and layer.a.weight is layer.b.weight, layer
assert images(3) == 6
places = {value.untyped_storage().data_ptr() for value in (work["view"], layer.a.weight)}
print(work["array"].shape, work["array"].sum(), len(places))
"""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


@pytest.mark.launch
def test_classes_of_a_notebook_are_copied(tmp_path: Path) -> None:
    layer, names = Tied(), {"__name__": "__main__"}
    exec("def images(x):\n    return factor() * x\n\ndef factor():\n    return 2", names)  # as a cell does
    layer.__class__ = type("Tied", (nn.Module,), {"__module__": "__main__"})
    work = {"layer": layer, "images": names["images"], "array": LARGE, "view": layer.a.weight.detach()[1]}
    pack(tmp_path / "work", work, "this test")
    assert torch.load(tmp_path / "work", weights_only=False)["layer"].a.weight.equal(layer.a.weight)
    done = run_command([sys.executable, "-c", CHILD, tmp_path / "work"])
    assert (done.stdout, done.stderr) == ("(2, 262144) 524288.0 1\n", "")
