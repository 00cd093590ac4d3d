"""Where things stand in the file of a black box.

::

    header     who writes it, with a checksum; complete before the file has its name, never changed
    live       words of 8 bytes: collectives entered and left, step, recovering, phases and paces counted
    side       words of the reporter's thread
    phases     the latest phases          } the same record
    closing    how it ended, and the words
    raw        torch's own collective, twice: the older one stays whole while the newer one is written
    events     the latest collectives     }
    pace       the latest steps' times
    texts      names, sites, signatures: in each table the newest take the places of the oldest

Reader and writer share no lock. What keeps a reader from believing half a record:

- What is more than one word ends with its *check*, a hash of all its words. On other processors than x86 a reader may
  see the words of a record in any order, each old or new: of no such mixture the check is right, so it is not believed,
  but read again (``tests/unit/blackbox/test_torn.py`` shows each).
- A *stamp* is ``generation << 40 | number``: one word says both, and which collective a record is of.
- Words are written and read as a whole, since the formats are native ("@"); the portable ones go byte by byte.
- A text carries the 64-bit hash that the records name it by. A place that has been given to another text since is
  noticed. A line is a hash and a place, so that half of one names no text.
- What stands in a word of its own may be seen late, never wrong: all readers take what they find for a moment that is
  past already.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

VERSION = 5
"""Changes with the layout: a reader does not touch a box of another version."""
WORD = 8
NUMBER_BITS = 40
NUMBER_MASK = (1 << NUMBER_BITS) - 1

ANY = 1
"""The signature hash of an operation whose arguments may differ. Not 0: no field of a whole record is."""
NOWHERE = 0xFFFF
"""The place of a text that is empty or that was not asked for."""
STEPS = 0xFFFE
"""The place of a signature that is not a text but a number of optimizer steps, which stands where its hash would."""
OPTIMIZER_STEPS = "optimizer steps"
"""Such a signature, as it is passed to ``Box.enter``."""

# ---------------------------------------------------------------- records

RECORD = struct.Struct("@QQQQHHHHdQ")
"""Stamp, hashes of name, signature and site, their places, flag, seconds, step + 1. The check follows."""
CALL = struct.Struct("@QQQHHHH")
"""The part of a record that is the same each time: hashes to flag."""
RECORD_OF_CALL = struct.Struct("@Q32sdQ")
"""A record whose constant part was packed before: fewer objects to fetch from cold memory."""
CHECKED_RECORD = struct.Struct(f"@{RECORD.size}sQ")
"""A record and its check."""
RECORD_SIZE = 64
"""As long as a line of the processor's cache."""
RECORD_WORDS = RECORD_SIZE // WORD
NAME_WORD, SIGNATURE_WORD, CHECK_WORD = 1, 2, 7
"""Words of a record that peers compare without decoding it."""
FLAG_BYTE, PLAIN, REFUSED = 38, 1, 2

RAW = struct.Struct("@qqdIIII")
"""1 when there is one, its number, seconds, the texts' lengths; the texts follow. Before it stands the version, and
last in the place the check of all that."""
RAW_ROOM = {"name": 128, "site": 352, "shapes": 352, "group": 96}

PACE = struct.Struct("@6fQ")
"""A step's times, and the check of these and the step's number."""
NUMBERED_PACE = struct.Struct("@Q6f")

# ---------------------------------------------------------------- places

HEADER = 0
HEADER_SIZE = 1024
LIVE = 1024
SIDE = LIVE + 64
TRAINING = SIDE + 64
PHASES, PHASE_SLOTS = 1280, 4
CLOSING, CLOSING_ROOM = 1536, 488
"""How it ended: a code, the length of the words, the check of both and of the words, the words."""
RAWS, RAW_SIZE, RAW_SLOTS = 2048, 1024, 2
EVENTS, EVENT_SLOTS = 4096, 256
PACES, PACE_SLOTS = EVENTS + EVENT_SLOTS * RECORD_SIZE, 64
TEXTS = PACES + PACE_SLOTS * PACE.size

