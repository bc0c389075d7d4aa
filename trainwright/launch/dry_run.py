"""Dry run: what `trainwright launch --dry-run` prints of a job that it does not start."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from trainwright.distributed.masking import shown
from trainwright.launch.nodes import Job


def describe_job(job: Job, passed_on: Mapping[str, Any], new: Mapping[str, str]) -> str:
    """Return a job's command, its processes, and the variables that the launcher would set."""
    count = job.num_processes
    ranks = f"0 to {count - 1}" if count > 1 else "0"
    world = f"WORLD_SIZE={count}" if job.nodes.count == 1 else f"WORLD_SIZE of all {job.nodes.count} machines"
    where = f"{job.nodes.address}:{job.nodes.port or 'a free port'}"
    machine = "a machine" if job.nodes.rank is None else f"machine {job.nodes.rank}"
    machines = f"{job.nodes.least} to {job.nodes.count}" if job.nodes.rank is None else f"{job.nodes.count}"
    lines = [
        f"would run {count} process(es) on {machine} of {machines}, which meet at {where}:",
        f"  {shlex.join(job.command)}",
        f"with LOCAL_RANK {ranks}, LOCAL_WORLD_SIZE={count}, {world}, and:",
        *(f"  {name}={shlex.quote(shown(name, value))}" for name, value in new.items()),
    ]
    chosen = {name: value for name, value in passed_on.items() if value is not None}
    lines.append(f"what the script leaves open is set to: {json.dumps(chosen) if chosen else 'nothing'}")
    return "\n".join(lines if new else [lines[0], lines[1], lines[2].replace(", and:", ""), lines[-1]])
