"""The private names of FairScale that ddp_sharded needs, as read in FairScale 0.4.13, its last version.

ShardedDDP is extended so that several backwards may come before a step, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from trainwright.strategies.divided_optimizers import parameters_of

_OWNERS: WeakKeyDictionary[Optimizer, dict[nn.Parameter, int]] = WeakKeyDictionary()
"""The ranks of an optimizer's parameters. A second fit with the optimizer uses the same ranks, which have its state."""

_SHARDED_DDP: Any = object
"""A name of FairScale's class, which is imported where a wrapper is made and is the second base there."""


class _Following(_SHARDED_DDP):  # type: ignore[misc]
    """ShardedDDP that averages the gradients of a backward once, and adapts once to a change of the trained parameters.

    FairScale divides and sums the whole gradient after a backward, with the averages of earlier backwards in it. So these
    averages are taken out before a backward adds to the gradient, and added again afterwards.

    It sends a bucket when its last gradient has come, and ranks pair the messages by their order. So an early bucket waits
    for the buckets before it, and unused gradients are sent as zeros, because another rank may have used them. If one backward
    reaches several modules, a module's gradients wait for the modules before it in `_turns`.
    """

    _all_params: list[nn.Parameter]
    _grad_to_be_reduced: list[bool]
    _bucket_flush_callback_set: bool

    def __init__(self, module: nn.Module, own: Collection[Tensor], optimizers: list[Any], **options: Any) -> None:
        super().__init__(module, optimizers, **options)
        self.optimizers = optimizers
        self._averaged: set[Any] = set()
        """The buckets, and parameters without one, whose gradients are averages on this rank."""
        self._taken_out: dict[Tensor, Tensor] = {}
        self._filled: set[Tensor] = set()
        """Parameters without a gradient at the end of the latest backward, for which zeros were sent."""
        self._slots: dict[Tensor, Any] = {}
        """The buckets of parameters, and the parts of them that are the gradients."""
        self._order: list[Any] = []
        """The buckets, and parameters without one, in the order of sending: the last of the module first."""
        self._next = 0
        self._has_flushed = False
        """Whether the latest backward has sent its gradients."""
        self._turns: list[_Following] = [self]
        self._sends: dict[Tensor, tuple[int, Callable[[], None]]] = {}
        """FairScale's functions that send the parameters, and the parameters' indices there."""
        self._waiting: dict[Any, Callable[[], None]] = {}
        # An optimizer may step several modules' parameters, and every module has a wrapper.
        self._all_params = [each for each in self._all_params if each in own]
        self._reference_trainable_mask = [each.requires_grad for each in self._all_params]

    def _detect_train_change(self) -> bool:
        has_changed: bool = super()._detect_train_change()
        if has_changed:
            self._reference_trainable_mask = [p.requires_grad for p in self._all_params]
            self._grad_to_be_reduced = []  # otherwise it warns of parameters that the last step did not use
            for frozen in (p for p in self._all_params if not p.requires_grad):
                self._taken_out.pop(frozen, None)
                frozen.grad = None  # otherwise momentum and decay would keep changing it
        return has_changed

    def _setup_bucket_strategy(self) -> None:
        averaged = {each for slot in self._averaged for each in _parameters(slot)}
        super()._setup_bucket_strategy()
        self._slots = {each: (bucket, each.grad) for bucket in self._bucket_list for each in bucket._params}
        self._averaged = {self._slots.get(each, (each,))[0] for each in averaged}

    def take_turns(self, wrappers: Sequence[_Following]) -> None:
        """Set the order of the job's wrappers, which is the same on all ranks."""
        self._turns = list(wrappers)

    def begin_backward(self) -> None:
        """Drop the remains of a failed backward."""
        self._has_flushed = False
        if self._bucket_flush_callback_set:
            self._clear_counters()

    def end_backward(self) -> None:
        """Send zeros if this rank's backward has reached none of the parameters, because another rank's may have."""
        if not self._should_accumulate_grads and not self._has_flushed:
            self._bucket_flush_callback_set = (
                True  # otherwise sending asks for a flush at the backward's end, which is over
            )
            self._flush()

    def _clear_counters(self) -> None:
        super()._clear_counters()
        self._next = 0
        self._waiting.clear()

    def _get_reduce_fn(self, index: int, param: Tensor, dst_rank: int) -> Callable[..., None]:
        send = super()._get_reduce_fn(index, param, dst_rank)
        self._sends[param] = index, send
        return partial(self._send_in_turn, index, send)

    def _send_in_turn(self, index: int, send: Callable[[], None], *_: Any) -> None:
        """Record that a gradient has come, and send complete buckets that have their turn."""
        if self._should_accumulate_grads or not self._grad_to_be_reduced[index]:
            return
        slot, part = self._slots.get(parameter := self._trainable_params[index], (parameter, None))
        if part is not None and slot.params_checked_in + 1 < len(slot._params):
            send()  # which only counts
            return
        if not self._bucket_flush_callback_set:
            Variable._execution_engine.queue_callback(self._flush_reduce_calls)
            self._bucket_flush_callback_set = True
        self._waiting[slot] = send
        for wrapper in self._turns:
            if not wrapper._send_waiting():
                break

    def _send_waiting(self) -> bool:
        """Send buckets that have their turn, and return whether the last one was sent."""
        while self._next < len(self._order) and (first := self._order[self._next]) in self._waiting:
            self._waiting.pop(first)()
            self._next += 1
        return self._next == len(self._order)

    def _setup_backward_hooks(self) -> None:
        super()._setup_backward_hooks()
        index = {each: number for number, each in enumerate(self.module.parameters())}
        last: dict[Any, int] = {}
        for each in self._trainable_params:
            slot, _ = self._slots.get(each, (each, None))
            last[slot] = min(index[each], last.get(slot, index[each]))
        self._order = sorted(last, key=last.__getitem__, reverse=True)
        for parameter, node in zip(self._trainable_params, self._grad_accs, strict=True):
            self._grad_hooks.append(node.register_prehook(partial(self._take_out, parameter)))

    @torch.no_grad()
    def _take_out(self, parameter: Tensor, *_: Any) -> None:
        """Take an average out of a gradient before a backward adds to it."""
        slot = self._attach(parameter)
        if slot not in self._averaged:
            return
        self._averaged.discard(slot)
        is_owner = self._trainable_param_to_rank[parameter] == self._rank
        if slot is parameter:
            if is_owner and parameter.grad is not None:
                self._taken_out[parameter] = parameter.grad
            parameter.grad = None
            return
        if is_owner:
            self._taken_out.update((each, each.grad.clone()) for each in slot._params if each.grad is not None)
        slot.zero()

    def _attach(self, parameter: Tensor) -> Any:
        """Return a gradient's bucket. If the user's loop has dropped the gradient (model.zero_grad()), put it there again."""
        slot, part = self._slots.get(parameter, (parameter, None))
        if part is not None and parameter.grad is not part:
            part.zero_() if parameter.grad is None else part.copy_(parameter.grad)
            parameter.grad = part
        return slot

    @torch.no_grad()
    def put_back(self, parameters: Iterable[Tensor]) -> None:
        """Add the averages that were taken out of these gradients."""
        for parameter in [each for each in parameters if each in self._taken_out]:
            before = self._taken_out.pop(parameter)
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    @torch.no_grad()
    def discard(self, parameters: Collection[Tensor]) -> set[Tensor]:
        """Drop gradients, in buckets by zeros. Return the parameters in buckets."""
        for parameter in [each for each in self._taken_out if each in parameters]:
            del self._taken_out[parameter]
        for bucket in self._bucket_list:
            if all(each in parameters for each in bucket._params):
                self._averaged.discard(bucket)
                bucket.zero()
                continue
            for each in (p for p in bucket._params if p in parameters):
                self._slots[each][1].zero_()
        return set(self._slots)

    @torch.no_grad()
    def _send_rest(self) -> None:
        """Send waiting buckets, and buckets that this backward has used partly or not at all."""
        for slot in self._order[self._next :]:
            if slot not in self._waiting:
                first = _parameters(slot)[0]
                if slot in self._averaged:  # by an earlier backward, and no gradient has come since then
                    self._take_out(first)
                self._filled.update(each for each in _parameters(slot) if each.grad is None)
                if slot is first and first.grad is None:
                    first.grad = torch.zeros_like(first)
                elif slot is not first:
                    for each in slot._params:
                        self._attach(each)
                    slot.params_checked_in = len(slot._params) - 1
                index, self._waiting[slot] = self._sends[first]
                self._grad_to_be_reduced[index] = True
            self._waiting.pop(slot)()

    def _flush_reduce_calls(self) -> None:
        """End a backward, which calls this once per wrapper that it has reached. The first call ends all of them."""
        for wrapper in self._turns:
            if wrapper._bucket_flush_callback_set:
                wrapper._flush()

    def _flush(self) -> None:
        self._has_flushed = True
        self._send_rest()
        super()._flush_reduce_calls()
        for each in self._filled:
            if each.grad is not None and not bool(each.grad.any()):  # no rank has used it
                each.grad = None
        self._filled.clear()
        is_bucketed = self._should_bucket_grad or [False] * len(self._trainable_params)
        sent = zip(self._trainable_params, self._grad_to_be_reduced, is_bucketed, strict=True)
        done = {each for each, is_due, in_bucket in sent if not is_due and not in_bucket}
        done.update(bucket for bucket in self._bucket_list if bucket.sent)
        self._averaged |= done
        if self._taken_out:
            self.put_back([each for slot in done for each in _parameters(slot)])
        self._clear_counters()  # the next backward may follow without a forward

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._grad_hooks:
            hook.remove()
        self._taken_out.clear()
        self._averaged.clear()


