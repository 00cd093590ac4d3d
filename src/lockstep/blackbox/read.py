"""Reading black boxes: while the rank writes, and after it has died.

Read with ``pread``, not mapped: a file that somebody cuts short while it is mapped would end the reader.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from lockstep.blackbox import layout, processes
from lockstep.blackbox.layout import Header, Table
from lockstep.blackbox.snapshot import Op, Raw, Snapshot, Step

HISTORY = 64
"""Collectives that a snapshot holds unless told otherwise; the box itself holds ``layout.EVENT_SLOTS``."""
PATTERN = "rank_*.box"
_TRIES = 20
_word = struct.Struct("@Q")
_double = struct.Struct("@d")


def read_box(path: Path, history: int = HISTORY) -> Snapshot | None:
    """What a box says; None when there is none, or it is no box of this version. ``alive`` is not looked at."""
    found = _read(path, history)
    return found[1] if found is not None else None


def read_all(folder: Path, alive: bool = True, history: int = HISTORY) -> list[Snapshot]:
    """All boxes of a folder, by rank; with ``alive``, those of this machine say whether the process lives."""
    machine = layout.this_machine()
    snapshots = []
    for path in folder.glob(PATTERN):
        found = _read(path, history)
        if found is None:
            continue
        header, snapshot = found
        if alive and header.machine == machine:
            life = processes.find_process(header.pid, header.started)
            if not life.alive:
                # What it wrote between the first look and its end is there now.
                header, snapshot = _read(path, history) or found
            snapshot = replace(snapshot, alive=life.alive, paused=life.paused)
        snapshots.append(snapshot)
    return sorted(snapshots, key=lambda snapshot: snapshot.rank)


def read_header(path: Path) -> Header | None:
    """Who writes a box."""
    try:
        file = _open(path)
    except OSError:
        return None
    try:
        return Header.unpack(os.pread(file, layout.HEADER_SIZE, 0))
    except OSError:
        return None
    finally:
        os.close(file)


# ---------------------------------------------------------------- one box


def _open(path: Path) -> int:
    """Open a file for reading; OSError unless it is one of a box's size. A pipe of that name does not block."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size != layout.SIZE:
            raise OSError(f"{path} is no black box")
    except OSError:
        os.close(file)
        raise
    return file


def _read(path: Path, history: int) -> tuple[Header, Snapshot] | None:
    try:
        file = _open(path)
    except (OSError, ValueError):
        return None
    try:
        snapshot = None
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(0)  # on one core the writer needs its turn
            snapshot = _read_once(file, history, final=attempt == _TRIES - 1)
            if snapshot is not None:
                break
        return snapshot
    except OSError:
        return None
    finally:
        os.close(file)


def _read_once(file: int, history: int, final: bool) -> tuple[Header, Snapshot] | None:
    """One look; None when it has to be repeated, unless it is the final one, or when this is no box."""
    # Entered before left: if the rank leaves in between, it looks as if it had left just now.
    (entered,) = _word.unpack(_exactly(file, 8, layout.ENTERED * 8))
    (left,) = _word.unpack(_exactly(file, 8, layout.LEFT * 8))
    data = _exactly(file, layout.SIZE, 0)
    header = Header.unpack(data)
    if header is None:
        raise OSError("no box")
    generation, number = entered >> layout.NUMBER_BITS, entered & layout.NUMBER_MASK
    done = min(left & layout.NUMBER_MASK, number)
    if left >> layout.NUMBER_BITS != generation:
        # Seen while the generation changes, whichever of the two words came first.
        generation, number, done = max(generation, left >> layout.NUMBER_BITS), 0, 0
    past = _past(data, generation, number, history)
    inside = number > done
    skipped, skipped_step = _skipped(data)
    if not final and (_is_torn(data) or (inside and (not past or past[-1].seq != number))):
        return None  # half written; or the rank has gone on meanwhile, so far that its ring came round
    inside = inside and bool(past) and past[-1].seq == number
    phase, place, since = _phase(data)
    code, words = _closing(data)
    texts = _Texts(data)
    (beat,) = _double.unpack_from(data, layout.BEAT * 8)
    return header, Snapshot(
        rank=header.rank,
        world_size=header.world_size,
        local_rank=header.local_rank,
        node=header.node,
        host=header.host,
        pid=header.pid,
        device=header.device,
        attempt=header.attempt,
        closed=code,
        words=words,
        generation=generation,
        recovering=bool(_at(data, layout.RECOVERING)),
        entered=number,
        left=number if not inside else done,
        op=past[-1] if inside else None,
        phase=phase,
        phase_site=place,
        phase_since=since,
        step=_at(data, layout.STEP),
        stepped_at=_line(texts, layout.STEPPED),
        skipped=skipped,
        skipped_step=skipped_step,
        skipped_at=_line(texts, layout.SKIPPED_AT) if skipped else "",
        pending_at=_line(texts, layout.CALLED) if _at(data, layout.PENDING) == _at(data, layout.CALLED) else "",
        raw=_raw(data),
        history=past,
        beat=beat,
        pace=_pace(data),
        now=time.monotonic(),
    )


