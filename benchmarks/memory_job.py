"""One rank of a job of benchmarks/sharded_memory.py: trains networks of one family, and counts what this rank holds.

The bytes are those of storages of real tensors, each counted once. A part that grows and shrinks within a step counts with
its peak, which is looked for at each call of a submodule and whenever a parameter has its gradient.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import math
import os
import socket
import struct
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from memory_models import FAMILIES, Family
from strategy_loops import resident
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

import trainwright as tw

BUCKET = 2**18
"""The elements of a small bucket."""
TENSOR_PLAN = {"words": "rowwise", "blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
"""The divided layers of a transformer, after the name of the Measured module's network."""
SMALL_BUFFERS: dict[str, dict[str, Any]] = {
    "deepspeed_stage_2 small": {"reduce_bucket_size": BUCKET},
    "deepspeed_stage_3 small": {
        "reduce_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_max_live_parameters": BUCKET,
        "stage3_max_reuse_distance": BUCKET,
        "stage3_param_persistence_threshold": 1000,
        "memory_efficient_linear": True,  # for the whole process from then on, so this strategy comes last
    },
}
"""DeepSpeed's own buffers are made for larger networks: by default they are as large as one of these."""
ACKNOWLEDGED = 120
"""The place of the acknowledged bytes in Linux's tcp_info."""
STEPS = 2
"""The first makes the optimizer's state, the second has all at once."""


class Held(NamedTuple):
    """What the rank that holds most has, in bytes."""

    parameters: int
    """Between two steps."""
    gathered: int
    """Parameters of others' shards that are here too within a step."""
    gradients: int
    """With the buckets in which they are sent."""
    optimizer: int
    """The optimizer's state, and masters that it steps."""
    activations: int
    """What forward saves for backward, parameters apart."""
    peak: int
    """By which the process has grown; without what it kept free from earlier, and with all else."""
    ahead: int
    """The buffers of groups that fsdp has begun to gather, which no parameter shows yet."""
    sent: int
    """The bytes that a rank has sent over its sockets in the last step, on average."""

    @property
    def total(self) -> int:
        return sum(self[:5])


