"""One process of benchmarks/gpu.py: it runs one implementation of one case, or describes this machine (`describe`).

python benchmarks/gpu_process.py SETTINGS      # a JSON object that the parent makes
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def describe(device: str) -> dict[str, Any]:
    """Return what the parent needs to know about the machine: the device, its memory, and the installed versions."""
    import importlib.metadata
    import importlib.util
    import platform

    import torch
    from gpu_cases import PACKAGES

    if not device:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = "" if found is None else found.type
    else:
        from trainwright.devices.hardware import resolve_device_type

        device = resolve_device_type(device)  # which says what is here where it is not
    facts: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "name": "CPU" if device == "cpu" else device,
        "count": 1,
        "memory_gib": 0.0,
        "cuda": torch.version.cuda or torch.version.hip or "",
    }
    packages = [*sorted(set(PACKAGES.values())), "matplotlib", "triton"]
    facts["installed"] = [each for each in packages if importlib.util.find_spec(each) is not None]
    for each in ("lightning", "accelerate", "transformers", "pytorch-ignite", "triton"):
        try:
            facts.setdefault("versions", {})[each] = importlib.metadata.version(each)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device not in ("", "cpu"):
        facts.update(_describe_device(device))
    return facts


def _describe_device(device: str) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {}
    module = torch.get_device_module(device)
    for key, ask in (
        ("count", torch.accelerator.device_count),
        ("name", lambda: str(module.get_device_name(0))),
        ("memory_gib", lambda: module.mem_get_info(0)[1] / 2**30),
    ):
        try:
            facts[key] = ask()
        except (RuntimeError, AttributeError, NotImplementedError, TypeError):
            continue  # not every device says so
    return facts


def run(settings: dict[str, Any]) -> None:
    """Run what the settings say, once the parent says to begin."""
    import importlib

    from gpu_cases import PACKAGES, Case
    from gpu_pacer import Channel, Pacer

    channel = Channel(settings["descriptor"])
    name = settings["implementation"]
    try:
        import torch

        case = Case(**settings["case"])
        if name in PACKAGES:
            importlib.import_module(PACKAGES[name])
        from gpu_work import Work

        module = importlib.import_module(_home(case.kind, name))
        if case.kind != "start":
            channel.tell("imported")
            channel.command()
        device = torch.device(settings["device"])
        if device.type != "cpu":
            device = torch.device(device.type, 0)
        if case.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        work = Work(
            case,
            device,
            is_small=settings["small"],
            with_transformers=settings["with_transformers"],
            compiler=settings["compiler"],
            folder=settings["folder"],
        )
        if case.kind == "save":
            from gpu_saves import run_saves

            run_saves(getattr(module, name), work, channel)
        else:
            getattr(module, name)(work, Pacer(channel, device, settings["crowded"], work.facts()))
        channel.tell("failed", reason="the loop came to the end of its data before it was told to stop")
    except ImportError as error:
        channel.tell("failed", reason=f"cannot be imported: {error}"[:500])
        raise
    except BaseException as error:
        text = (str(error).strip().splitlines() or [""])[0]
        channel.tell("failed", reason=f"{type(error).__name__}: {text}"[:500])
        raise


def _home(kind: str, name: str) -> str:
    """Return the file that defines an implementation."""
    if kind == "save":
        return "gpu_saves"
    return "gpu_loops" if name.startswith(("by_hand", "trainwright")) else "gpu_peers"


def main() -> None:
    settings = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")  # the peers' advice on logging intervals and loader workers
    logging.disable(logging.WARNING)
    if "describe" in settings:
        os.write(settings["descriptor"], json.dumps(describe(settings["describe"])).encode())
    else:
        run(settings)


if __name__ == "__main__":
    main()