def _exactly(file: int, size: int, start: int) -> bytes:
    data = os.pread(file, size, start)
    if len(data) != size:
        raise OSError("the file has become shorter")
    return data


def _at(data: bytes, word: int) -> int:
    return int(_word.unpack_from(data, word * layout.WORD)[0])


# ---------------------------------------------------------------- its parts


def _past(data: bytes, generation: int, number: int, history: int) -> tuple[Op, ...]:
    """The latest collectives up to this number, oldest first: without a gap, and only those that are whole."""
    return tuple(islice(_backwards(_Texts(data), generation, number), max(history, 1)))[::-1]


def _backwards(texts: _Texts, generation: int, number: int) -> Iterator[Op]:
    for seq in range(number, max(number - layout.EVENT_SLOTS, 0), -1):
        slot = layout.EVENTS + seq % layout.EVENT_SLOTS * layout.RECORD_SIZE
        op = _record(texts, slot, generation << layout.NUMBER_BITS | seq)
        if op is None:
            return
        yield op


def _record(texts: _Texts, slot: int, stamp: int) -> Op | None:
    record, check = layout.CHECKED_RECORD.unpack_from(texts.data, slot)
    fields = layout.RECORD.unpack(record)
    if fields[0] != stamp or check != layout.check_of(record):
        return None
    _, name_hash, signature_hash, site_hash, name_place, signature_place, site_place, flag, since, counts = fields
    name = texts.find(layout.NAMES, name_place, name_hash)
    if name is None:
        return None
    # A signature whose text is lost counts as one that may differ: better not compared than compared wrongly.
    return Op(
        seq=stamp & layout.NUMBER_MASK,
        name=name,
        signature=_steps(signature_hash)
        if signature_place == layout.STEPS
        else texts.find(layout.SIGNATURES, signature_place, signature_hash) or "",
        site=texts.find(layout.SITES, site_place, site_hash) or "",
        since=since,
        refused=flag == layout.REFUSED,
        batch=counts >> 32,
    )


def _steps(word: int) -> str:
    count = (word >> 2) - 1
    return f"after {count} optimizer step{'s' * (count != 1)}"