# Words of the live and side parts.
ENTERED, LEFT, STEP, RECOVERING, PHASE_COUNT, PACE_COUNT = range(LIVE // WORD, LIVE // WORD + 6)
BEAT = SIDE // WORD
# Of the training: where the optimizer stepped last; where the model was called last, and whether its backward is still
# to come: then the call's hash; how many calls got none, at which update the first of them, and where, with a check.
# A line is a hash and a place.
STEPPED, CALLED, PENDING, SKIPPED, SKIPPED_STEP, SKIPPED_AT, SKIPPED_CHECK = (
    TRAINING // WORD + word for word in (0, 2, 4, 5, 6, 7, 9)
)
EVENT_WORDS = EVENTS // WORD

ASKED_TO_END = "asked to end"
STOPPED = "stopped by the guard"
CLOSED = {0: "", 1: "finished", 2: "failed", 3: ASKED_TO_END, 4: STOPPED}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts: where it begins, how many there are, how long one may be."""

    start: int
    """Its first byte."""
    slots: int
    """Texts in it."""
    size: int
    """Bytes of a place: hash, length, text, check."""
    keep_end: bool = False
    """Whether a text that is too long loses its beginning: a path does."""

    @property
    def room(self) -> int:
        """Bytes that a text may have."""
        return self.size - 3 * WORD

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.slots * self.size


NAMES = Table(start=TEXTS, slots=128, size=128)
SITES = Table(start=NAMES.end, slots=128, size=384, keep_end=True)
SIGNATURES = Table(start=SITES.end, slots=256, size=344)
SIZE = -(-SIGNATURES.end // 4096) * 4096
"""Of the whole file."""

# ---------------------------------------------------------------- the header

_MAGIC = b"LOCKSTEP"
_FIELDS = struct.Struct("@8sIIqqqqqQ64s256s256s32s")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Who writes a box."""

    rank: int
    """Which rank."""
    world_size: int
    """Of how many."""
    local_rank: int
    """Its number on its machine."""
    node: int
    """Its machine's number."""
    host: str
    """Its machine's name."""
    pid: int
    """Its process."""
    started: int
    """When that process started, in the kernel's ticks: with the number it names one process, not its successor."""
    machine: str
    """Where the process number means this process: see ``this_machine``."""
    attempt: str
    """Which start of the job: boxes of another one are none of its peers'."""
    device: str = ""
    """What it computes on."""

    def pack(self) -> bytes:
        """The first bytes of the file."""
        fields = _FIELDS.pack(
            _MAGIC,
            VERSION,
            SIZE,
            self.rank,
            self.world_size,
            self.local_rank,
            self.node,
            self.pid,
            self.started,
            *(text.encode(errors="replace")[:room] for text, room in self._texts()),
        )
        return fields + struct.pack("@Q", zlib.crc32(fields))

    def _texts(self) -> Sequence[tuple[str, int]]:
        return (self.machine, 64), (self.host, 256), (self.attempt, 256), (self.device, 32)

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """The header in a file's first bytes; None when that is no box, or one of another version."""
        if len(data) < HEADER_SIZE or not data.startswith(_MAGIC):
            return None
        fields = data[: _FIELDS.size]
        _, version, size, *numbers, machine, host, attempt, device = _FIELDS.unpack(fields)
        (check,) = struct.unpack_from("@Q", data, _FIELDS.size)
        if version != VERSION or size != SIZE or check != zlib.crc32(fields):
            return None
        texts = [text.rstrip(b"\0").decode(errors="ignore") for text in (machine, host, attempt, device)]
        rank, world_size, local_rank, node, pid, started = numbers
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            node=node,
            pid=pid,
            started=started,
            machine=texts[0],
            host=texts[1],
            attempt=texts[2],
            device=texts[3],
        )


def this_machine() -> str:
    """A text that is equal where process numbers and the monotonic clock mean the same."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts) or os.uname().nodename


# ---------------------------------------------------------------- texts


check_of = xxhash.xxh3_64_intdigest
"""The check of some bytes: of a mixture of old and new words it is wrong, but for one in 2**64."""


def check_of_words(*words: int) -> int:
    """The check of some words."""
    return check_of(struct.pack(f"@{len(words)}Q", *words))


def steps_word(count: int) -> int:
    """A number of steps as the signature of a record: never 0, ``ANY``, or the hash of a text."""
    return count + 1 << 2


def hash_text(text: str) -> int:
    """64 bits that are the same in every process, and never 0 or ``ANY``."""
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 2


def spell(signature: object) -> str:
    """A signature as text; keys that are equal in a dict (2 and 2.0, a torch.Size and a tuple) give equal texts.

    Devices are left out: each rank has its own.
    """
    if isinstance(signature, (tuple, list)):
        return ", ".join(_spell(part) for part in signature if type(part).__name__ != "device")
    return _spell(signature)


def _spell(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, type):
        return part.__name__
    if isinstance(part, (tuple, list)):
        return f"[{', '.join(map(_spell, part))}]"
    if isinstance(part, (int, float)):
        with suppress(ValueError, OverflowError):
            if part == int(part):
                return str(int(part))
    return str(part).removeprefix("torch.")


def fit(text: str, mark: int, table: Table) -> bytes:
    """The text's bytes for its place. One that is too long is cut and carries its hash, so that it equals no other."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= table.room:
        return data
    if table.keep_end:
        return ("…" + data[len(data) - table.room + 3 :].decode(errors="ignore")).encode()
    end = f"… #{mark:016x}".encode()
    return data[: table.room - len(end)].decode(errors="ignore").encode() + end
