"""A thread of every rank that looks up twice a second, and says where the rank is when it does not move.

While the main thread waits in a collective the GIL is free, so this thread runs. It reads torch's Flight Recorder,
which knows of every collective that is under way, those inside DDP and those that a script starts by itself included;
and the main thread's stack. It also ends the process when the guard has stopped the job: nothing else could.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.blackbox import sites
from lockstep.blackbox.snapshot import Raw, TorchCall
from lockstep.blackbox.step_clock import StepClock
from lockstep.guard import stack_note, straggler
from lockstep.guard.torch_calls import calls_of, is_default
from lockstep.host.threads import join
from lockstep.torch_internals import flight_recorder

INTERVAL = 0.5
"""Seconds between two looks."""
STILL = 0.9
"""Seconds without a move after which the rank says where it is."""
STOPPED = 86
"""Exit code of a rank in a job that the guard has stopped: starting it again would only bring it back there."""
_FRAMES = 12
_PACE_INTERVAL = 20.0
"""Seconds between two looks at the pace: each takes the GIL for some 20 ms."""


class Reporter:
    """The thread."""

    def __init__(
        self,
        box: Any,
        note: Path,
        is_stopped: Callable[[], bool],
        clock: StepClock | None = None,
        also: Callable[[], None] = lambda: None,
        still: Callable[[tuple[int, int, int]], None] = lambda _: None,
        before_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._box = box
        self._note = note
        self._is_stopped = is_stopped
        self._clock = clock
        self._also = also
        self._still = still
        self._before_stop = before_stop
        self._pace_due = 0.0
        self._main = threading.main_thread().ident
        self._mark: tuple[int, int, int] = (0, 0, 0)
        self._moved = time.monotonic()
        self._raw: tuple[int, Raw] | None = None
        self._calls: tuple[TorchCall, ...] | None = None
        self._group_since = time.time_ns()
        self._stumbled = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-reporter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ending.set()
        join(self._thread, 5)

    def _run(self) -> None:
        while not self._ending.wait(INTERVAL):
            try:
                self.poll()
                self._also()
            except Exception:  # without this thread nobody would see where the rank is, nor end it
                if not self._stumbled:
                    self._stumbled = True
                    traceback.print_exc()
            if self._is_stopped():
                self._before_stop()
                with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or nobody reads it
                    sys.stderr.flush()
                os._exit(STOPPED)

    def poll(self) -> None:
        """Beat; and say where the rank is, if it has not moved for a while."""
        now = time.monotonic()
        self._box.beat()
        mark = self._box.mark()
        if mark != self._mark:
            if mark[0] != self._mark[0]:
                self._group_since = time.time_ns()
            self._mark, self._moved, self._calls = mark, now, None
            self._pace(now)
            return
        if now - self._moved >= STILL:
            self._box.raw(self._under_way(now))
            if self._calls is None:
                dump = flight_recorder.dump(stacks=flight_recorder.can_list_stacks())
                self._calls = calls_of(dump.get("entries", ()) if dump else (), self._group_since)
            stack_note.write(self._note, mark, self._stack(), self._calls)
            self._still(mark)

    def _pace(self, now: float) -> None:
        """Now and then: how long the latest steps took this rank by itself."""
        clock = self._clock
        if clock is None:
            return
        clock.sample()
        if now < self._pace_due:
            return
        if not clock.on:
            clock.fetches.clear()
            clock.backwards.clear()
            clock.on = True
            return
        fetches = tuple(clock.fetches)
        if len(fetches) <= straggler.STEPS:
            return
        clock.on = False
        self._pace_due = now + _PACE_INTERVAL
        dump = flight_recorder.dump()
        ahead = time.time() - time.monotonic()
        entries = dump.get("entries", ()) if dump is not None else ()
        started = [entry.get("time_created_ns", 0) / 1e9 - ahead for entry in entries if not entry.get("is_p2p")]
        for step in straggler.own_times(fetches, tuple(clock.backwards), started, clock.busy_share()):
            self._box.pace(*step)

    def _stack(self) -> tuple[str, ...]:
        """The main thread's frames, innermost first; ours and torch's only while no frame of the user's has come."""
        frame = sys._current_frames().get(self._main or 0)
        lines: list[str] = []
        while frame is not None and len(lines) < _FRAMES:
            lines.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return tuple(lines)

    def _under_way(self, now: float) -> Raw | None:
        """Torch's collective that the main thread waits in, not one that it has only started."""
        frame = sys._current_frames().get(self._main or 0)
        dump = flight_recorder.dump() if frame is not None and _is_waiting(frame) else None
        if dump is None:
            return None
        entries = [entry for entry in dump.get("entries", ())[-8:] if not entry.get("retired", True)]
        if not entries:
            self._raw = None
            return None
        entry = entries[0]
        number = int(entry.get("collective_seq_id") or 0)
        if self._raw is None or self._raw[0] != number:
            age = max(0.0, time.time() - entry.get("time_created_ns", time.time_ns()) / 1e9)
            raw = Raw(
                name=str(entry.get("profiling_name", "")).rpartition(":")[2],
                number=number,
                site=self._user_site(),
                since=now - age,
                shapes=str(entry.get("input_sizes") or ""),
                group="" if is_default(entry) else str(entry.get("process_group") or entry.get("pg_id")),
            )
            self._raw = number, raw
        return self._raw[1]

    def _user_site(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        return "" if frame is None else _short(sites.spell_site(sites.find_user_frame(frame, {})))


def _is_waiting(frame: FrameType) -> bool:
    """Whether the innermost frame waits for others: one of torch's or ours, or a line that waits for a handle.

    Some bytecode belongs to no line.
    """
    name = frame.f_code.co_filename
    return not sites.is_user_file(name) or "wait" in linecache.getline(name, frame.f_lineno or 0)


def _short(name: str) -> str:
    here = os.getcwd() + os.sep
    return name.removeprefix(here)
