"""Who takes part in a save: all ranks, or the main process alone.

Many scripts call ``save_state`` on the main process only. Nothing tells this from ranks that are on their way, except
what they do next: a rank that has entered a collective later than this one, or that has ended, will not come. Then the
main process saves what it has. No time limit decides.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import weakref
from typing import Any

from torch.distributed import DistError

from lockstep.blackbox import sites
from lockstep.blackbox.box import Box
from lockstep.blackbox.read import read_all
from lockstep.blackbox.snapshot import Snapshot
from lockstep.config import env
from lockstep.config.stall import read_stall_seconds
from lockstep.errors import CheckpointError
from lockstep.guard import stack_note
from lockstep.guard.diagnose import elsewhere
from lockstep.guard.rank import REMOTE
from lockstep.guard.rank_location import span
from lockstep.job_store.signed_store import from_text
from lockstep.logging import get_notices
from lockstep.process_group.group import Group

_CURRENT = "save/current/{rank}"
"""Where in the job's store a rank says which save it waits in."""
_ANY = "any"
"""Stands for the number of collectives of a rank that does not count them."""
_POLL = 0.005
_APART = 64
"""Collectives after which no rank is at an earlier one. One would do, but for a broadcast, which its sender may leave
before the others have entered it."""
_LOOK = 0.2
"""Seconds between two looks at what the others do."""

_decisions: weakref.WeakKeyDictionary[Group, dict[str, int | None]] = weakref.WeakKeyDictionary()


def find_absent(group: Group) -> dict[int, str]:
    """Called on: the main process, or all ranks. Whoever will not come, and where each is instead; empty when all came.

    On other ranks it is the main process that decides. It raises where that one will not come. A save is the same on
    ranks that come to it by the same lines; the folder may be each rank's own.
    """
    if group.world_size == 1:
        return {}
    return _Rendezvous(group, sites.spell_path(sys._getframe())).wait()