def make_wrapper(module: nn.Module, own: Collection[Tensor], optimizers: list[Any], **options: Any) -> Any:
    """Return a ShardedDDP for the parameters `own` of a module, which the OSS optimizers step."""
    from fairscale.nn.data_parallel import ShardedDataParallel

    class FollowingDDP(_Following, ShardedDataParallel):  # type: ignore[misc]
        pass

    return FollowingDDP(module, own, optimizers, **options)


def _parameters(slot: Any) -> list[Tensor]:
    return [slot] if isinstance(slot, Tensor) else slot._params


def make_oss(own: Optimizer) -> Any:
    """Return an OSS around the user's optimizer, which then keeps only this rank's parameters."""
    from fairscale.optim import OSS

    class BalancedOSS(OSS):  # type: ignore[misc]
        """OSS that assigns the largest tensors first, so that the ranks hold about the same."""

        _partition_parameters: list[list[dict[str, Any]]]

        def partition_parameters(self) -> list[list[dict[str, Any]]]:
            if not self._partition_parameters:  # FairScale empties it to have it rebuilt
                before, ranks = _OWNERS.get(own, {}), {}
                sizes = [0] * self.world_size
                for p in sorted(parameters_of(self), key=lambda p: (p not in before, not p.requires_grad, -p.numel())):
                    ranks[p] = before[p] if p in before else sizes.index(min(sizes))
                    sizes[ranks[p]] += p.numel() if p.requires_grad else 1
                _OWNERS[own] = ranks
                self._partition_parameters = [
                    [
                        {**group, "params": [p for p in group["params"] if ranks[p] == rank]}
                        for group in self.param_groups
                    ]
                    for rank in range(self.world_size)
                ]
            return self._partition_parameters

        def owners(self) -> dict[Tensor, int]:
            """Return the ranks that step the parameters."""
            ranks: dict[Tensor, int] = self._param_to_rank
            return ranks

        def send(self) -> None:
            """Broadcast this rank's parameters. Collective."""
            self._broadcast_params()

    def take_own(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        # OSS would construct a new one, but its arguments are unknown, and schedulers and hooks are bound to this one.
        mine = {p for group in groups for p in group["params"]}
        own.param_groups = groups
        for parameter in [p for p in own.state if p not in mine]:
            del own.state[parameter]
        return own

    return BalancedOSS([dict(group) for group in own.param_groups], optim=take_own)


def set_reducing(wrapper: Any, enabled: bool) -> None:
    """Set whether backwards reduce gradients, by the switch behind ShardedDDP's `no_sync()`."""
    wrapper._should_accumulate_grads = not enabled
