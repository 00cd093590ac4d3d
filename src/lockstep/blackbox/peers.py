"""Do the ranks of this machine mean the same collective? Seen in each other's black boxes, without waiting.

Each rank writes its own record first and only then reads its peers'. Of two ranks that enter the same number, at
least the one that is later finds the other's record: a mismatch is not missed by both.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from lockstep.blackbox import layout, processes
from lockstep.blackbox.read import read_header

_EVENTS = layout.EVENT_WORDS
_MASK = layout.EVENT_SLOTS - 1
_WORDS = layout.RECORD_WORDS
_NAME, _SIGNATURE, _CHECK = layout.NAME_WORD, layout.SIGNATURE_WORD, layout.CHECK_WORD
_LOOKS = 20
_ANY = layout.ANY
_EAGER = 64
"""Up to this number of collectives every one looks for boxes that were missing; later only each 64th."""


def box_path(folder: Path, rank: int) -> Path:
    """Where a rank's box is."""
    return folder / f"rank_{rank}.box"


class Peers:
    """The boxes of the other ranks of this machine, next to the own one."""

    def __init__(
        self, folder: Path, own_rank: int, local_ranks: Iterable[int], fence: Callable[[], object] = lambda: None
    ) -> None:
        self._folder = folder
        self._rank = own_rank
        self._ranks = tuple(rank for rank in local_ranks if rank != own_rank)
        self._own: memoryview | None = None
        self._attempt = ""
        self.found: list[tuple[int, memoryview]] = []
        """Ranks and their boxes."""
        self.missing = list(self._ranks)
        """Ranks whose boxes have not been found yet."""
        self.fence = fence
        """Orders this rank's stores and its reads after them; or two ranks that enter at once may miss each other."""

    def compare(self, seq: int, name_hash: int | None = None, signature_hash: int | None = None) -> int | None:
        """A rank that has entered the same number with another name or signature; None when there is none (yet).

        To be called after ``Box.enter`` gave ``seq``; 0 and less are no numbers, and give None. The hashes are those of
        the own record unless given; a signature hash of 0 goes with anything.
        """
        own = self._own
        if seq <= 0:
            return None
        if self.missing and (seq <= _EAGER or not seq % _EAGER):
            self._find_missing()
            own = self._own
        if own is None:
            return None
        self.fence()
        start = _EVENTS + (seq & _MASK) * _WORDS
        stamp = own[start]
        for rank, words in self.found:
            if words[start] != stamp:
                continue
            name = own[start + _NAME] if name_hash is None else name_hash
            signature = own[start + _SIGNATURE] if signature_hash is None else signature_hash
            if words[start + _NAME] == name and words[start + _SIGNATURE] == signature:
                continue
            if self._differs(words, start, stamp, name, signature or _ANY):
                return rank
        return None

    def forget(self) -> None:
        """Let go of all boxes and look for them anew: ranks may have been replaced, as after a new start."""
        self._own, self.found, self.missing = None, [], list(self._ranks)

    @staticmethod
    def _differs(words: memoryview, start: int, stamp: int, name: int, signature: int) -> bool:
        """Look again at what seems to differ: the peer may be just writing this record, or writing over it."""
        for _ in range(_LOOKS):
            seen = words[start : start + _WORDS].tolist()
            if seen[_CHECK] == layout.check_of_words(*seen[:_CHECK]):
                differs = seen[_NAME] != name or (
                    seen[_SIGNATURE] != signature and _ANY not in (seen[_SIGNATURE], signature)
                )
                return bool(seen[0] == stamp and differs)
        return False  # then it is this rank's record that the peer finds whole

    def _find_missing(self) -> None:
        if self._own is None:
            path = box_path(self._folder, self._rank)
            header = read_header(path)
            if header is None or header.pid != os.getpid():
                return
            self._own = _map(path)
            self._attempt = header.attempt
        machine = layout.this_machine()
        still = []
        for rank in self.missing:
            path = box_path(self._folder, rank)
            header = read_header(path)
            # The box of an earlier start lies there until the rank has made its new one.
            fresh = (
                header is not None
                and header.rank == rank
                and header.attempt == self._attempt
                and header.machine == machine
                and processes.find_process(header.pid, header.started).alive
            )
            words = _map(path) if fresh else None
            if words is None:
                still.append(rank)
            else:
                self.found.append((rank, words))
        self.missing = still


def _map(path: Path) -> memoryview | None:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != layout.SIZE:
                return None
            mapped = mmap.mmap(file.fileno(), layout.SIZE, access=mmap.ACCESS_READ)
            return memoryview(mapped).cast("B").cast("Q")
    except (OSError, ValueError):
        return None
