"""The black box of one rank, as the rank writes it: a file in memory that outlives the process.

Everything here runs inside the user's training step, so it is a few stores into mapped memory, and nothing raises.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from lockstep.blackbox import layout, processes, sites
from lockstep.blackbox.snapshot import Raw
from lockstep.blackbox.texts import TextTable
from lockstep.rundir.files import make_folder

if TYPE_CHECKING:
    from lockstep.blackbox.peers import Peers

_PACK = layout.RECORD_OF_CALL.pack
_PUT = layout.CHECKED_RECORD.pack_into
_CHECK = layout.check_of
_EVENTS = layout.EVENTS
_EVENT_MASK = layout.EVENT_SLOTS - 1
_ENTERED, _LEFT = layout.ENTERED, layout.LEFT
_OPTIMIZER_STEPS = layout.OPTIMIZER_STEPS
_PHASE = object()
"""Stands where a collective has its signature."""
_MAX_PASSED = 4096
_MAX_CALLS = 1024
_DIGESTED = 200
"""Collectives in a digest: as many as are surely still in the ring."""
_frame_at = sys._getframe


class NoBox:
    """Takes what a box takes and keeps nothing: for a rank that has no run directory, or whose disk is full."""

    __slots__ = ("reason",)

    def __init__(self, reason: str = "there is no run directory") -> None:
        self.reason = reason
        """Why there is no box."""

    def enter(self, name: str, signature: Hashable = None, depth: int = 1, steps: int = 0, batch: int = 0) -> int:
        """See ``Box``."""
        return 0

    def forward(self, depth: int = 1) -> None:
        """See ``Box``."""

    def answered(self) -> None:
        """See ``Box``."""

    def stepped(self, depth: int = 1) -> None:
        """See ``Box``."""

    def leave(self, seq: int, refused: bool = False) -> None:
        """See ``Box``."""

    def refuse(self) -> None:
        """See ``Box``."""

    def compare_with(self, peers: Peers | None, refuse: Callable[[str, int, int], None]) -> None:
        """See ``Box``."""

    def phase(self, name: str, site: bool = False) -> float:
        """See ``Box``."""
        return 0.0

    def step(self, number: int) -> None:
        """See ``Box``."""

    def recovering(self, inside: bool) -> None:
        """See ``Box``."""

    def generation(self, number: int) -> None:
        """See ``Box``."""

    def pace(self, data: float, forward: float, backward: float, whole: float, waited: float, workers: float) -> None:
        """See ``Box``."""

    def raw(self, raw: Raw | None) -> None:
        """See ``Box``."""

    def beat(self) -> None:
        """See ``Box``."""

    def mark(self) -> tuple[int, int, int]:
        """See ``Box``."""
        return (0, 0, 0)

    def digest(self) -> int:
        """See ``Box``."""
        return 0

    def close(self, how: str, words: str = "") -> None:
        """See ``Box``."""


class Box(NoBox):
    """Writes what one rank does. One thread enters and leaves; the rest of the calls may come from the reporter's."""

    __slots__ = (
        "__weakref__",
        "_base",
        "_buffer",
        "_calls",
        "_depth",
        "_doubles",
        "_names",
        "_number",
        "_owner",
        "_paces",
        "_passed",
        "_peers",
        "_phases",
        "_raws",
        "_refuse_with",
        "_signatures",
        "_siteless",
        "_sites",
        "_step",
        "_words",
        "path",
    )

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        super().__init__("")
        self.path = path
        """Where the file is."""
        self._peers: Peers | None = None
        self._refuse_with: Callable[[str, int, int], None] = lambda name, number, rank: None
        self._attach(buffer)
        self._names = TextTable(layout.NAMES)
        self._sites = TextTable(layout.SITES)
        self._signatures = TextTable(layout.SIGNATURES)
        for nothing in (None, "", ()):
            self._signatures.known[nothing] = (layout.ANY, layout.NOWHERE, None)
        self._signatures.known[_OPTIMIZER_STEPS] = (layout.ANY, layout.STEPS, None)
        self._passed: dict[int, CodeType] = {}
        self._calls: dict[tuple[int | None, str, Hashable], tuple[bytes, int, int]] = {}
        self._siteless: dict[str, bytes] = {}
        self._owner = 0
        self._depth = 0
        self._base = 0
        self._number = 0
        self._step = 1
        self._phases = 0
        self._paces = 0
        self._raws = 0
        _open_boxes.add(self)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        node: int,
        host: str,
        pid: int,
        attempt: str = "",
        device: str = "",
    ) -> Box:
        """A new box in place of an older one; the file appears complete. OSError when it cannot be made."""
        header = layout.Header(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            node=node,
            host=host,
            pid=pid,
            started=processes.started(pid),
            machine=layout.this_machine(),
            attempt=attempt,
            device=device,
        )
        make_folder(path.parent)
        unfinished = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _fill(file, header.pack())
            buffer = mmap.mmap(file, layout.SIZE)
            for page in range(0, layout.SIZE, mmap.PAGESIZE):
                buffer[page] = buffer[page]  # the page fault happens here, not in a training step
            os.replace(unfinished, path)
        except (OSError, ValueError):
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(file)
        return cls(path, buffer)

    # ------------------------------------------------------------ collectives

    def enter(self, name: str, signature: Hashable = None, depth: int = 1, steps: int = 0, batch: int = 0) -> int:
        """A collective begins; its number among those of this generation, for ``leave``.

        ``signature`` is what must agree between the ranks, a text or a tuple; nothing or empty where they may differ.
        The user's line is looked for from the caller outwards, or from its caller (``depth`` 2), and so on. Raises what
        the other end of ``meet`` raises when a peer means another collective by the same number. With the signature
        ``OPTIMIZER_STEPS`` it is ``steps`` that must agree. ``batch``, the loader's place, is recorded and never
        compared.

        One that begins inside another is a part of it and has no number: it gives 0. Another thread than the one that
        entered first gives -1 and is not recorded: its collectives are in no order with these.
        """
        if get_ident() != self._owner:
            if self._owner:
                return -1
            self._owner = get_ident()
        if self._depth:
            self._depth += 1
            return 0
        try:
            frame: Any = _frame_at(depth)
            passed = self._passed
            while id(frame.f_code) in passed:
                frame = frame.f_back
            constant, name_hash, signature_hash = self._calls[(id(frame.f_code) << 24) + frame.f_lasti, name, signature]
        except Exception:  # new here, or cannot be a key, or no frame: the way that copes with everything
            constant, name_hash, signature_hash = self._learn(name, signature, depth + 1)
        number = self._number = self._number + 1
        stamp = self._base + number
        slot = (number & _EVENT_MASK) * 64
        if signature is _OPTIMIZER_STEPS:
            signature_hash = layout.steps_word(steps)
            constant = constant[:8] + signature_hash.to_bytes(8, sys.byteorder) + constant[16:]
        record = _PACK(stamp, constant, monotonic(), self._step + (batch << 32))
        _PUT(self._buffer, _EVENTS + slot, record, _CHECK(record))
        self._words[_ENTERED] = stamp
        self._depth = 1
        peers = self._peers
        if peers is not None:
            # What ``Peers.compare`` does, as far as it mostly gets; it is asked only when something seems to differ.
            peers.fence()
            start = (_EVENTS + slot) // 8
            for _, words in peers.found:
                if words[start] == stamp and (words[start + 1] != name_hash or words[start + 2] != signature_hash):
                    break
            else:
                if not peers.missing:
                    return number
            other = peers.compare(number)
            if other is not None:
                self._refuse_with(name, number, other)
        return number

    def compare_with(self, peers: Peers | None, refuse: Callable[[str, int, int], None]) -> None:
        """Compare each collective with what these peers have entered.

        ``refuse`` gets the name and number of one that differs, and the other rank.
        """
        self._peers, self._refuse_with = peers, refuse

    def leave(self, seq: int, refused: bool = False) -> None:
        """The collective that got this number has ended, well or with an exception; parts of it end with it.

        ``refused`` when it ended with an error here, so that nothing it would have brought was used.
        """
        if seq > 0:
            # Another number, or none under way: the generation has changed since.
            if seq == self._number and self._depth:
                if refused:
                    self.refuse()
                self._words[_LEFT] = self._base + seq
                self._depth = 0
        elif seq == 0 and self._depth > 1:
            self._depth -= 1

    def refuse(self) -> None:
        """The collective under way will end with an error here: nothing that it would have brought is used."""
        if self._depth:
            place = _EVENTS + (self._number & _EVENT_MASK) * 64
            record = bytearray(self._buffer[place : place + layout.RECORD.size])
            record[layout.FLAG_BYTE] = layout.REFUSED
            _PUT(self._buffer, place, bytes(record), _CHECK(record))

    def generation(self, number: int) -> None:
        """A new process group: collectives are counted from 1 again, by whichever thread enters first."""
        self._base = (number & 0x7FFFFF) << layout.NUMBER_BITS
        self._number = self._depth = self._owner = 0
        # Should the same generation come twice, its numbers do: no peer may find those of the first time.
        self._buffer[_EVENTS : layout.PACES] = bytes(layout.PACES - _EVENTS)
        # In this order: a reader that sees the new generation entered finds nothing left of the old one to be in.
        self._words[_LEFT] = self._base
        self._words[_ENTERED] = self._base

    # ------------------------------------------------------------ between them

    def phase(self, name: str, site: bool = False) -> float:
        """What the rank does from now on, outside collectives: "data", …; "" when that is not known. When "now" is."""
        constant = None if site else self._siteless.get(name)
        if constant is None:
            constant = self._learn_phase(name, site)
        count = self._phases = self._phases + 1
        slot = layout.PHASES + (count & (layout.PHASE_SLOTS - 1)) * 64
        now = monotonic()
        record = _PACK(count, constant, now, self._step)
        _PUT(self._buffer, slot, record, _CHECK(record))
        self._words[layout.PHASE_COUNT] = count
        return now

    def step(self, number: int) -> None:
        """So many updates have been made."""
        self._step = number + 1
        self._words[layout.STEP] = number

    def recovering(self, inside: bool) -> None:
        """Whether the rank is in a scope that survives failures."""
        self._words[layout.RECOVERING] = 1 if inside else 0

    # ------------------------------------------------------------ training

    def forward(self, depth: int = 1) -> None:
        """A model is called whose backward will reduce gradients. One that was called before got none."""
        words = self._words
        if words[layout.PENDING]:
            self._skip()
        words[layout.CALLED], words[layout.CALLED + 1] = line = self._line(depth + 1)
        words[layout.PENDING] = line[0]

    def answered(self) -> None:
        """The backward of what was called has begun."""
        self._words[layout.PENDING] = 0

    def stepped(self, depth: int = 1) -> None:
        """An optimizer has updated parameters that were reduced."""
        self._words[layout.STEPPED], self._words[layout.STEPPED + 1] = self._line(depth + 1)

    def _skip(self) -> None:
        words = self._words
        if not words[layout.SKIPPED]:
            first = (words[layout.STEP], *words[layout.CALLED : layout.CALLED + 2])
            words[layout.SKIPPED_STEP], words[layout.SKIPPED_AT], words[layout.SKIPPED_AT + 1] = first
            words[layout.SKIPPED_CHECK] = layout.check_of_words(*first)
        words[layout.SKIPPED] += 1

    def _line(self, depth: int) -> tuple[int, int]:
        """Hash and place of the user's line."""
        try:
            frame: Any = _frame_at(depth)
            while id(frame.f_code) in self._passed:
                frame = frame.f_back
            return self._sites.known[(id(frame.f_code) << 24) + frame.f_lasti][:2]
        except Exception:  # new here, or no frame
            return self._find_site(depth + 1)[1:]

    # ------------------------------------------------------------ from the reporter's thread

    def pace(self, data: float, forward: float, backward: float, whole: float, waited: float, workers: float) -> None:
        """Seconds of one step, as in ``Step``."""
        count = self._paces = self._paces + 1
        slot = layout.PACES + (count & (layout.PACE_SLOTS - 1)) * layout.PACE.size
        times = data, forward, backward, whole, waited, workers
        layout.PACE.pack_into(self._buffer, slot, *times, _CHECK(layout.NUMBERED_PACE.pack(count, *times)))
        self._words[layout.PACE_COUNT] = count

    def raw(self, raw: Raw | None) -> None:
        """The collective of torch's own that is under way, or none."""
        version = self._raws = self._raws + 1
        start = layout.RAWS + (version % layout.RAW_SLOTS) * layout.RAW_SIZE
        texts = [
            getattr(raw, field, "").encode(errors="backslashreplace")[:room] for field, room in layout.RAW_ROOM.items()
        ]
        number, since = (raw.number, raw.since) if raw is not None else (0, 0.0)
        data = layout.RAW.pack(int(raw is not None), number, since, *map(len, texts)) + b"".join(texts)
        self._buffer[start + layout.WORD : start + layout.WORD + len(data)] = data
        self._words[(start + layout.RAW_SIZE) // layout.WORD - 1] = layout.check_of_words(version) ^ _CHECK(data)
        self._words[start // layout.WORD] = version

    def mark(self) -> tuple[int, int, int]:
        """Generation, collectives entered and left: it changes whenever the rank moves."""
        entered, left = self._words[_ENTERED], self._words[_LEFT]
        low = (1 << layout.NUMBER_BITS) - 1
        return entered >> layout.NUMBER_BITS, entered & low, left & low

    def digest(self) -> int:
        """A number that is the same on ranks whose latest collectives were the same, in names and signatures."""
        words, first = self._words, max(1, self._number - _DIGESTED + 1)
        starts = [_EVENTS // 8 + (number & _EVENT_MASK) * 8 for number in range(first, self._number + 1)]
        meant = [(words[start + layout.NAME_WORD], words[start + layout.SIGNATURE_WORD]) for start in starts]
        return layout.hash_text(repr(meant))

    def beat(self) -> None:
        """The reporter has looked up."""
        self._doubles[layout.BEAT] = monotonic()

    # ------------------------------------------------------------ the end

    def close(self, how: str, words: str = "") -> None:
        """The rank leaves the job: "finished", "asked to end", or "failed" with the exception's first line.

        The first call counts.
        """
        code = {word: number for number, word in layout.CLOSED.items()}.get(how, 2)
        data = words.encode(errors="backslashreplace")[: layout.CLOSING_ROOM]
        start, first = layout.CLOSING + 3 * layout.WORD, layout.CLOSING // layout.WORD
        self._buffer[start : start + len(data)] = data
        self._words[first + 1] = len(data)
        self._words[first + 2] = layout.check_of_words(code, len(data)) ^ _CHECK(data)
        self._words[first] = code
        self._detach()

    def _attach(self, buffer: mmap.mmap | bytearray) -> None:
        self._buffer: Any = buffer
        self._words = memoryview(buffer).cast("B").cast("Q")
        self._doubles = memoryview(buffer).cast("B").cast("d")

    def _detach(self) -> None:
        """Go on in memory that nobody reads; the file is let go of when no thread is in it any more."""
        self._peers = None
        self._attach(bytearray(layout.SIZE))

    # ------------------------------------------------------------ texts that are new

    def _learn(self, name: str, signature: Hashable, depth: int) -> tuple[bytes, int, int]:
        """The constant part of a collective's record, its texts written where they are new, and what peers compare."""
        key, site_hash, site = self._find_site(depth + 1)
        name_hash, title = self._find(self._names, name)
        signature_hash, sign = self._find(self._signatures, signature)
        constant = layout.CALL.pack(name_hash, signature_hash, site_hash, title, sign, site, layout.PLAIN)
        call = constant, name_hash, signature_hash
        if len(self._calls) >= _MAX_CALLS:
            self._calls.clear()
        with suppress(TypeError):
            self._calls[key, name, signature] = call
        return call

    def _learn_phase(self, name: str, site: bool) -> bytes:
        key, site_hash, place = self._find_site(3) if site else (None, layout.ANY, layout.NOWHERE)
        known = self._calls.get((key, name, _PHASE)) if site else None
        if known is not None:
            return known[0]
        name_hash, title = self._find(self._names, name)
        constant = layout.CALL.pack(name_hash, layout.ANY, site_hash, title, layout.NOWHERE, place, layout.PLAIN)
        if not site:
            self._siteless[name] = constant
        elif key is not None:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key, name, _PHASE] = constant, name_hash, layout.ANY
        return constant

    def _find_site(self, depth: int) -> tuple[int | None, int, int]:
        """The user's line: the key it is known by, the hash and place of its text."""
        if len(self._passed) > _MAX_PASSED:
            self._passed.clear()
        try:
            frame: FrameType = sites.find_user_frame(_frame_at(depth), self._passed)
        except ValueError:  # not so many frames
            return None, layout.ANY, layout.NOWHERE
        key = (id(frame.f_code) << 24) + frame.f_lasti
        known = self._sites.known.get(key)
        if known is not None:
            return key, *known[:2]
        return key, *self._add(self._sites, key, sites.spell_site(frame), frame.f_code)

    def _find(self, texts: TextTable, key: Hashable) -> tuple[int, int]:
        """Hash and place of a name or a signature."""
        try:
            known = texts.known.get(key)
        except TypeError:  # it has a list in it
            key = layout.spell(key)
            known = texts.known.get(key)
        return known[:2] if known is not None else self._add(texts, key, layout.spell(key))

    def _add(self, texts: TextTable, key: Hashable, text: str, kept: object = None) -> tuple[int, int]:
        if texts.full:
            # Another text loses its place now: nothing may name it by that any more.
            self._calls.clear()
            self._siteless.clear()
        return texts.add(self._buffer, self._words, key, text, kept)


_open_boxes: WeakSet[Box] = WeakSet()


def _leave_to_parent() -> None:
    """In a child made by fork: the box stays its parent's, whatever the child calls."""
    for box in list(_open_boxes):
        box._detach()


os.register_at_fork(after_in_child=_leave_to_parent)


def open_box(
    path: Path | None,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    node: int,
    host: str,
    pid: int,
    attempt: str = "",
    device: str = "",
) -> Box | NoBox:
    """The rank's box; where none can be made, a ``NoBox`` that says why."""
    if path is None:
        return NoBox()
    try:
        return Box.create(
            path,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            node=node,
            host=host,
            pid=pid,
            attempt=attempt,
            device=device,
        )
    except (OSError, ValueError, struct.error) as error:
        return NoBox(f"{path} could not be made ({error})")


def _fill(file: int, header: bytes) -> None:
    """Give the file its whole length on the disk now: a store into a page that has no room there ends the process."""
    data = memoryview(header.ljust(layout.SIZE, b"\0"))
    while data:
        data = data[os.write(file, data) :]
    # Some file systems only promise the room for what was written; not all systems can do this.
    with suppress(AttributeError):
        try:
            os.posix_fallocate(file, 0, layout.SIZE)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
