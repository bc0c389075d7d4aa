"""Writing a checkpoint, which exists completely or not at all, within the call or in the background.

Rank 0 creates a temporary directory next to the target. Every rank writes its files there, hashed meanwhile and synced. Then
rank 0 writes the manifest, renames the directory and syncs its parent. The ranks exchange results after these three steps.
Every rank takes part in every exchange, and a failure on one rank raises the same error on all. Without rename (object
stores) the files get their final names, and the manifest, written last, is the commit.

In the background the call returns when this rank's part is in host memory, and a thread does the rest without a collective.
The ranks exchange results over the key-value store, on a channel for these saves.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, BinaryIO

from trainwright.checkpoint.codec import without_collection
from trainwright.checkpoint.contents import Contents, HostMemory, collect
from trainwright.checkpoint.discovery import refuse_irreplaceable, replace_checkpoint
from trainwright.checkpoint.filesystem import Files, describe, digest_of, note_new, resolve, temporary_path
from trainwright.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_tensors,
    dump_json,
    is_attachable,
    render,
    table_from_json,
    table_to_json,
)
from trainwright.checkpoint.shards import FileRecord, HashingStream, write_shard
from trainwright.checkpoint.tensors import Piece, merge
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError

SAVE = "the save of a checkpoint"
"""The name of this collective work in error messages."""
NICENESS = 10
DROP_SECONDS = 2.0
"""How long an abandoned save may still use the files and the store."""


class CheckpointWriter:
    """Writes the checkpoints of one engine. Collective: create it and save on every rank, in the same order.

    `has_failed` returns whether this process has failed, in which case its peers leave.
    """

    def __init__(self, ranks: Ranks, has_failed: Callable[[], bool]) -> None:
        self._ranks, self._thread_ranks = ranks, ranks.subchannel("saves")
        self._has_failed = has_failed
        self._memory = HostMemory()
        self.in_flight: BackgroundSave | None = None
        """The save in the background, until `finish` has waited for it."""

    def save(
        self,
        path: str,
        *,
        sections: Mapping[str, Sequence[Piece]],
        state: Any,
        rank_state: Any,
        header: Mapping[str, Any],
        blocking: bool,
        overwrite: bool = False,
        directory: str | None = None,
    ) -> None:
        """Write a checkpoint, or start to write it. Collective.

        CheckpointError on every rank if this save or the save in flight fails. `directory` comes from `staged` for this path.
        """
        # The save in flight uses the same host memory and channel.
        self.finish()
        files, inside = resolve(path)
        path = inside if files.has_rename else path  # the working directory may change before the thread runs
        write = partial(write_checkpoint, path, header=header, overwrite=overwrite, staged=directory)
        gather = partial(collect, sections, state, rank_state, self._ranks.rank, self._ranks.world_size)
        if blocking:
            write(gather=gather, ranks=self._ranks)
            return
        save = BackgroundSave(path, partial(write, gather=self._copied(gather), ranks=self._thread_ranks))
        save.start()
        self.in_flight = save  # after the start, because a thread that cannot start is never done
        atexit.register(self._finish_at_exit)

    @contextlib.contextmanager
    def staged(self, path: str, overwrite: bool) -> Iterator[str]:
        """Yield the directory for the block's save of this path, in which files may be added. Collective.

        If the block fails, the directory is removed. In an object store its files stay, without a manifest.

        Raises:
            CheckpointError: on every rank, if the path cannot be written, or the save in flight has failed.
        """
        self.finish()
        files, inside = resolve(path)
        work = partial(_stage, files, inside, overwrite) if self._ranks.rank == 0 else None
        subject = f"checkpoint {path} was not written"
        directory = self._ranks.run_on_all(work, SAVE, subject=subject, describe=partial(describe, path=inside))[0]
        try:
            yield str(directory)
        except BaseException:
            if files.has_rename and self._ranks.rank == 0:
                with contextlib.suppress(OSError):
                    files.remove_tree(directory)
            raise

    def finish(self) -> None:
        """Wait for a save in flight. CheckpointError on every rank if it failed. Collective."""
        save = self.in_flight
        if save is None:
            return
        try:
            save.wait()
        except BaseException:  # Ctrl-C
            self.drop()
            raise
        self._clear()
        if save.error is not None:
            raise save.error

    def drop(self) -> None:
        """Abandon the save in flight, because one of its ranks is gone. Earlier checkpoints are unchanged."""
        save = self.in_flight
        if save is not None:
            self._clear()
            self._thread_ranks.give_up()
            memory, self._memory = self._memory, HostMemory()  # the abandoned save may still read its copy
            if save.wait(DROP_SECONDS):
                self._memory = memory

    def release(self) -> None:
        """Free the host memory that is reserved for the next save."""
        if self.in_flight is None:
            self._memory.release()

    def _copied(self, gather: Callable[[], Contents]) -> Callable[[], Contents]:
        """Return a function that returns a copy of the contents. An error of the copy is raised in the ranks' exchange."""
        try:
            sections, plain = gather()
            parts = [*sections.values(), *(tensors for _, tensors in plain.values())]
            copies = dict(zip([*sections, *plain], self._memory.copy(parts), strict=True))
        except Exception as error:
            return partial(_raise, error)
        copied = {name: (value, copies[name]) for name, (value, _) in plain.items()}
        return lambda: Contents({name: copies[name] for name in sections}, copied)

    def _clear(self) -> None:
        self.in_flight = None
        atexit.unregister(self._finish_at_exit)

    def _finish_at_exit(self) -> None:
        """Wait at the end of the process until its last save has committed, and print a failure."""
        save = self.in_flight
        if save is None:
            return
        if self._has_failed():
            self.drop()
        elif not save.wait(self._ranks.timeout_seconds):
            print(
                f"trainwright: checkpoint {save.path} was not written: it was not done {self._ranks.timeout_seconds:g} s "
                "after the end of the program.",
                file=sys.stderr,
            )
        elif save.error is not None:
            print(f"trainwright: {save.error}", file=sys.stderr)


