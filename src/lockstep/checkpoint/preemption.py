"""Told to go: save the state after a whole batch, on all ranks after the same update, and leave.

A signal (SIGTERM, SIGUSR1) may reach one rank or all. No rank may stop at once: the others would wait for it in the
next update. So each notes in the job's store how many updates it had made when it heard of it. Ranks that average
gradients are never more than one update apart; so when all have noted theirs, the largest plus two is an update that
none of them has passed. After that one they save, together. While no signal has come this costs one comparison a batch.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from lockstep.guard.dead_peers import find_dead
from lockstep.host.threads import join
from lockstep.logging import get_notices
from lockstep.rundir import constants
from lockstep.training.state import TrainingState

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_MARGIN = 2
_POLL = 0.5
_PATIENCE = 5.0
_PREFIX = "preempt"


class Preemption:
    """Heeds the signals from when it is made: after the batch it calls ``save``, then ``leave``, and ends the process.

    ``check`` is called after each batch.
    """

    def __init__(self, training: TrainingState, save: Callable[[], Any], leave: Callable[[], Any]) -> None:
        self._training = training
        self._group = group = training.group
        self._save, self._leave = save, leave
        self.asked: int | None = None
        """The signal, once one has come; 0 where another rank got it."""
        self._seen: tuple[int, int] | None = None
        self._stop: int | None = None
        self._noted = False
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if group.world_size > 1:
            self._store = group.store.clone()
            self._thread = threading.Thread(target=self._listen, name="lockstep-preemption", daemon=True)
            self._thread.start()
            # A thread that comes out of a call to the store while Python shuts down ends the process with SIGABRT.
            atexit.register(self.close)

    def _on_signal(self, number: int, _: Any) -> None:
        # A worker of a loader, forked with our handler; or a launcher that ends the ranks because one of them has died,
        # so that no common save can come any more: end as without us.
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked is None and find_dead(self._group.boxes, self._group.rank):
            signal.signal(number, self._before.get(signal.Signals(number), signal.SIG_DFL))
            os.kill(os.getpid(), number)
        elif self.asked is None:
            self.asked = number

    def _listen(self) -> None:
        """Hear of a signal that another rank got."""
        # Asked again and again: torch's own wait prints a warning for each time that nothing came.
        while not self._closed.wait(_POLL):
            try:
                told = self._store.peek(f"{_PREFIX}/asked") is not None
            except RuntimeError:
                return  # the job's store has gone, and the job with it
            if told and self.asked is None:
                self.asked = 0
            if told:
                return

    def check(self) -> None:
        """Called on: all ranks, after each batch of a loader. Save and leave, if it is time."""
        if self.asked is None:
            return
        # Updates made, and micro-batches of the open window: they change when a batch is trained on.
        now = (self._training.updates, self._training.accumulation.step)
        before, self._seen = self._seen, now
        if before is None or now == before:
            return  # nothing was trained on since: this may be an evaluation
        if self._group.world_size == 1:
            self._go()
        elif now[0] != before[0]:
            self._agree(now[0])

    def _agree(self, updates: int) -> None:
        """After an update, which ties the ranks to each other: note it, or see whether it is the last."""
        ranks = range(self._group.world_size)
        store = self._group.store
        if not self._noted:
            self._noted = True
            store.set(f"{_PREFIX}/at/{self._group.rank}", str(updates))
            store.set(f"{_PREFIX}/asked", str(self.asked))
        keys = [f"{_PREFIX}/at/{rank}" for rank in ranks]
        if self._stop is None:
            noted = store.peek_all(keys, int)
            if noted is not None:
                self._stop = max(noted) + _MARGIN
        if self._stop is not None and updates >= self._stop:
            self._go()

    def _go(self) -> NoReturn:
        name = signal.Signals(self.asked).name if self.asked else "a signal to another rank"
        get_notices("lockstep.checkpoint").info(f"Told to stop by {name}: saving, then leaving.")
        self._save()
        self._ignore_signals()
        self._leave()
        raise SystemExit(constants.SAVED)

    def _ignore_signals(self) -> None:
        """For the rest of the process: a launcher that sees the first rank gone signals the others once more."""
        if self._before:
            self._before = {}
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Heed signals no more."""
        self._closed.set()
        if self._thread is not None and os.getpid() == self._pid:
            join(self._thread, _PATIENCE)
            atexit.unregister(self.close)
            self._thread = None
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._pid:
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
        self._before = {}
