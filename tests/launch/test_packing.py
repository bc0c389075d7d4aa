"""Packing of work for another process: by value where needed, with an error that names the culprit."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest
from interpreters import run_command
from torch import nn
from torch.utils.data import Dataset

from trainwright.launch.packing import is_importable, pack, unpack

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


MADE_UP = """
import threading
from torch import nn

LOCK = threading.Lock()

def twice(x):
    return 2 * x

def takes_the_lock():
    with LOCK:
        pass

class Locked(nn.Module):
    def forward(self, batch):
        return takes_the_lock()
"""


@pytest.fixture
def made_up() -> Iterator[Any]:
    """A module that stands in no file, as a notebook's cells do."""
    module = types.ModuleType("made_up")
    sys.modules["made_up"] = module
    exec(MADE_UP, module.__dict__)
    yield module
    del sys.modules["made_up"]


def closing_over(held: Any) -> Callable[[], Any]:
    return lambda: held


def numbers() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda path: Images(path.open("rb")), r"data\.parts\['held'\] \(BufferedReader\)"),
        (lambda path: Images(numbers()), r"data\.parts\['held'\] \(generator\) cannot be copied .*generator"),
        (lambda path: [1, Images(threading.Lock())], r"data\[1\]\.parts\['held'\] \(lock\)"),
        (lambda path: closing_over(threading.Lock()), r"data, its variable 'held' \(lock\)"),
        (lambda path: Loading(), r"data\.guard \(lock\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_cannot_be_copied_is_named(make: Callable[[Path], Any], place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    text = rf"^trainer\.fit runs in new processes, and {place}.*cloudpickle has to copy it.*Make it where"
    with pytest.raises(TypeError, match=text):
        pack(tmp_path / "work", {"model": nn.Linear(2, 2), "data": make(tmp_path / "file")}, "trainer.fit")


def test_a_culprit_in_the_code_is_named(made_up: Any, tmp_path: Path) -> None:
    text = r"model\.1, its class Locked\.forward, its variable 'takes_the_lock', its variable 'LOCK' \(lock\) cannot"
    with pytest.raises(TypeError, match=text):
        pack(tmp_path / "work", {"model": nn.Sequential(nn.Linear(1, 1), made_up.Locked())}, "trainer.fit")


CHILD = """
import sys
from pathlib import Path
from trainwright.launch.packing import unpack
work = unpack(Path(sys.argv[1]))
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
def test_classes_that_nobody_could_import_travel_along(made_up: Any, tmp_path: Path) -> None:
    layer = Tied()
    layer.__class__ = type("Tied", (nn.Module,), {"__module__": "made_up"})
    assert not is_importable(made_up)
    assert is_importable(nn)
    assert is_importable(sys.modules["trainwright.launch.packing"])
    work = {"layer": layer, "images": made_up.twice, "array": LARGE, "view": layer.a.weight.detach()[1]}
    pack(tmp_path / "work", work, "this test")
    assert cloudpickle.list_registry_pickle_by_value() == set()
    assert unpack(tmp_path / "work")["layer"].a.weight.equal(layer.a.weight)
    done = run_command([sys.executable, "-c", CHILD, tmp_path / "work"])
    assert (done.stdout, done.stderr) == ("(2, 262144) 524288.0 1\n", "")
