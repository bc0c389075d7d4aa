"""Modules that the server of forked.py loads before it forks, so that jobs and programs need not load them."""

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
    "torchmetrics.classification",  # and its dependencies, which take longer than torch
)
for module in MODULES:
    importlib.import_module(module)
for name in tw.__all__:
    getattr(tw, name)
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False  # otherwise a rank takes torch's operators apart when it ends
collapse()
gc.collect()
gc.freeze()  # so that a rank's collections skip it, and its pages stay shared
