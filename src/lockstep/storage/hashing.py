"""Hashes of files, taken while their bytes are written, and compared when they are read.

A file is hashed in chunks, so that several threads, or several ranks, can share the work of verifying it.

XXH3 with 128 bits keeps up with memory, and lets go of the interpreter's lock; SHA-256 would take longer than all the
rest of a save. While a file is written it adds a seventh to the processor's time, as much as a second thread would
cost. It is meant to find damage, not forgery: whoever can change files can change the manifest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from lockstep.storage.disk import Disk
from lockstep.storage.open_files import open_regular

ALGORITHM = "xxh3-128"
"""What checkpoints are hashed with; the only one that this release knows."""
CHUNK = 1 << 24
_SMALL = 1 << 16
"""Up to this many bytes are collected before they are written: a call of the system, or of a thread, costs more."""
BLOCK = 1 << 22
"""Bytes that are hashed and written, or read and hashed, at a time. With less, threads spend their time waiting for the
interpreter's lock; with more, the buffers to read into cost memory."""
_AHEAD = 1 << 26
"""Bytes after which the system is told to begin writing them to the medium."""


class Digests:
    """The hashes of a stream's chunks."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._hash = xxhash.xxh3_128()
        self._filled = 0
        self.size = 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """The next bytes of the stream."""
        while data:
            part = data[: self._chunk - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            self.size += len(part)
            data = data[len(part) :]
            if self._filled == self._chunk:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """The hashes, in order; one of nothing for an empty stream."""
        if self._filled or not self._done:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash = xxhash.xxh3_128()
        self._filled = 0


class HashedFile:
    """A new binary file that hashes what is written to it. It gives ``size`` and ``chunks`` once it is closed."""

    def __init__(
        self,
        path: Path,
        disk: Disk,
        *,
        durable: bool = True,
        moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.path = path
        self.error: OSError | None = None
        """What writing failed with: whoever calls ``write`` may make another error of it."""
        self.chunks: tuple[str, ...] = ()
        self._disk, self._durable, self._moved = disk, durable, moved
        self._digests = Digests()
        self._reported = self._started = 0
        self._collected = bytearray()
        self._given_up = False
        self._file = disk.open(path)

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._digests.size + len(self._collected)

    def write(self, data: Any) -> int:
        """Write all of it. The data may be used again when this returns."""
        view = memoryview(data).cast("B")
        if len(view) + len(self._collected) <= _SMALL:
            self._collected += view
            return len(view)
        self.flush()
        if len(view) <= _SMALL:
            self._collected += view
        else:
            self._pass_on(view)
        return len(view)

    def flush(self) -> None:
        """Write what was collected."""
        if self._collected:
            collected, self._collected = self._collected, bytearray()
            self._pass_on(memoryview(collected))

    def _pass_on(self, view: memoryview) -> None:
        """Hash and write, in parts: what was hashed is in the cache when it is written."""
        for start in range(0, len(view), BLOCK):
            part = view[start : start + BLOCK]
            self._digests.update(part)
            try:
                self._write_all(part)
            except OSError as error:
                self.error = error
                raise
            self._take()

    def _write_all(self, view: memoryview) -> None:
        while view:
            view = view[self._disk.write(self._file, view) :]

    def _take(self) -> None:
        size = self._digests.size
        if self._durable and size - self._started >= _AHEAD:
            self._disk.start_writing(self._file, self._started, size - self._started)
            self._started = size
        self._moved(size - self._reported)
        self._reported = size

    def close(self) -> None:
        """Bring the file to the medium, and close it."""
        if self._file < 0:
            return
        try:
            if not self._given_up:
                self.flush()
                if self._durable:
                    self._disk.fsync(self._file)
        except OSError as error:
            self.error = error
            raise
        finally:
            os.close(self._file)
            self._file = -1
        self.chunks = self._digests.finish()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given_up = kind is not None
        self.close()


_buffers = threading.local()


def _buffer(size: int) -> memoryview:
    """Memory to read into, the same for each chunk that a thread hashes: new memory costs more than reading does."""
    data = getattr(_buffers, "data", b"")
    if len(data) < size:
        data = _buffers.data = bytearray(size)
    return memoryview(data)[:size]


def hash_chunk(descriptor: int, number: int, chunk: int = CHUNK) -> str:
    """The hash of one chunk of an opened file, as it is on the disk now."""
    digests = Digests(chunk)
    place, end = number * chunk, (number + 1) * chunk
    buffer = _buffer(min(BLOCK, max(0, min(end, os.fstat(descriptor).st_size) - place)))
    while place < end and buffer:
        got = os.preadv(descriptor, [buffer[: end - place]], place)
        if not got:
            break
        digests.update(buffer[:got])
        place += got
    return digests.finish()[0]


def hash_file(path: Path, chunk: int = CHUNK) -> tuple[int, tuple[str, ...]]:
    """Size and hashes of a file that somebody else has written."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        return size, tuple(hash_chunk(descriptor, number, chunk) for number in range(count_chunks(size, chunk)))
    finally:
        os.close(descriptor)


def count_chunks(size: int, chunk: int = CHUNK) -> int:
    """Chunks of a file of so many bytes; an empty file has one, of nothing."""
    return max(1, -(-size // chunk))


def pool(threads: int = 1) -> ThreadPoolExecutor:
    """Threads to hash in."""
    return ThreadPoolExecutor(threads, thread_name_prefix="lockstep-hash")


Chunk = tuple[str, int]
"""A file's name, and the number of a chunk in it."""


def share(chunks: Sequence[Chunk], part: int, parts: int) -> Sequence[Chunk]:
    """What one of several workers hashes."""
    return chunks[part::parts]