class _Rendezvous:
    """One save, as one rank waits for the others."""

    def __init__(self, group: Group, lines: str) -> None:
        self._group = group
        self._generation, number, _ = group.box.mark()
        self._number = number if isinstance(group.box, Box) else None
        """Collectives entered so far; None where there was no room for a black box to count them."""
        digest = hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
        self._call = group.key(f"save/{digest}/")
        self._alone = group.key(f"save/alone/{self._number}")
        place = f"{self._call}{_ANY if self._number is None else self._number}"
        self._place = f"{place}/{group.ordinal(place, digest)}"
        self._store = group.store
        self._began = time.monotonic()
        self._look_after = self._began + _LOOK
        self._report_after = read_stall_seconds(env.snapshot())
        self._others: set[str] = set()
        """Where ranks wait that cannot tell, or be told, after how many collectives."""

    def wait(self) -> dict[int, str]:
        group, store = self._group, self._store
        mine = _CURRENT.format(rank=group.rank)
        try:
            store.set(f"{self._place}/{group.rank}", "here")
            store.set(mine, self._place)
            absent = self._gather() if group.rank == 0 else self._follow()
            store.set(mine, "")
            store.delete(f"{self._place}/{group.rank}")  # the main process has counted it, or left it out
            return absent
        except DistError as error:  # the rank that hosts the store has ended
            raise group.explain(error, "saving a state") from None

    def _gather(self) -> dict[int, str]:
        absent = set(range(1, self._group.world_size))
        gone: dict[int, str] = {}
        while absent and not gone:
            absent = {rank for rank in absent if not self._has_come(rank)}
            gone = self._find_absent(absent)
        self._forget_earlier(all_arrived=not gone)
        if gone:
            self._decide(self._alone, "yes")
        for place in (*self._others, self._place):
            self._decide(f"{place}/decision", "alone" if gone else "together")
        # Answered once it is there: a rank that sees this one elsewhere from now on finds the decision.
        self._store.peek(f"{self._place}/decision")
        return gone

    def _decide(self, key: str, text: str) -> None:
        self._store.set(key, text)
        _decided(self._group)[key] = self._number

    def _forget_earlier(self, *, all_arrived: bool) -> None:
        """Called on: the main process. Remove decisions that no rank can be waiting for any more."""
        decided = _decided(self._group)
        for key, number in list(decided.items()):
            # Ranks that all came here have read them; else those that entered far more collectives than that.
            behind = 0 if number is None or self._number is None else self._number - number
            if all_arrived or behind > _APART:
                self._store.delete(key)
                del decided[key]

    def _has_come(self, rank: int) -> bool:
        if self._store.peek(f"{self._place}/{rank}") is not None:
            return True
        place = self._current(rank)
        uncounted = place.startswith(self._call) and (self._number is None or f"/{_ANY}/" in place)
        if uncounted:
            self._others.add(place)
        return uncounted

    def _follow(self) -> dict[int, str]:
        decision = f"{self._place}/decision"
        gone: dict[int, str] = {}
        while (decided := self._store.peek(decision, from_text)) is None:
            if gone and self._store.peek(self._alone) is not None:
                return {self._group.rank: ""}  # it has saved at another line, without waiting for this one
            if gone:
                raise CheckpointError(
                    f"save_state() was called on rank {self._group.rank}, but the main process {gone[0]}. Call it on "
                    "all ranks, or on the main process alone."
                )
            gone = self._find_absent({0})
        if decided.startswith("apart"):
            raise _apart(decided.partition(" ")[2])
        return {self._group.rank: ""} if decided == "alone" else {}

    def _find_absent(self, absent: set[int]) -> dict[int, str]:
        """Which of these will not come, and where they are; after a moment, in which nothing may have happened."""
        self._group.check("saving a state")
        time.sleep(_POLL)
        now = time.monotonic()
        if now < self._look_after or not absent:
            return {}
        if self._number is None:
            return {}  # without a number of its own, it cannot tell who is further
        self._look_after = now + _LOOK
        boxes = self._boxes()
        others = {rank for rank in absent if self._saves_other(rank)} if self._group.rank == 0 else set()
        found = {rank: where for rank in absent - others if (where := self._where(rank, boxes.get(rank)))}
        found |= dict.fromkeys(others, "waits in another save_state()")
        if not found and now - self._began >= self._report_after:
            self._report(absent, now - self._began)
        return found

    def _where(self, rank: int, box: Snapshot | None) -> str:
        """Where a rank is that will not come; empty while it may."""
        assert self._number is not None
        if box is not None:
            return elsewhere(box, self._generation, self._number, since=self._began)
        # On another node: its own reporter writes down where it waits, and that it has ended.
        found = self._store.peek(REMOTE.format(rank=rank), _read_remote)
        if found is None:
            return ""
        generation, number, words = found
        waits = generation == self._generation and number > self._number
        return str(words) if waits or number < 0 else ""

    def _saves_other(self, rank: int) -> bool:
        """Whether a rank waits in another save, for this one to decide about it.

        The same save after another number of collectives proves that the ranks are out of step: none can have
        completed a collective that the other has not entered.
        """
        place = self._current(rank)
        if place in ("", self._place) or self._store.peek(f"{place}/decision") is not None:
            return False
        number = place.removeprefix(self._call).partition("/")[0]
        if place.startswith(self._call) and number != str(self._number):
            text = f"rank {rank} has entered {number} collectives, the main process {self._number}"
            self._decide(f"{place}/decision", f"apart {text}")
            raise _apart(text)
        return True

    def _current(self, rank: int) -> str:
        """The save that a rank waits in; empty when in none."""
        return self._store.peek(_CURRENT.format(rank=rank), from_text) or ""

    def _boxes(self) -> dict[int, Snapshot]:
        """Of the ranks of this node, in this job."""
        folder = self._group.boxes
        if folder is None:
            return {}
        boxes = read_all(folder)
        mine = next((box for box in boxes if box.rank == self._group.rank and box.pid == os.getpid()), None)
        here = [box for box in boxes if mine is not None and box.attempt == mine.attempt]
        return {box.rank: stack_note.merged(box, stack_note.place(folder, box.rank)) for box in here}

    def _report(self, absent: set[int], waited: float) -> None:
        self._report_after = 2 * waited
        names = ", ".join(str(rank) for rank in sorted(absent))
        get_notices("lockstep.checkpoint").warning(
            f"save_state() on rank {self._group.rank} has waited {span(waited)} for rank {names}, which may still "
            "come. `lockstep stacks` shows where each rank is.",
            main_process_only=False,
        )


def _decided(group: Group) -> dict[str, int | None]:
    """On the main process: the decisions that are in the store, and after how many collectives they were made."""
    return _decisions.setdefault(group, {})


def _read_remote(data: bytes) -> tuple[int, int, str]:
    generation, number, words = data.decode().split(maxsplit=2)
    return int(generation), int(number), words


def _apart(text: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint was not committed: the ranks are not at the same place: {text}. One of them called something "
        "that the other did not, or left something out. Call every collective, and save_state(), on all ranks alike; "
        "Accelerator(debug=True) finds the call."
    )


def by_one(value: Any, doing: str) -> list[Any]:
    """An exchange of one rank with itself."""
    return [value]
