"""Variables: which of the environment concern a job, and what of them may be shown."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainwright.distributed.masking import shown
from trainwright.launch.config import Config

__all__ = ["of_jobs", "printable", "set_variables_of"]

BEGINNINGS = (
    "TRAINWRIGHT",
    "TORCH",
    "TORCHELASTIC",
    "PYTORCH",
    "GLOO",
    "OMP",
    "MKL",
    "DS",
    "DEEPSPEED",
    "OMPI_COMM_WORLD",
)
"""What the names of a job's variables begin with, before an underscore."""
NAMES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("PMI_RANK", "PMI_SIZE"),
}


def of_jobs(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process, or those given, that concern launchers, torch and devices; secrets hidden."""
    from trainwright.devices import cuda

    variables = os.environ if variables is None else variables
    beginnings = tuple(f"{each}_" for each in (*BEGINNINGS, *cuda.VARIABLES))
    return {
        name: shown(name, variables[name]) for name in sorted(variables) if name in NAMES or name.startswith(beginnings)
    }


def set_variables_of(config: Config) -> dict[str, str]:
    """Set the variables of a config that are not set yet, before torch looks for GPUs; return all that are."""
    os.environ.update({name: entry.text for name, entry in config.variables.items() if name not in os.environ})
    return dict(os.environ)


def printable(text: str) -> str:
    """Return a text on one line, with control characters as escapes: they would change a terminal."""
    return (
        text
        if text.isprintable()
        else "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    )
