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
from trainwright.launch.config import FROM_1, Config, NameCheck, flag_of, setting_of

PASSED_ON = ("strategy", "precision", "gradient_accumulation_steps", "max_restarts", "grace_seconds", "logs", "job_id")
"""Flags that the command in a pod takes too."""
FLAGS = {
    "slurm": ("devices", "time", "num_nodes", "cpu", "cpus", "grace_seconds", "logs", "job_id"),
    "kubernetes": ("devices", "image", "volume", "num_nodes", "cpu", "cpus", *PASSED_ON),
}
"""The flags that each file takes."""
EXAMPLES = {"devices": "4", "time": "04:00:00", "image": "registry.example.com/train:1", "volume": "runs"}
"""The flags without a default, with examples."""
TIME = r"(\d+-)?\d+(:\d\d){0,2}", "minutes, HH:MM:SS or DAYS-HH:MM:SS"
NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "lowercase letters, digits and -, as in my-run"
FORMS = {"devices": FROM_1, "cpus": FROM_1, "time": TIME, "volume": NAME}
RESTARTS = 20
"""The restarts for each pod. The first ones may be needed until the name of the first pod is known to the others."""


def emit(options: argparse.Namespace, command: Sequence[str], check_names: NameCheck) -> str:
    """Return the file of --emit for a script with its arguments (ValueError if a flag is missing or wrong)."""
    allowed, given = FLAGS[options.emit], vars(options)
    for name, value in given.items():
        flag, (pattern, words) = flag_of(name), FORMS.get(name, ("", ""))
        if value and name not in (*allowed, "emit"):
            flags = ", ".join(map(flag_of, allowed))
            raise ValueError(f"{flag} was given with --emit {options.emit}, which takes {flags}. Leave it out.")
        if not value and name in allowed and name in EXAMPLES:
            raise ValueError(f"--emit {options.emit} needs {flag}. Add it, for example {flag} {EXAMPLES[name]}.")
        if value and pattern and not re.fullmatch(pattern, value):
            raise ValueError(f"{flag} {value}: expected {words}.")
    nodes, grace = (setting_of(name, given, {}, Config()).value for name in ("num_nodes", "grace_seconds"))
    devices, cpus = int(options.devices), int(options.cpus or 4)  # three are for the loader's workers
    check_names(options.strategy, options.precision, devices * nodes)
    if options.emit == "kubernetes":
        return _kubernetes(options, command, nodes, devices * cpus, grace)
    gpus = "" if options.cpu else f"#SBATCH --gpus-per-node={devices}\n"
    return f"""#!/bin/bash
# Submit this file with sbatch, from the folder in which the script is to run. Create the folder of --output first.
#SBATCH --job-name={options.job_id or "train"}
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


def _kubernetes(options: argparse.Namespace, command: Sequence[str], nodes: int, cpus: int, grace: int) -> str:
    import yaml

    name, devices = options.job_id or "train", options.devices
    if not re.fullmatch(NAME[0], name):
        raise ValueError(f"--job-id {name}: expected {NAME[1]}.")
    flags = ["--devices", devices, *(["--cpu"] if options.cpu else [])]
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
            "resources": {"requests": {"cpu": cpus}, "limits": {} if options.cpu else {"nvidia.com/gpu": int(devices)}},
            "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
        }
        volumes = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        ]
        # Kubernetes kills a pod 30 seconds after the end of the grace period.
        return {"terminationGracePeriodSeconds": grace + 30, "containers": [container], "volumes": volumes}

    def role(replicas: int) -> dict[str, Any]:
        template = {"spec": pod("$(RANK)", "$(MASTER_ADDR)", "$(MASTER_PORT)")}
        return {"replicas": replicas, "restartPolicy": "OnFailure", "template": template}

    def manifest(version: str, kind: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}

    restarts = {"backoffLimit": RESTARTS * nodes}
    roles = {"Master": role(1)} | ({"Worker": role(nodes - 1)} if nodes > 1 else {})
    indexed_pod = pod("$(JOB_COMPLETION_INDEX)", f"{name}-node-0-0.{name}", str(DEFAULT_PORT))
    job: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes, **restarts}
    job["template"] = {"spec": {"restartPolicy": "OnFailure", **indexed_pod}}
    documents = [
        manifest("kubeflow.org/v1", "PyTorchJob", runPolicy=restarts, pytorchReplicaSpecs=roles),
        manifest("jobset.x-k8s.io/v1alpha2", "JobSet", replicatedJobs=[{"name": "node", "template": {"spec": job}}]),
    ]
    text = yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=None, width=1000)
    return f"# Two manifests of the same job. Apply only one, for the operator that the cluster has.\n{text}"
