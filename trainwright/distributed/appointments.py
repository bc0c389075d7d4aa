"""Appointments: boundaries of the loop that all ranks agree on over the key-value store, without a collective.

    any rank asks          -> its watcher thread posts the question, and the watchers of all ranks notice it
    is_due(step), noticed  -> posts step + 1 under its rank, and goes on at once
    is_due(step), later    -> once all ranks have posted: the largest number is the appointment
    is_due(step) is True   at the first boundary that is not before the appointment, on every rank alike

Why nobody misses it: between two boundaries lies a collective of the training itself (the all-reduce of the gradients), so
a rank that has come to a boundary knows that all others have left the one before it, and with it that the store has what
they posted there (`post` waits for the store's receipt). The largest number, m, was posted at a boundary before m, as were
all others, so at m every rank sees them all. An accelerator's collectives are only queued by
the host, which may be many steps ahead of them; while a round is on, a rank waits for its device before it looks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from trainwright.distributed.store import Store, post

QUESTIONS = "questions"
"""The one key that the watchers look at while nothing is asked: how many questions were posted so far."""


class Appointment:
    """Something that may be asked for at any time and is then done by all ranks at one and the same boundary.

    One object serves one run of the loop, and any number of rounds in it: an appointment that was kept may be asked for
    again. What was asked in a run and not kept when it ended is forgotten with the object.

    NOTE: the guarantee needs a collective of all ranks between two boundaries. Under manual optimization, where a step may
    pass without a backward, and in an evaluation, ranks may find it due at different boundaries.

    Args:
        store: the key-value store, on a connection of the loop's thread; None in a job of one process.
        rank: this process's global rank.
        world_size: how many processes the job has.
        name: the same on all ranks, and never used twice in one store.
        synchronize: waits until the device has done what was queued; None where collectives block the host.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        name: str,
        *,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        if store is None and world_size > 1:
            raise ValueError(f"store=None with world_size={world_size}; more than one rank needs a key-value store.")
        self.name = name
        self._store, self.rank, self._world_size = store, rank, world_size
        self._synchronize = synchronize
        self._lock = threading.Lock()  # between the loop and the watcher; ask() takes none
        self._wants = False
        self.is_asked = False
        """Whether it was asked for, as far as this rank knows; while it is not, `is_due` need not be called."""
        # The loop's alone to write:
        self._round = 0
        self._posted_round = -1
        self._agreed_step: int | None = None
        # The watcher's alone:
        self._told_round = -1
        self._looked_at: tuple[int, int] | None = None

    def ask(self) -> None:
        """Ask for it: from any rank, in any thread or signal handler. It never blocks.

        Where a round is on already, this joins it. `is_due` returns True on every rank at some boundary after this call
        began, unless the run ends before.
        """
        self._wants = True
        if self._store is None:
            self.is_asked = True

    def is_due(self, step: int) -> bool:
        """Whether the appointment is now. Call at every boundary on every rank, with the same steps, none less than the last.

        One attribute read while nothing is asked for; then a few reads of the store at each boundary until it was kept.
        """
        return self.is_asked and self._is_kept(step)

    def tell(self, store: Store) -> bool:
        """For the watcher: post what was asked for here; return whether there was something new to post."""
        current = self._round
        if not self._wants or self._told_round == current:
            return False
        store.set(self._question(current), "1")  # the count of questions that is raised next is its receipt
        self._told_round = current
        return True

    def notice(self, store: Store, questions: int) -> None:
        """For the watcher: look for a question, where there are more than at the last look or a new round has begun."""
        current = self._round
        if self._looked_at == (current, questions):
            return
        is_asked = store.check([self._question(current)])
        self._looked_at = (current, questions)
        if is_asked:
            with self._lock:
                if self._round == current:
                    self.is_asked = True

    def _is_kept(self, step: int) -> bool:
        store = self._store
        if store is None:
            self._wants = self.is_asked = False
            return True
        if self._posted_round != self._round:
            post(store, self._post(self._round, self.rank), str(step + 1))
            self._posted_round = self._round
            return False
        if self._agreed_step is None:
            if self._synchronize is not None:
                self._synchronize()
            posts = [self._post(self._round, rank) for rank in range(self._world_size)]
            if not store.check(posts):
                return False
            self._agreed_step = max(int(store.get(post)) for post in posts)
        if step < self._agreed_step:
            return False
        self._finish_round(store)
        return True

    def _finish_round(self, store: Store) -> None:
        finished = self._round
        with self._lock:
            self._agreed_step = None
            self._round = finished + 1
            self._wants = False  # what is asked from here on is for the next round
            self.is_asked = False
        # Every rank has posted in this round, so every rank has done with the one before it.
        if finished > 0:
            store.delete_key(self._post(finished - 1, self.rank))
            if self.rank == 0:
                store.delete_key(self._question(finished - 1))

    def _question(self, number: int) -> str:
        return f"{self.name}/{number}/asked"

    def _post(self, number: int, rank: int) -> str:
        return f"{self.name}/{number}/{rank}"


class AppointmentBook:
    """The appointments of one connection, with what its watcher thread does for them.

    Args:
        store: the key-value store, on a connection of the loop's thread; None in a job of one process.
        rank: this process's global rank.
        world_size: how many processes the job has.
        synchronize: waits until the device has done what was queued; None where collectives block the host.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._store, self.rank, self._world_size = store, rank, world_size
        self._synchronize = synchronize
        self._counts: dict[str, int] = {}
        self._entries: list[weakref.ref[Appointment]] = []
        self._lock = threading.Lock()

    def make(self, name: str) -> Appointment:
        """Return a new appointment. Appointments of one name pair up by their order: make them on every rank alike."""
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        appointment = Appointment(
            self._store, self.rank, self._world_size, f"{name}/{number}", synchronize=self._synchronize
        )
        with self._lock:
            self._entries = [entry for entry in self._entries if entry() is not None]
            self._entries.append(weakref.ref(appointment))
        return appointment

    def look(self, store: Store) -> None:
        """Post what was asked here and notice what was asked anywhere: called now and then by the watcher thread.

        `store` is the watcher's own connection. One read of the store while nothing is asked, none without appointments.
        """
        with self._lock:
            appointments = [appointment for entry in self._entries if (appointment := entry()) is not None]
        if not appointments:
            return
        told = [appointment.tell(store) for appointment in appointments]
        questions = store.add(QUESTIONS, sum(told))  # after the questions themselves, so that a new count finds them
        for appointment in appointments:
            appointment.notice(store, questions)
