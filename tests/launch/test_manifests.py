"""The files of `trainwright launch --emit`: the schemas of Kubernetes' operators, and the commands in the pods."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from started import ROOT, Started, python

from trainwright.__main__ import check_names
from trainwright.launch.cli import main

SCHEMAS = yaml.safe_load(Path(__file__).with_name("kubernetes_schemas.yaml").read_text())
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict}
QUANTITY = r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?"
KUBERNETES = ["--emit", "kubernetes", "--image", "registry.example.com/train:1", "--volume", "runs"]
SCRIPT = """
import sys
import torch
import trainwright as tw

accelerator = tw.Accelerator()
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.tensor([[float(accelerator.process_index)]])).sum())
optimizer.step()
weights = accelerator.gather(torch.cat([each.detach().reshape(1) for each in model.parameters()]))
assert len(weights.unique()) == 2, weights  # the mean gradient on every rank
print(f"rank {accelerator.process_index} of {accelerator.num_processes} trained with {sys.argv[1:]}", flush=True)
"""


def problems(schema: Any, value: Any, where: str = "") -> Iterator[str]:
    """Yield what a schema rejects in a value."""
    if schema == "quantity" and not re.fullmatch(QUANTITY, str(value)):
        yield f"{where} is {value!r}, not a quantity"
    elif isinstance(schema, str) and schema != "quantity" and type(value) is not TYPES[schema]:
        yield f"{where} is {value!r}, not of type {schema}"
    elif isinstance(schema, list):
        for number, item in enumerate(value):
            yield from problems(schema[0], item, f"{where}[{number}]")
    elif isinstance(schema, dict):
        yield from (f"{where} lacks {name[:-1]}" for name in schema if name[-1] == "!" and name[:-1] not in value)
        for name, item in value.items():
            kind = next((schema[each] for each in (name, f"{name}!", "*") if each in schema), None)
            yield from [f"{where}.{name} is unknown"] if kind is None else problems(kind, item, f"{where}.{name}")


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["spec"]
    templates = [*spec.get("pytorchReplicaSpecs", {}).values(), *spec.get("replicatedJobs", [])]
    return [each["template"]["spec"].get("template", each["template"])["spec"] for each in templates]


def expand(word: str, variables: dict[str, str]) -> str:
    """Return a word of a pod's command with the variables that Kubernetes puts into it."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda name: variables[name[1]] if name[1] else "$", word)


def emitted(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    Path("train.py").write_text(SCRIPT)
    assert main(["launch", *arguments], check_names) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--cpu", "--num-nodes", "3", "--grace-seconds", "9", "--job-id", "mine")])
def test_the_manifests_follow_the_published_schemas(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    job, job_set = yaml.safe_load_all(emitted(capsys, *KUBERNETES, "--devices", "2", *flags, "train.py"))
    assert not list(problems(SCHEMAS["PyTorchJob"], job))
    assert not list(problems(SCHEMAS["JobSet"], job_set))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    roles = job["spec"]["pytorchReplicaSpecs"]
    indexed = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert {role: each["replicas"] for role, each in roles.items()} == {"Master": 1, **({"Worker": 2} if flags else {})}
    assert (indexed["completions"], indexed["parallelism"]) == ((3, 3) if flags else (1, 1))
    for pod in (*pods_of(job), *pods_of(job_set)):
        (container,) = pod["containers"]
        assert pod["terminationGracePeriodSeconds"] == (39 if flags else 150)
        limits = {} if flags else {"limits": {"nvidia.com/gpu": 2}}
        assert container["resources"] == {"requests": {"cpu": 8}, **limits}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"runs": "/runs", "shm": "/dev/shm"}
    container["restart"] = container.pop("name")
    container["command"] = [1]
    assert [problem.rpartition("]")[2] for problem in problems(SCHEMAS["JobSet"], job_set)] == [
        " lacks name", " is 1, not of type string", ".restart is unknown",
    ]  # fmt: skip


def test_the_page_shows_the_printed_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    (shown,) = re.findall(
        r"^```\ntrainwright (launch --emit .*)\n```\n\n```\n(.*?)```$", page, re.MULTILINE | re.DOTALL
    )
    assert main(shown[0].split(), check_names) == 0
    assert capsys.readouterr().out == shown[1]


def test_the_sbatch_file_has_the_settings_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--emit", "slurm", "--time", "04:00:00", "--devices", "4"]
    head, _, command = emitted(capsys, *flags, "train.py", "--name", "a b").partition("\n\n")
    assert command == f"srun --cpus-per-task=4 {sys.executable} train.py --name 'a b'\n"
    settings = ["job-name=train", "nodes=1", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=4", "time=04:00:00"]
    settings += ["signal=USR1@120", "requeue", "output=./%x-%j.out"]
    assert head.splitlines()[2:] == [f"#SBATCH --{setting}" for setting in settings]
    flags += ["--cpu", "--cpus", "2", "--num-nodes", "2", "--logs", "logs", "--grace-seconds", "9", "--job-id", "mine"]
    text = emitted(capsys, *flags, "-m", "train")
    assert "gpus" not in text
    for part in ("name=mine", "nodes=2", "task=2", "USR1@9", "output=logs/%x-%j.out", f"{sys.executable} -m train"):
        assert f"{part}\n" in text


@pytest.mark.launch
@pytest.mark.parametrize("kind", ["train.py", "PyTorchJob", "JobSet"])
def test_the_pods_of_a_job_train_together(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cpu", "--devices", "2", "--num-nodes", "2"]
    manifests = list(yaml.safe_load_all(emitted(capsys, *KUBERNETES, *flags, "train.py", "$(RANK)")))
    commands = {each["kind"]: pods_of(each)[-1]["containers"][0]["command"] for each in manifests}
    program, *words = commands.get(kind, ["python", "train.py", "$$(RANK)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    pods = []
    try:
        for rank in "01":
            # What the operator sets, but for the names of the cluster.
            names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank}
            elastic = {"NNODES": "2", "NPROC_PER_NODE": "auto", "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            variables = {**names, **{f"PET_{name}": value for name, value in elastic.items()}, "PYTHONUNBUFFERED": "0"}
            if kind == "JobSet":
                variables = {"JOB_COMPLETION_INDEX": rank}
                words = [{"train-node-0-0.train": "127.0.0.1", "29500": port}.get(word, word) for word in words]
            start = python("-m", "trainwright") if program == "trainwright" else python()
            pods.append(Started([*start, *(expand(word, variables) for word in words)], tmp_path, **variables))
        assert [pod.wait() for pod in pods] == [0, 0], [pod.stderr for pod in pods]
    finally:
        for pod in pods:
            pod.close()
    count = 2 if kind == "train.py" else 4
    said = sorted(line[line.index("rank ") :] for pod in pods for line in pod.stdout.splitlines())
    assert said == [f"rank {rank} of {count} trained with ['$(RANK)']" for rank in range(count)]
