"""Reading a file and hashing it at once: what is loaded is what was verified, and each byte is fetched once."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from lockstep.checkpoint.hashing import BLOCK, Digests, pool

_SMALL = 1 << 16
"""Reads up to this size, as of an archive's directory, come in any order; they are hashed when their turn comes."""


class FileOnce:
    """A file for ``torch.load`` to read from. Large reads are hashed in another thread while the next are made."""

    def __init__(self, path: Path, chunk: int) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size
        self._thread = pool()  # its own: behind others' work the reader would wait
        self._digests = Digests(chunk)
        self._place = 0
        self._hashed = 0
        """Bytes from the beginning that are hashed, or on their way to be."""
        self._under_way: Future[None] | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        """As of any file."""
        return self._place

    def read(self, size: int = -1) -> bytes:
        """As of any file."""
        data = bytearray(max(0, self._size - self._place) if size < 0 else size)
        return bytes(memoryview(data)[: self.readinto(data)])

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """As of any file."""
        target = memoryview(buffer).cast("B")
        hashing = len(target) > _SMALL and self._place >= self._hashed
        if hashing:
            self._hash_up_to(self._place)
        done = 0
        while done < len(target):
            piece = target[done : done + BLOCK]
            got = os.preadv(self._file, [piece], self._place)
            if not got:
                break
            if hashing:
                self._hash(piece[:got])
            done += got
            self._place += got
        self._wait()  # the buffer is the caller's again
        return done

    def finish(self) -> tuple[str, ...]:
        """The hashes of the file's chunks."""
        self._hash_up_to(self._size)
        self._wait()
        return self._digests.finish()

    def close(self) -> None:
        """Let go of it."""
        self._thread.shutdown()
        os.close(self._file)

    def __enter__(self) -> FileOnce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hash_up_to(self, place: int) -> None:
        """Fetch and hash what nobody has read yet."""
        while self._hashed < place:
            data = os.pread(self._file, min(BLOCK, place - self._hashed), self._hashed)
            if not data:
                return  # it has become shorter: its hashes will tell
            self._hash(memoryview(data))

    def _hash(self, data: memoryview) -> None:
        self._wait()  # in order
        self._hashed += len(data)
        self._under_way = self._thread.submit(self._digests.update, data)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