class Storages:
    """Storages that were seen, without keeping them alive."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}

    def note(self, tensors: Iterator[Tensor] | list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() > 0:
                known = self._seen.get(storage._cdata)
                if known is None or known.expired():
                    self._seen[storage._cdata] = StorageWeakRef(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        known = self._seen.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def alive(self) -> int:
        """Return the bytes of those that are still there."""
        self._seen = {key: each for key, each in self._seen.items() if not each.expired()}
        strong = [torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._seen.values()]
        return sum(each.nbytes() for each in strong if each is not None)  # fsdp's are there without bytes between calls


class Measured(tw.Module):
    """A network whose saved activations are counted, trained by Adam."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.parameters_seen, self.activations_seen = Storages(), Storages()
        self.activations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def note(tensor: Tensor) -> Tensor:
            if local(tensor) not in self.parameters_seen:
                self.activations_seen.note([local(tensor)])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.network(batch)
        self.activations = max(self.activations, self.activations_seen.alive())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Count(tw.Callback):
    """Looks at a Measured module's parameters and gradients while it trains."""

    def __init__(self, baseline: int) -> None:
        self.baseline = baseline
        self.held: Held | None = None
        self.gradients_seen = Storages()
        self.most_parameters, self.most_gradients = 0, 0
        self.most_ahead, self.sent = 0, 0
        self.whole: dict[int, Tensor] = {}
        """fsdp's gathered parameters, which have the gradients within a backward."""
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.trainer, self.module = trainer, module
        module.parameters_seen.note(self.shards())
        stepped = [getattr(each, "own", each) for each in trainer.optimizers]
        self._handles = [
            *(each.register_forward_pre_hook(self._before_call) for each in module.network.modules()),
            *(each.register_post_accumulate_grad_hook(self._look) for each in module.parameters()),
            *(each.register_step_pre_hook(self._look) for each in stepped),
        ]
        for zero in self._zero_optimizers():
            if hasattr(
                zero, "_release_ipg_buffers"
            ):  # stages 1 and 2: the bucket and this rank's averages are both there
                zero._release_ipg_buffers = partial(self._look_and_call, zero._release_ipg_buffers)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.barrier()
        self.sent = -sent_bytes()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.barrier()
        self.sent += sent_bytes()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._look()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Count what there is after a step, and keep the figures of the rank that holds most. Collective."""
        peak = resident("VmHWM") - self.baseline
        kept, optimizer = Storages(), Storages()
        kept.note(self.shards())
        optimizer.note(each for each in self._optimizer_state() if each not in kept)
        parameters = kept.alive()
        gradients = self.most_gradients + sum(each.nbytes for each in self._reducer_buckets())
        parts = (parameters, self.most_parameters - parameters, gradients, optimizer.alive(), module.activations, peak)
        parts += (self.most_ahead, self.sent)
        by_rank = trainer.strategy.all_gather(torch.tensor(parts)).reshape(-1, len(parts)).tolist()
        held = max((Held(*map(int, each)) for each in by_rank), key=lambda held: held.total)
        self.held = held._replace(sent=int(sum(each[-1] for each in by_rank) / len(by_rank)))
        for each in self._handles:  # a tensor's hooks would keep all of this alive
            each.remove()
        for zero in self._zero_optimizers():
            vars(zero).pop("_release_ipg_buffers", None)
        self._handles.clear()
        self.whole.clear()
        del self.trainer, self.module

    def _before_call(self, module: nn.Module, inputs: Any) -> None:
        for each in module.parameters():
            # fsdp has gathered a parameter that is divided over a tensor group only.
            is_gathered = not isinstance(each, DTensor) or each.device_mesh.mesh_dim_names == ("tensor",)
            if is_gathered and each.numel() > 0:
                self.module.parameters_seen.note([local(each.data)])
                if id(each) not in self.whole and each.is_leaf:
                    self._handles.append(each.register_post_accumulate_grad_hook(self._look))
                    self.whole[id(each)] = each
        self._look()

    def _look(self, *_: Any) -> None:
        self.gradients_seen.note(self._gradients())
        self.most_gradients = max(self.most_gradients, self.gradients_seen.alive())
        self.most_parameters = max(self.most_parameters, self.module.parameters_seen.alive())
        self.most_ahead = max(self.most_ahead, sum(each.nbytes for each in self._begun_gathers()))

    def _look_and_call(self, function: Callable[[], None]) -> None:
        self._look()
        function()

    def shards(self) -> Iterator[Tensor]:
        """Yield this rank's parts of the parameters, as they are kept between steps."""
        for each in self.module.parameters():
            yield local(each.data)
            if hasattr(each, "ds_tensor"):
                yield each.ds_tensor.data

    def _optimizer_state(self) -> Iterator[Tensor]:
        for optimizer in self.trainer.optimizers:
            for state in optimizer.state.values():
                yield from (local(each) for each in state.values() if isinstance(each, Tensor))
        for zero in self._zero_optimizers():
            yield from getattr(zero, "single_partition_of_fp32_groups", [])
            yield from getattr(zero, "fp32_partitioned_groups_flat", [])

    def _gradients(self) -> Iterator[Tensor]:
        for each in (*self.module.parameters(), *self.whole.values()):
            if each.grad is not None:
                yield local(each.grad)
        for optimizer in self.trainer.optimizers:  # ddp_sharded's buckets, which replace gradients that are sent
            yield from (flat for flat, *_ in getattr(optimizer, "_sent", ()))
        for zero in self._zero_optimizers():
            for name in ("averaged_gradients", "all_grad_tensors"):
                for group in getattr(zero, name, {}).values():
                    yield from (each for each in group or [] if each is not None)
            for bucket in zero.ipg_buckets.values():
                buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
                yield from (each for each in buffers if each is not None)
            if getattr(zero, "grad_partitions_flat_buffer", None) is not None:
                yield zero.grad_partitions_flat_buffer
            for masters in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
                yield from (each.grad for each in getattr(zero, masters, []) if each.grad is not None)

    def _begun_gathers(self) -> Iterator[Tensor]:
        """Yield the buffers of fsdp's gathers whose parameters are not there yet."""
        for each in self.module.modules():
            group = each._get_fsdp_state()._fsdp_param_group if isinstance(each, FSDPModule) else None
            if group is not None and group._all_gather_result is not None:
                yield group._all_gather_result.all_gather_output

    def _zero_optimizers(self) -> Iterator[Any]:
        """Yield the optimizers of DeepSpeed's engines."""
        for each in self.trainer.optimizers:
            if hasattr(each, "engine"):
                yield each.engine.optimizer

    def _reducer_buckets(self) -> Iterator[Tensor]:
        """Yield tensors of the sizes of ddp's buckets, which its reducer has beside the gradients."""
        for wrapped in self.trainer.strategy.wrapped.values():
            if isinstance(wrapped, nn.parallel.DistributedDataParallel):
                yield from (bucket.buffer() for bucket in wrapped.reducer._get_zeros_like_grad_buckets())


