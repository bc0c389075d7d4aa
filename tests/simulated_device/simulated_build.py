"""Compile the simulated device once, and load it: one library per version of torch, of Python and of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
NAME = "simulated_device_native"
FLAGS = ("-O1", "-g0", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


def load_native() -> ModuleType:
    """Return the compiled module. The first call on a machine compiles it while others wait."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    key = hashlib.sha256(repr((torch.__version__, sys.version, sys.platform, FLAGS)).encode())
    for source in sources:
        key.update(source.name.encode() + source.read_bytes())
    library = _cache() / f"{NAME}-{key.hexdigest()[:20]}.so"
    if not library.exists():
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                print(
                    f"the simulated device is compiled into {library.parent} (half a minute)",
                    file=sys.stderr,
                    flush=True,
                )
                _compile(library)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(library))
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _cache() -> Path:
    for folder in (os.environ.get("TORCH_EXTENSIONS_DIR"), f"{sys.prefix}/share", tempfile.gettempdir()):
        if folder and os.access(folder if os.path.isdir(folder) else os.path.dirname(folder), os.W_OK):
            path = Path(folder) / "simulated_device"
            path.mkdir(parents=True, exist_ok=True)
            return path
    raise RuntimeError("the simulated device finds no folder to keep its library in; set TORCH_EXTENSIONS_DIR to one")


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    major, minor = torch.__version__.split(".")[:2]
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        os.environ.get("CXX", "g++"),
        *FLAGS,
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-DTORCH_VERSION_MAJOR={major}",
        f"-DTORCH_VERSION_MINOR={minor}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{folder}" for folder in includes),
        str(HERE / "simulated_device.cpp"),
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        *(f"-l{name}" for name in libraries),
        "-o",
        str(unfinished),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-8000:]}")
    unfinished.replace(library)