class BackgroundSave(threading.Thread):
    """One save of a path in a thread. `write` writes and commits it."""

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        # A daemon, because `_finish_at_exit`, which knows whether other ranks have failed, waits for it instead.
        super().__init__(name="trainwright-save", daemon=True)
        self.path = path
        self.error: CheckpointError | None = None
        """The save's failure, the same on every rank, or None."""
        self._write, self._process = write, os.getpid()
        # Not Thread.is_alive, because up to Python 3.12 a join interrupted by Ctrl-C marks a running thread as ended.
        self._has_ended = threading.Event()

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is durable."""
        return self._has_ended.is_set() and self.error is None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the save has committed or failed. Return whether it has within this time, or this is a forked child."""
        return os.getpid() != self._process or self._has_ended.wait(seconds)  # a child does not have the thread

    def run(self) -> None:
        # On Linux threads have priorities. The threads of a training step wait for each other, so one slow thread delays all.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._write()
        except CheckpointError as error:
            self.error = error
        except BaseException as error:
            self.error = CheckpointError(f"checkpoint {self.path} was not written: {describe(error, self.path)}")
            self.error.__cause__ = error
        finally:
            self._has_ended.set()


def _raise(error: Exception) -> Contents:
    raise error


def write_checkpoint(
    path: str,
    gather: Callable[[], Contents],
    header: Mapping[str, Any],
    ranks: Ranks,
    overwrite: bool = False,
    staged: str | None = None,
) -> None:
    """Write a checkpoint, which is durable when this returns on any rank. Collective: call on every rank.

    Args:
        path: the directory or URL to write, which must not exist unless `overwrite` is set.
        gather: returns this rank's part.
        header: plain JSON with `step` and `epoch` for the manifest, stored from rank 0.
        overwrite: replace a checkpoint at the path when the new checkpoint is complete.
        staged: the directory of `CheckpointWriter.staged`.

    Raises:
        CheckpointError: on every rank with the same text. Earlier checkpoints are unchanged.
    """
    files, target = resolve(path)
    is_first = ranks.rank == 0
    run_on_all = partial(
        ranks.run_on_all,
        call=SAVE,
        subject=f"checkpoint {path} was not written",
        describe=partial(describe, path=target),
    )
    header = {"world_size": ranks.world_size, **header}
    if header.get("num_data_ranks", 0) >= header["world_size"]:  # no ranks share a part of the data
        del header["num_data_ranks"]
    directory = staged or run_on_all(partial(_stage, files, target, overwrite) if is_first else None)[0]
    rank_files = _RankFiles(files, directory)
    try:
        # NOTE: every rank makes both exchanges even if it fails, or the other ranks would wait.
        tables = run_on_all(lambda: rank_files.write(gather(), ranks.rank), only_first=True)
        commit = partial(_commit, files, directory, target, header, tables, overwrite, has_attached=staged is not None)
        run_on_all(commit if is_first else None)
    except Exception as error:
        if files.has_rename:
            if is_first:
                with contextlib.suppress(OSError):
                    files.remove_tree(directory)
        elif isinstance(error, CheckpointError):  # after any other error, rank 0 may have committed
            rank_files.discard()
        raise


