"""The directory of an archive that ``torch.save`` has written: read whole and checked before torch opens the file.

Torch believes an archive: a compressed record may be a thousand times its size in memory, two records may share their
bytes. What torch writes is plain: records one after the other, none compressed, no name twice, nothing behind the end.
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import CheckpointError

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_LARGEST_DIRECTORY = 1 << 26
"""Bytes; half a million records."""
_BLOCK = 1 << 20


class ArchiveRecord(NamedTuple):
    """One record."""

    name: str
    header: int
    """Where its header begins, in bytes from the start of the file."""
    size: int
    checksum: int


class Archive:
    """The records of an opened file; CheckpointError when they are not laid out as torch does it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path
        self._size = os.fstat(descriptor).st_size
        start, length, count = self._find_directory()
        directory = os.pread(descriptor, length, start)
        if len(directory) != length:
            raise self._bad("it has become shorter while it was read")
        self.records = sorted(self._parse(directory, count), key=lambda record: record.header)
        """In the order of the file."""
        self._headers = [record.header for record in self.records]
        self._ends = [*self._headers[1:], start]
        for record, end in zip(self.records, self._ends, strict=True):
            if record.header + _LOCAL.size + len(record.name.encode("utf-8", "surrogateescape")) + record.size > end:
                raise self._bad(f"its record {record.name[:200]!r} does not end before the next one begins")

    def holds(self, start: int, size: int) -> bool:
        """Whether these bytes belong to one record."""
        number = bisect_right(self._headers, start) - 1
        return number >= 0 and start + size <= self._ends[number] and size <= self.records[number].size

    def read(self, record: ArchiveRecord) -> bytes:
        """The bytes of a record."""
        return b"".join(self._blocks(record))

    def check_sums(self) -> None:
        """Compare each record with its checksum, at which torch does not look."""
        for record in self.records:
            found = 0
            for block in self._blocks(record):
                found = zlib.crc32(block, found)
            if found != record.checksum:
                raise self._bad(
                    f"the checksum of {record.name} does not hold (nor would it, if the file was written with "
                    "torch.serialization.set_crc32_options(False))"
                )

    def _blocks(self, record: ArchiveRecord) -> Iterator[bytes]:
        header = os.pread(self._descriptor, _LOCAL.size, record.header)
        if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
            raise self._bad(f"its record {record.name[:200]!r} has no header")
        *_, name, extra = _LOCAL.unpack(header)
        place = record.header + _LOCAL.size + name + extra
        end = place + record.size
        if not self.holds(place, record.size):
            raise self._bad(f"its record {record.name[:200]!r} does not end before the next one begins")
        while place < end:
            block = os.pread(self._descriptor, min(_BLOCK, end - place), place)
            if not block:
                raise self._bad("it has become shorter while it was read")
            yield block
            place += len(block)

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the directory begins, how long it is, and how many records it has."""
        end = self._size - _END.size
        tail = os.pread(self._descriptor, _END.size, end) if end >= 0 else b""
        if tail[:4] != b"PK\5\6":
            raise self._bad("it is cut off, or something follows its end")
        _, disk, first, here, count, length, start, _ = _END.unpack(tail)
        if end >= _LOCATOR.size:
            locator = os.pread(self._descriptor, _LOCATOR.size, end - _LOCATOR.size)
            if locator[:4] == b"PK\6\7":
                at = end - _LOCATOR.size - _END_64.size
                wide = os.pread(self._descriptor, _END_64.size, at) if at >= 0 else b""
                if wide[:4] != b"PK\6\6" or _LOCATOR.unpack(locator)[2] != at:
                    raise self._bad("its end is not where it says")
                _, _, _, _, disk, first, here, count, length, start = _END_64.unpack(wide)
                end = at
        if disk or first or here != count:
            raise self._bad("it is a part of an archive in several files")
        if start + length != end or length > _LARGEST_DIRECTORY or count * _ENTRY.size > length:
            raise self._bad("its directory is not where it says")
        return start, length, count

    def _parse(self, directory: bytes, count: int) -> Iterator[ArchiveRecord]:
        place, names = 0, set[str]()
        for _ in range(count):
            if place + _ENTRY.size > len(directory):
                raise self._bad("its directory is cut off")
            sign, _, _, flags, method, _, _, checksum, stored, size, name, extra, comment, _, _, _, header = (
                _ENTRY.unpack_from(directory, place)
            )
            if sign != b"PK\1\2":
                raise self._bad("its directory is cut off")
            place += _ENTRY.size
            text = directory[place : place + name].decode("utf-8", "surrogateescape")
            if _FULL_32 in (size, stored, header):
                more = directory[place + name : place + name + extra]
                size, stored, header = self._wide(more, size, stored, header)
            place += name + extra + comment
            if method or stored != size or flags & 1:
                raise self._bad(f"its record {text[:200]!r} is compressed or encrypted, which torch does not write")
            names.add(text)
            yield ArchiveRecord(text, header, size, checksum)
        if place != len(directory) or len(names) != count:
            raise self._bad("its directory has a name twice, or more in it than records")

    def _wide(self, extra: bytes, *narrow: int) -> list[int]:
        """Numbers that do not fit into 32 bits are in a field of their own."""
        while len(extra) >= 4:
            kind, length = struct.unpack_from("<2H", extra)
            field, extra = extra[4 : 4 + length], extra[4 + length :]
            if kind == 1:
                numbers = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
                return [next(numbers, value) if value == _FULL_32 else value for value in narrow]
        return list(narrow)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {what}.")


def is_archive(descriptor: int) -> bool:
    """Whether a file begins like one: those of torch before 1.6 do not."""
    return os.pread(descriptor, 4, 0) == b"PK\3\4"