def sent_bytes() -> int:
    """Return the bytes that this process has sent over its open sockets, and whose receivers have them."""
    total = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        if not path.is_symlink() or not str(path.readlink()).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += struct.unpack_from("Q", info, ACKNOWLEDGED)[0]
    return total


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_strategy(name: str, family: Family) -> Any:
    if name.startswith("fsdp"):
        options: dict[str, Any] = {"num_replicas": 2} if name.endswith(" hybrid") else {}
        if name.endswith(" tensor"):
            plan = {f"network.{layer}": style for layer, style in TENSOR_PLAN.items()}
            options = {"mesh": {"data": 2, "tensor": int(os.environ["WORLD_SIZE"]) // 2}, "tensor_plan": plan}
        return tw.FSDPStrategy(auto_wrap_policy={family.block}, **options)  # a small network's too
    if name in SMALL_BUFFERS:
        return tw.DeepSpeedStrategy(stage=int(name[len("deepspeed_stage_")]), **SMALL_BUFFERS[name])
    return name


def measure(family: Family, width: int, strategy: str) -> Held:
    """Train a network for two steps, and return what the rank that holds most has. Collective: call on every rank."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # lets VmHWM begin anew
    count = Count(resident("VmRSS"))
    torch.manual_seed(0)
    module = Measured(family.make(width))
    generator = torch.Generator().manual_seed(0)
    trainer = tw.Trainer(
        strategy=make_strategy(strategy, family),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        callbacks=[count],
        barebones=True,
    )
    batches = [family.make_batch(generator) for _ in range(STEPS * trainer.world_size)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert count.held is not None
    return count.held


def count_parameters(family: Family, width: int) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in family.make(width).parameters())


def widest(held_by: Callable[[int], Held], budget: int, known: tuple[int, Held], step: int) -> tuple[int, Held] | None:
    """Return the widest network whose bytes fit in the budget, and these; None if the narrowest does not.

    Bytes grow with a power of the width, which the latest two networks show. So the next one to try is the one that would
    just fit, but between the widest that is known to fit and the narrowest that is known not to.
    """
    fits: tuple[int, Held] | None = None
    low, high, power = 0, 0, 2.0
    width, held = known
    while high == 0 or high - low > step:
        before, held_before = width, held
        wanted = int(before * (budget / held_before.total) ** (1 / power)) // step * step
        width = max(low + step, min(wanted, high - step if high else 4 * max(before, step)))
        held = held_by(width)
        if held.total <= budget:
            low, fits = width, (width, held)
        else:
            high = width
        if width != before and held.total != held_before.total:
            power = math.log(held.total / held_before.total) / math.log(width / before)
            power = min(max(power, 1.0), 2.5)
    return fits


def report(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a record of each strategy: the bytes of one width, then the widest network in the budget."""
    family = FAMILIES[options.family]
    for strategy in options.strategies.split(","):
        width = options.width or family.width
        measure(family, family.step, strategy)  # what is imported and allocated once
        network = family.make(width)
        shards = options.ranks // 2 if strategy.endswith((" hybrid", " tensor")) else options.ranks
        estimates = tw.estimate_memory(network, torch.optim.Adam, shards, auto_wrap_policy={family.block})
        estimate = estimates.per_device[strategy.split()[0]]
        held = measure(family, width, strategy)
        shared = {"family": options.family, "ranks": options.ranks, "strategy": strategy}
        size = {"width": width, "count": count_parameters(family, width)}
        yield {**shared, **size, "kind": "table", **held._asdict(), "estimate": estimate}
        if options.budget:
            budget = options.budget * 2**20
            found = widest(partial(measure, family, strategy=strategy), budget, (width, held), family.step)
            if found is not None:
                width, held = found
                size = {"width": width, "count": count_parameters(family, width)}
                yield {**shared, **size, "kind": "largest", **held._asdict(), "budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--strategies")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--width", type=int, help="0 is the family's own")
    parser.add_argument("--budget", type=int, help="MiB; 0 leaves the search out")
    parser.add_argument("--out", type=Path, help="rank 0 adds its records to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # DeepSpeed's and FairScale's advice
    logging.disable(logging.WARNING)
    for name in ("torch._dynamo.eval_frame", "deepspeed", "fairscale"):  # so that memory grows by tensors alone
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for record in report(options):
        if os.environ["RANK"] == "0":
            with options.out.open("a") as stream:
                stream.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