class _RankFiles:
    """The files that this rank writes into the directory of a checkpoint."""

    def __init__(self, files: Files, directory: str) -> None:
        self._files = files
        self._directory = directory
        self._created: list[str] = []
        self._table: dict[str, Any] = {"files": {}, "sections": {}}

    def write(self, contents: Contents, rank: int) -> dict[str, Any]:
        """Write all files, and return their entries for the manifest."""
        for section, pieces in contents.sections.items():
            self._write_shard(section, f"{section}-{rank:05d}.safetensors", pieces)
        for name, (value, tensors) in contents.plain.items():
            self._write_file(f"{name}.json", methodcaller("write", dump_json(value, f"{name}.json")))
            self._write_shard(name, f"{name}.safetensors", tensors)
        return self._table

    def discard(self) -> None:
        """Remove all files, as far as possible."""
        for name in self._created:
            with contextlib.suppress(Exception):
                self._files.remove_file(f"{self._directory}/{name}")

    def _write_shard(self, section: str, name: str, pieces: Sequence[Piece]) -> None:
        if pieces:
            table = self._write_file(name, lambda out: write_shard(out, name, pieces))
            self._table["sections"][section] = table_to_json(table)

    def _write_file(self, name: str, content: Callable[[HashingStream], Any]) -> Any:
        """Write a file, and return the result of `content`, which is called again after a passing failure."""
        path = f"{self._directory}/{name}"
        # First, because an object store may have the file despite an error.
        self._created.append(name)

        def write(stream: BinaryIO) -> tuple[Any, FileRecord]:
            out = HashingStream(stream)
            return content(out), out.record()

        try:
            result, self._table["files"][name] = self._files.write(path, write)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{name}: the directory that rank 0 created does not exist here ({error}). "
                "Write to a file system that all ranks share."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: {describe(error, path)}. Earlier checkpoints are unchanged.") from error
        return result


def _stage(files: Files, target: str, overwrite: bool) -> str:
    """Check the target, create the directory to write into, and return it."""
    if files.exists(target if files.has_rename else f"{target}/{MANIFEST_NAME}"):
        if not overwrite:
            raise CheckpointError(
                f"{target} exists already, and overwrite=False was given; leave that out to replace it, or choose another "
                "name."
            )
        refuse_irreplaceable(files, target)
    if not files.has_rename:
        files.make_directories(target)
        return target
    note_new(target)
    directory = temporary_path(target)
    files.make_directories(os.path.dirname(directory))
    files.make_new_directory(directory)
    return directory


@without_collection()
def _commit(
    files: Files,
    directory: str,
    target: str,
    header: Mapping[str, Any],
    tables: Sequence[Any],
    overwrite: bool,
    *,
    has_attached: bool,
) -> None:
    """Write the manifest and rename the directory to its target."""
    records = {name: FileRecord(*record) for table in tables for name, record in table["files"].items()}
    names = sorted({name for table in tables for name in table["sections"]})
    parts = [{name: table_from_json(part) for name, part in table["sections"].items()} for table in tables]
    merged = {name: merge(part[name] for part in parts if name in part) for name in names}
    manifest = Manifest(dict(header), records, merged, _attached(files, directory, records) if has_attached else {})
    check_tensors(manifest)
    # All ranks have synced their files, but on a network file system rank 0 may see another directory than the others.
    listed = files.listing(directory)
    for name, record in records.items():
        if listed.get(name) != record.size:
            raise CheckpointError(
                f"{name} was written with {record.size} bytes, but rank 0 finds {listed.get(name, 'no file')}. "
                "Write to a file system that all ranks share."
            )
    data = render(manifest)
    if not files.has_rename:
        try:
            files.put(f"{target}/{MANIFEST_NAME}", data)
        except Exception:
            with contextlib.suppress(Exception):
                files.remove_file(f"{target}/{MANIFEST_NAME}")  # it may exist despite the error
            raise
        return
    files.put(f"{directory}/{MANIFEST_NAME}", data)
    # Before the rename, because after a power loss the final name must not be on a directory with missing files.
    files.sync_directory(directory)
    if overwrite and files.exists(target):
        replace_checkpoint(directory, target)
        return
    files.rename(directory, target)
    try:
        files.sync_directory(os.path.dirname(target))
    except Exception:
        with contextlib.suppress(OSError):
            files.rename(target, directory)  # undone, because it may not be durable
        raise


def _attached(files: Files, directory: str, records: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Return the files that hooks have written into the directory, after making them durable."""
    attached = {}
    for name, size in files.tree(directory).items():
        if name in records:
            continue
        if size is None or not is_attachable(name):
            raise CheckpointError(
                f"a hook of save_state wrote {name!r}, which cannot be part of a checkpoint: expected plain files (no "
                "links) whose names do not begin with a dot."
            )
        attached[name] = FileRecord(size, digest_of(files, f"{directory}/{name}"))
    files.sync_tree(directory, attached)
    return attached
