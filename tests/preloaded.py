"""What the server of forked.py has loaded before it forks: what each job and each program would load again."""

from __future__ import annotations

import gc
import importlib
import weakref

from huge_pages import collapse

import trainwright as tw

MODULES = (
    "pytest",  # which many jobs use
    "torch._dynamo.eval_frame",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torchmetrics.classification",  # and what it loads where that is installed, which takes longer than torch
)
for module in MODULES:
    importlib.import_module(module)
for name in tw.__all__:
    getattr(tw, name)
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False  # or each rank would take torch's operators apart when it ends
collapse()
gc.collect()
gc.freeze()  # so that a rank's collections leave it alone, and its pages stay shared