class _Texts:
    """The texts in a copy of a box; most are asked for many times."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._found: dict[tuple[int, int], str | None] = {}

    def find(self, table: Table, place: int, mark: int) -> str | None:
        """The text with this hash; None when its place holds another one by now."""
        if place == layout.NOWHERE:
            return ""
        start = table.start + (place - 1) * table.size
        key = start, mark
        if key not in self._found:
            self._found[key] = self._decode(table, start, mark) if 1 <= place <= table.slots else None
        return self._found[key]

    def _decode(self, table: Table, start: int, mark: int) -> str | None:
        first, length = struct.unpack_from("@QQ", self.data, start)
        (check,) = _word.unpack_from(self.data, start + table.size - layout.WORD)
        if first != mark or length > table.room:
            return None
        begin = start + 2 * layout.WORD
        data = self.data[begin : begin + length]
        whole = check == layout.check_of_words(mark, length) ^ layout.check_of(data)
        return data.decode(errors="replace") if whole else None


def _line(texts: _Texts, word: int) -> str:
    """A line that stands as hash and place."""
    mark, place = _at(texts.data, word), _at(texts.data, word + 1)
    return texts.find(layout.SITES, place, mark) or "" if mark else ""


def _phase(data: bytes) -> tuple[str, str, float]:
    """Name, site, and since when: of the newest phase that is whole."""
    count = _at(data, layout.PHASE_COUNT)
    # It may have gone on by one since the count was copied.
    for number in range(count + 1, max(count + 1 - layout.PHASE_SLOTS, 0), -1):
        slot = layout.PHASES + number % layout.PHASE_SLOTS * layout.RECORD_SIZE
        op = _record(_Texts(data), slot, number)
        if op is not None:
            return op.name, op.site, op.since
    return "", "", 0.0


def _raw(data: bytes) -> Raw | None:
    """Torch's own collective: of the two places, the newer one that is whole."""
    newest, found = 0, None
    for slot in range(layout.RAW_SLOTS):
        start = layout.RAWS + slot * layout.RAW_SIZE
        (version,) = _word.unpack_from(data, start)
        (check,) = _word.unpack_from(data, start + layout.RAW_SIZE - layout.WORD)
        whole = _raw_bytes(data, start + layout.WORD)
        if version > newest and whole and check == layout.check_of_words(version) ^ layout.check_of(whole):
            newest, found = version, _raw_at(data, start + layout.WORD)
    return found


def _raw_bytes(data: bytes, start: int) -> bytes | None:
    lengths = layout.RAW.unpack_from(data, start)[3:]
    if sum(lengths) > sum(layout.RAW_ROOM.values()):
        return None
    return data[start : start + layout.RAW.size + sum(lengths)]


def _raw_at(data: bytes, start: int) -> Raw | None:
    there, number, since, *lengths = layout.RAW.unpack_from(data, start)
    if not there:
        return None
    place = start + layout.RAW.size
    texts = {}
    for field, length in zip(layout.RAW_ROOM, lengths, strict=True):
        texts[field] = data[place : place + length].decode(errors="replace")
        place += length
    return Raw(number=number, since=since, **texts)


def _closing(data: bytes) -> tuple[str, str]:
    found = _closing_words(data)
    if found is None or found[0] not in layout.CLOSED:
        return "", ""
    return layout.CLOSED[found[0]], found[1].decode(errors="replace")


def _closing_words(data: bytes) -> tuple[int, bytes] | None:
    """Code and words; None as long as they are half written."""
    start = layout.CLOSING
    code, length, check = struct.unpack_from("@QQQ", data, start)
    begin = start + 3 * layout.WORD
    words = data[begin : begin + min(length, layout.CLOSING_ROOM)]
    return (code, words) if check == layout.check_of_words(code, length) ^ layout.check_of(words) else None


def _skipped(data: bytes) -> tuple[int, int]:
    """How many calls got no backward, and the update of the first of them."""
    first = struct.unpack_from("@3Q", data, layout.SKIPPED_STEP * layout.WORD)
    whole = _at(data, layout.SKIPPED_CHECK) == layout.check_of_words(*first)
    count = _at(data, layout.SKIPPED) if whole else 0
    return count, first[0] if count else 0


def _is_torn(data: bytes) -> bool:
    """Whether what is written once is half written."""
    return (_at(data, layout.CLOSING // layout.WORD) != 0 and _closing_words(data) is None) or (
        _at(data, layout.SKIPPED) != 0 and _skipped(data)[0] == 0
    )


def _pace(data: bytes) -> tuple[Step, ...]:
    """The latest steps, without those that are being written over."""
    count = _at(data, layout.PACE_COUNT)
    steps = []
    for number in range(max(count + 1 - layout.PACE_SLOTS, 0) + 1, count + 1):
        *times, check = layout.PACE.unpack_from(data, layout.PACES + number % layout.PACE_SLOTS * layout.PACE.size)
        if check == layout.check_of(layout.NUMBERED_PACE.pack(number, *times)):
            steps.append((times[0], times[1], times[2], times[3], times[4], times[5]))
    return tuple(steps)
