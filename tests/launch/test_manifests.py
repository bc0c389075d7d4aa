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
from trainwright.launch.cli import launch_command

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
    assert launch_command([*arguments], check_names) == 0
    return capsys.readouterr().out


def test_the_manifests_follow_the_published_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cpu", "--num-nodes", "3", "--grace-seconds", "9", "--job-id", "mine", "--max-restarts", "1"]
    single = emitted(capsys, *KUBERNETES, "--devices", "2", "train.py")
    several = emitted(capsys, *KUBERNETES, "--devices", "2", *flags, "train.py")
    manifests = [*yaml.safe_load_all(single), *yaml.safe_load_all(several)]
    assert [list(problems(SCHEMAS[each["kind"]], each)) for each in manifests] == [[]] * 4
    assert "Worker" not in single
    assert "nvidia" not in several
    for text in ("name: mine}", "replicas: 2", "completions: 3", "PeriodSeconds: 39", "cpu: 8", "--max-restarts, '1'"):
        assert text in several, text
    container = pods_of(manifests[-1])[0]["containers"][0]
    container["restart"], container["command"] = container.pop("name"), [1]
    found = [problem.rpartition("]")[2] for problem in problems(SCHEMAS["JobSet"], manifests[-1])]
    assert found == [" lacks name", " is 1, not of type string", ".restart is unknown"]


def test_the_page_shows_the_printed_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    block = r"^```\ntrainwright (launch --emit .*)\n```\n\n```\n(.*?)```$"
    (shown,) = re.findall(block, (ROOT / "docs/kubernetes.md").read_text(), re.MULTILINE | re.DOTALL)
    assert launch_command(shown[0].split()[1:], check_names) == 0
    assert capsys.readouterr().out == shown[1]


def test_the_sbatch_file_has_the_settings_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--emit", "slurm", "--time", "04:00:00", "--devices", "4"]
    head, _, command = emitted(capsys, *flags, "train.py", "--name", "a b").partition("\n\n")
    assert command == f"srun --cpus-per-task=4 {sys.executable} train.py --name 'a b'\n"
    settings = ["job-name=train", "nodes=1", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=4", "time=04:00:00"]
    settings += ["signal=USR1@120", "requeue", "open-mode=append", "output=%x-%j.out"]
    assert head.splitlines()[2:] == [f"#SBATCH --{setting}" for setting in settings]
    flags += ["--cpu", "--cpus", "2", "--num-nodes", "2", "--logs", "logs", "--grace-seconds", "9", "--job-id", "mine"]
    text = emitted(capsys, *flags, "-m", "train")
    assert "gpus" not in text
    for part in ("name=mine", "nodes=2", "task=2", "USR1@9", "output=logs/%x-%j.out", f"{sys.executable} -m train"):
        assert f"{part}\n" in text


@pytest.mark.launch
@pytest.mark.parametrize("per_pod", [1, 2])
def test_pods_are_the_nodes_of_one_job(per_pod: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cpu", "--devices", "2", "--num-nodes", "2"]
    manifests = list(yaml.safe_load_all(emitted(capsys, *KUBERNETES, *flags, "train.py", "$(RANK)")))
    words, indexed = (pods_of(each)[-1]["containers"][0]["command"] for each in manifests)
    others = {"$(JOB_COMPLETION_INDEX)": "$(RANK)", "train-node-0-0.train": "$(MASTER_ADDR)", "29500": "$(MASTER_PORT)"}
    assert [others.get(word, word) for word in indexed] == words
    words = ["-m", *words] if per_pod == 2 else words[-2:]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    pods = []
    try:
        for rank in "01":
            # What the operator sets, but for the name of the first pod.
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank}
            variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NPROC_PER_NODE": "auto"}
            variables |= {"PET_NNODES": "2", "PET_NODE_RANK": rank, "PYTHONUNBUFFERED": "0"}
            pods.append(Started(python(*(expand(word, variables) for word in words)), tmp_path, **variables))
        assert [pod.wait() for pod in pods] == [0, 0], [pod.stderr for pod in pods]
    finally:
        for pod in pods:
            pod.close()
    said = sorted(line[line.index("rank ") :] for pod in pods for line in pod.stdout.splitlines())
    assert said == [f"rank {rank} of {2 * per_pod} trained with ['$(RANK)']" for rank in range(2 * per_pod)]
