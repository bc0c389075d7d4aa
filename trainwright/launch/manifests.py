"""Manifests: the files that `trainwright launch --emit` prints, for SLURM and for two operators of Kubernetes.

Only flags count: a config and the environment belong to this machine, and the file describes others.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from trainwright.distributed.network import DEFAULT_PORT
from trainwright.launch.config import Config, NameCheck, Sources, flag_of
from trainwright.launch.processes import GRACE_SECONDS

NEEDED = {
    "slurm": {"devices": "4", "time": "04:00:00"},
    "kubernetes": {"devices": "4", "image": "registry.example.com/train:1", "volume": "runs"},
}
"""The flags that each file needs, with examples."""
PASSED_ON = ("strategy", "precision", "gradient_accumulation_steps", "max_restarts", "grace_seconds", "logs", "job_id")
"""Flags that the command in a pod takes too."""
OPTIONAL = {
    "slurm": ("num_nodes", "cpu", "cpus", "grace_seconds", "logs", "job_id"),
    "kubernetes": ("num_nodes", "cpu", "cpus", *PASSED_ON),
}
NAME_FORM = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "lowercase letters, digits and -, as in my-run"
FORMS = {
    ("slurm", "time"): (r"(\d+-)?\d+(:\d\d){0,2}", "minutes, HH:MM:SS or DAYS-HH:MM:SS"),
    ("kubernetes", "volume"): NAME_FORM,
    ("kubernetes", "job_id"): NAME_FORM,
}
"""The values that SLURM and Kubernetes accept."""
RESTARTS = 20
"""The restarts for each pod. The first ones may be needed until the name of the first pod is known to the others."""
SECONDS_TO_END = 30
"""How long after the grace period Kubernetes kills a pod."""


def emit(options: argparse.Namespace, command: Sequence[str], check_names: NameCheck) -> str:
    """Return the file of --emit for a script with its arguments (ValueError if a flag is missing or wrong)."""
    _check_flags(options)
    sources = Sources(options, {}, Config())
    devices = sources.number("devices", least=1).value
    nodes = sources.number("num_nodes", 1, least=1).value
    cpus = sources.number("cpus", 4, least=1).value  # three are for the loader's workers
    grace = sources.number("grace_seconds", GRACE_SECONDS).value
    check_names(options.strategy, options.precision, devices * nodes)
    name = options.job_id or "train"
    if options.emit == "kubernetes":
        resources = {"requests": {"cpu": devices * cpus}, "limits": {} if options.cpu else {"nvidia.com/gpu": devices}}
        return _kubernetes(options, command, name, nodes, resources, grace + SECONDS_TO_END)
    folder = (
        f"# SLURM does not create the folder of the output: mkdir -p {shlex.quote(options.logs)}\n"
        if options.logs
        else ""
    )
    gpus = "" if options.cpu else f"#SBATCH --gpus-per-node={devices}\n"
    return f"""#!/bin/bash
# Submit this file with sbatch, from the folder in which the script is to run.
{folder}#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={devices}
{gpus}#SBATCH --cpus-per-task={cpus}
#SBATCH --time={options.time}
#SBATCH --signal=USR1@{grace}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={shlex.quote(os.path.join(options.logs or "", "%x-%j.out"))}

srun --cpus-per-task={cpus} {shlex.join([sys.executable, *command])}
"""


def _check_flags(options: argparse.Namespace) -> None:
    needed = NEEDED[options.emit]
    allowed = (*needed, *OPTIONAL[options.emit])
    for name, value in vars(options).items():
        flag = flag_of(name)
        if value and name not in (*allowed, "emit"):
            flags = ", ".join(map(flag_of, allowed))
            raise ValueError(f"{flag} was given with --emit {options.emit}, which takes {flags}. Leave it out.")
        if not value and name in needed:
            raise ValueError(f"--emit {options.emit} needs {flag}. Add it, for example {flag} {needed[name]}.")
        pattern, words = FORMS.get((options.emit, name), ("", ""))
        if value and pattern and not re.fullmatch(pattern, value):
            raise ValueError(f"{flag} {value!r} is not accepted by --emit {options.emit}. Pass {words}.")


def _kubernetes(
    options: argparse.Namespace, command: Sequence[str], name: str, nodes: int, resources: dict[str, Any], seconds: int
) -> str:
    import yaml

    flags = ["--devices", options.devices, *(["--cpu"] if options.cpu else [])]
    flags += [word for flag in PASSED_ON if (value := getattr(options, flag)) for word in (flag_of(flag), value)]

    def pod(rank: str, address: str, port: str) -> dict[str, Any]:
        where = ["--num-nodes", str(nodes), "--node-rank", rank, "--main-address", address, "--main-port", port]
        # Kubernetes replaces $(NAME) by a variable of the pod, also in the arguments of the script.
        words = [word.replace("$(", "$$(") for word in (*flags, *command)]
        container = {
            "name": "pytorch",  # the operator of PyTorchJobs requires this name
            "image": options.image,
            "command": ["trainwright", "launch", *(where if nodes > 1 else []), *words],
            "env": [{"name": "RUNS", "value": "/runs"}],
            "resources": resources,
            "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
        }
        volumes = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        ]
        return {"terminationGracePeriodSeconds": seconds, "containers": [container], "volumes": volumes}

    def manifest(version: str, kind: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}

    role = {"restartPolicy": "OnFailure", "template": {"spec": pod("$(RANK)", "$(MASTER_ADDR)", "$(MASTER_PORT)")}}
    roles = {"Master": {"replicas": 1, **role}}
    if nodes > 1:
        roles["Worker"] = {"replicas": nodes - 1, **role}
    restarts = {"backoffLimit": RESTARTS * nodes}
    indexed_pod = pod("$(JOB_COMPLETION_INDEX)", f"{name}-node-0-0.{name}", str(DEFAULT_PORT))
    job: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes, **restarts}
    job["template"] = {"spec": {"restartPolicy": "OnFailure", **indexed_pod}}
    documents = [
        manifest("kubeflow.org/v1", "PyTorchJob", runPolicy=restarts, pytorchReplicaSpecs=roles),
        manifest("jobset.x-k8s.io/v1alpha2", "JobSet", replicatedJobs=[{"name": "node", "template": {"spec": job}}]),
    ]
    text = yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=None, width=1000)
    return f"# Two manifests of the same job. Apply only one, for the operator that the cluster has.\n{text}"
