"""Saved states: the checkpoints of a raw loop, and how a loop continues from them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any

from torch.utils.hooks import RemovableHandle

from trainwright.arguments import refuse_unknown
from trainwright.checkpoint.discovery import is_newest
from trainwright.checkpoint.reader import Verify
from trainwright.data.seeding import set_rng_state
from trainwright.engine.engine import Engine
from trainwright.engine.script_settings import SCHEDULERS, checked_fresh
from trainwright.errors import CheckpointError, a_type_of
from trainwright.rank_zero import rank_zero_warn
from trainwright.raw_loop.bare_models import extract_model_from_parallel
from trainwright.raw_loop.loop_objects import Preparation
from trainwright.raw_loop.project import NumberedCheckpoints, ProjectConfiguration
from trainwright.raw_loop.tracking import Trackers

Hook = Callable[..., None]


class SavedStates:
    """The checkpoints of one Accelerator."""

    def __init__(self, engine: Engine, project: ProjectConfiguration, trackers: Trackers) -> None:
        self.numbered = NumberedCheckpoints(engine, project)
        self._engine, self._trackers = engine, trackers
        self._objects: list[Any] = []
        self._save_hooks: OrderedDict[int, Hook] = OrderedDict()  # handles refer to them, weakly
        self._load_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._has_warned = False

    def end(self) -> None:
        """Wait for a save in flight. See `Accelerator.end_training`. Collective."""
        self.numbered.finish()
        self._engine.strategy.check_gradients(partial(self._engine.ranks.exchange, call="end_training"))

    def register(self, objects: tuple[Any, ...]) -> None:
        """Keep the state of these objects in checkpoints, too. See `Accelerator.register_for_checkpointing`."""
        for item in objects:
            methods = [getattr(item, name, None) for name in ("state_dict", "load_state_dict")]
            if isinstance(item, type) or not all(map(callable, methods)):
                raise TypeError(
                    f"register_for_checkpointing was given {a_type_of(item)}. Expected objects with state_dict and "
                    "load_state_dict."
                )
        for each in objects:
            if all(each is not one for one in self._objects):
                self._objects.append(each)

    def drop_objects(self) -> None:
        """Drop the registered objects, with a warning."""
        if self._objects:
            text = "free_memory drops the registered objects. Register those again that checkpoints should hold."
            rank_zero_warn(text, stacklevel=3)
        self._objects = []

    def add_save_hook(self, hook: Hook) -> RemovableHandle:
        return _added(self._save_hooks, hook, "register_save_state_pre_hook")

    def add_load_hook(self, hook: Hook) -> RemovableHandle:
        return _added(self._load_hooks, hook, "register_load_state_pre_hook")

    def save(
        self,
        preparation: Preparation,
        output_dir: str | os.PathLike[str] | None,
        blocking: bool,
        overwrite: bool,
        trained_only: bool,
    ) -> str:
        """Write a checkpoint. See `Accelerator.save_state`. Collective."""
        preparation.windows.drop_left()
        if preparation.windows.is_open and preparation.windows.usual_length > 1:
            raise RuntimeError(
                "save_state was called within an accumulation window, and checkpoints hold no gradients. Call it when "
                "accelerator.sync_gradients is True and the optimizer has stepped."
            )
        is_numbered = output_dir is None or self.numbered.config.automatic_checkpoint_naming
        if is_numbered:
            path, number = self.numbered.next()
        else:
            # Rank 0's, where all ranks write: a path that holds the time differs by rank.
            call = f"a save of step {preparation.step_count}"
            path, number = self._engine.ranks.broadcast(os.fspath(output_dir or ""), call), 0
        if output_dir is not None and is_numbered and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"automatic_checkpoint_naming=True numbers checkpoints, so this one is {path} and not {output_dir}.",
                stacklevel=3,
            )
        loaders = [loader.state_dict() for loader in preparation.loaders]
        # They differ by rank, so every rank stores its list.
        sources = [loader.pop("sources") for loader in loaders]
        position = loaders[0] if loaders else {"epoch": 0, "batch": 0}
        state = {
            "position": {**position, "step": preparation.step_count},
            "loaders": loaders,
            "lr_schedulers": [scheduler.state_dict() for scheduler in preparation.schedulers],
            "steps_of_schedulers": [scheduler.steps_since() for scheduler in preparation.schedulers],
            "registered": self._states_of_objects(),
            "loggers": self._trackers.states(),
        }
        with self._staged(preparation, path, overwrite) as directory:
            self._engine.save(
                path,
                step=preparation.step_count,
                epoch=position["epoch"],
                state=state,
                rank_state={"sources": sources},
                trained_only=trained_only,
                blocking=blocking,
                number=number,
                overwrite=overwrite,
                directory=directory,
            )
        if is_numbered:
            self.numbered.note_save(path, number)
        return path

    def load(
        self,
        preparation: Preparation,
        input_dir: str | os.PathLike[str] | None,
        verify: Verify,
        *,
        weights_only: bool,
        strict: bool,
        fresh: Any,
    ) -> None:
        """Continue from a checkpoint. See `Accelerator.load_state`. Collective."""
        engine, fresh = self._engine, checked_fresh(fresh)
        if not preparation.models:
            raise RuntimeError(
                "load_state was called before prepare, and loads into what was prepared. Call accelerator.prepare(model, "
                "optimizer, ...) first."
            )
        opened = engine.open(self.numbered.choose(input_dir, verify), verify=verify)
        path = opened.checkpoint.path

        def check(state: dict[str, Any]) -> None:
            engine.script.check(state, path, fresh)
            self._check_objects(state.get("registered", []), path)

        if self._load_hooks:
            models = [extract_model_from_parallel(model) for model in preparation.models]
            self._run(self._load_hooks, "load_state", models, path)
        if weights_only:
            engine.load(opened, weights_only=True, strict=strict)
            return
        restored = engine.load(opened, strict=strict, check=check, fresh=fresh)
        state = restored.state
        engine.script.resume(state, path, fresh)
        steps = () if SCHEDULERS in fresh else state.get("steps_of_schedulers", ())
        for scheduler, since in zip(preparation.schedulers, steps, strict=False):
            scheduler.take_steps(*since)
        position = state["position"]
        preparation.resume_at(int(position["step"]))
        if position.get("epoch_ended"):  # a Trainer's, saved between two epochs
            position = {"epoch": position["epoch"] + 1, "batch": 0}
        states = state.get("loaders", [position])
        sources = chain(restored.nearest_rank_state.get("sources", ()), repeat(()))
        # A Trainer's checkpoint has a position for the first loader only.
        for loader, each, source in zip(preparation.loaders, states, sources, strict=False):
            loader.resume({**each, "sources": source})
        self._load_objects(state.get("registered", []), path)
        # After the loads, which may draw.
        if restored.rng is not None:
            set_rng_state(restored.rng)
        self._trackers.resume(state.get("loggers"), path, is_newest=input_dir is None or is_newest(path))

    @contextmanager
    def _staged(self, preparation: Preparation, path: str, overwrite: bool) -> Iterator[str | None]:
        """Run the hooks before a save, and yield the directory with their files, or None if there is no hook. Collective."""
        if not self._save_hooks:
            yield None
            return
        models = list(preparation.models)
        with self._engine.writer.staged(path, overwrite) as directory:
            is_whole = self._engine.strategy.capabilities.holds_modules
            weights = [model.state_dict() for model in models] if is_whole else []
            models = [extract_model_from_parallel(model) for model in models]
            self._run(self._save_hooks, "save_state", models, weights, directory)
            yield directory

    def _run(self, hooks: OrderedDict[int, Hook], call: str, *arguments: Any) -> None:
        """Call the hooks, and raise an error of any rank on all ranks (CheckpointError). Collective."""

        def run() -> None:
            for hook in hooks.values():
                hook(*arguments)

        self._engine.ranks.run_on_all(run, f"the hooks of {call}", subject=f"a hook of {call} failed")

    def _states_of_objects(self) -> list[dict[str, Any]]:
        """Return the registered objects' states. Collective if there are any."""
        states: list[dict[str, Any]] = []

        def collect() -> None:
            states.extend({"class": type(each).__name__, "state": each.state_dict()} for each in self._objects)

        if self._objects:
            call = "the states of registered objects"
            self._engine.ranks.run_on_all(collect, call, subject="save_state cannot read a registered object's state")
        return states

    def _check_objects(self, saved: list[dict[str, Any]], path: str) -> None:
        stored, own = [each["class"] for each in saved], [type(each).__name__ for each in self._objects]
        if stored != own:
            raise CheckpointError(
                f"{path}: it was saved with the registered objects {', '.join(stored) or '(none)'}, but registered here are "
                f"{', '.join(own) or '(none)'}. Register the same ones in the same order before load_state, or what it does "
                "not have after it."
            )

    def _load_objects(self, saved: list[dict[str, Any]], path: str) -> None:
        def load() -> None:
            for each, one in zip(self._objects, saved, strict=True):
                each.load_state_dict(one["state"])

        if self._objects:
            call, subject = "the load of registered objects", f"{path}: a registered object does not take its state"
            self._engine.ranks.run_on_all(load, call, subject=subject)


def _added(hooks: OrderedDict[int, Hook], hook: Any, call: str) -> RemovableHandle:
    if not callable(hook):
        raise TypeError(f"{call} was given {a_type_of(hook)}. Expected a function.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def refuse_pickle(call: str, safe_serialization: Any) -> None:
    """Raise ValueError for a call that asks for pickled files."""
    if safe_serialization is not True:
        raise ValueError(
            f"{call}(safe_serialization={safe_serialization!r}) would write a pickle, which trainwright does not. Leave it out "
            "for safetensors."
        )


def refuse_save_options(given: dict[str, Any]) -> None:
    reason = "a checkpoint has one layout of files; save_model writes files of a size"
    known = ["output_dir", "safe_serialization", "blocking", "overwrite", "trained_only"]
    refuse_unknown("save_state", given, known, {"max_shard_size": reason})


def refuse_load_options(given: dict[str, Any]) -> None:
    replaced = {"map_location": "tensors are loaded to where the prepared objects are. Leave it out"}
    refuse_unknown("load_state", given, ["input_dir", "verify", "weights_only", "strict", "fresh"], replaced)
