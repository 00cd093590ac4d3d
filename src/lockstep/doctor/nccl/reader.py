"""Reading logs of any size, line by line, in constant memory.

No more than `LIMIT` bytes of a line are held at a time: a longer one (a progress bar that was written into a file, a
dump of a tensor) comes in pieces that carry the same number.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.rundir.regular_file import open_regular

LIMIT = 8192
"""Bytes of a line that are looked at together."""
STDIN = "-"
"""Stands for what is piped in."""

_HEAD = 4096
_BLOCK = 1 << 17
_STRANGE = 0.1
"""Share of bytes that are in no text from which on a file is none. Colours and single bad letters stay far below."""
_PACKED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"BZh91AY": "bzcat", b"\xfd7zXZ": "xzcat"}
_CONTROL = bytes(set(range(32)) - {7, 8, 9, 10, 12, 13, 27}) + b"\x7f"

Progress = Callable[[int], None]
"""Is told how many bytes were read since the last time."""


class UnreadableLog(Exception):
    """A log that cannot be read; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """One log."""

    name: str
    """As it is shown."""
    path: Path | None
    """The file; None for what is piped in."""
    asked_for: bool = True
    """Whether it was named, and not only stands in a folder that was."""
    below: Path | None = None
    """The folder that it must lie in, without a link on the way."""

    def lines(self, progress: Progress | None = None, hints: Sequence[bytes] = ()) -> Iterator[tuple[int, bytes]]:
        """Number and text of each line, without its end; of a very long one in pieces. Raises `UnreadableLog`.

        With ``hints``, only lines that have one of them in it, and those that such a line announces by a colon.
        """
        try:
            with self._open() as stream:
                yield from _lines(stream, self.name, progress, hints)
        except OSError as error:
            raise UnreadableLog(f"{self.name} cannot be read ({error.strerror or error}).") from None

    def _open(self) -> BinaryIO:
        if self.path is None:
            # Not closed with the last line: it is not ours.
            return open(sys.stdin.fileno(), "rb", buffering=_BLOCK, closefd=False)
        # One that was named may be a pipe (`<(zcat log.gz)`); of a folder's, a pipe would keep us waiting for ever.
        if self.below is not None:
            return open_regular(self.path, self.below)
        return open(self.path, "rb", buffering=_BLOCK)

    def size(self) -> int | None:
        """Its bytes; None when they are not known beforehand, as of a pipe."""
        try:
            about = os.stat(self.path if self.path is not None else sys.stdin.fileno())
        except (OSError, ValueError):
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None


def logs_of(named: str) -> list[Log]:
    """What a word of the command line means: a file, ``-``, or a folder, of which all files that could be logs."""
    if named == STDIN:
        return [Log(name="what is piped in", path=None)]
    path = Path(named)
    if not path.is_dir():
        return [Log(name=named, path=path)]
    # A run directory has NCCL's files in one folder and what the ranks printed in another, restarts below that.
    found = [*path.glob("nccl/*"), *path.glob("logs/**/rank_*.out"), *path.glob("logs/**/rank_*.err")]
    files = sorted(file for file in found or path.iterdir() if file.is_file())
    if not files:
        raise UnreadableLog(f"{named} is a folder without files. Name a log, or the run directory of a job.")
    return [Log(name=str(file), path=file, asked_for=False) for file in files]


def _lines(
    stream: BinaryIO, name: str, progress: Progress | None, hints: Sequence[bytes]
) -> Iterator[tuple[int, bytes]]:
    number, rest, announced, first = 1, b"", False, True
    while block := stream.read(_BLOCK):
        if first:
            _require_text(block, name)
            first = False
        if progress is not None:
            progress(len(block))
        block = rest + block
        end = block.rfind(b"\n") + 1
        if end == 0 and len(block) > LIMIT:
            # No end in sight: what is there is a piece of a line that goes on.
            end = len(block)
        body, rest = block[:end], block[end:]
        if not announced and not _has(body, hints):
            number += body.count(b"\n")
            continue
        for line, closed in _cut(body):
            if announced or _has(line, hints):
                yield from ((number, piece) for piece in _pieces(line))
            if closed:
                # What such a line announces stands in the next one.
                announced = bool(hints) and line.rstrip().endswith(b":") and _has(line, hints)
                number += 1
    if rest and (announced or _has(rest, hints)):
        yield from ((number, piece) for piece in _pieces(rest.rstrip(b"\r")))


def _has(text: bytes, hints: Sequence[bytes]) -> bool:
    return not hints or any(hint in text for hint in hints)


def _cut(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """The lines of a text, and whether each has an end."""
    lines = body.split(b"\n")
    last = lines.pop()
    yield from ((line.removesuffix(b"\r"), True) for line in lines)
    if last:
        yield last, False


def _pieces(line: bytes) -> Iterator[bytes]:
    yield line[:LIMIT]
    yield from (line[start : start + LIMIT] for start in range(LIMIT, len(line), LIMIT))


def _require_text(block: bytes, name: str) -> None:
    """Refuse what is no text, by its beginning."""
    head = block[:_HEAD]
    for magic, command in _PACKED.items():
        if head.startswith(magic):
            raise UnreadableLog(
                f"{name} is compressed. Unpack it on the way: {command} {name} | lockstep doctor nccl -"
            )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableLog(
            f"{name} is UTF-16 text. Convert it on the way: iconv -f utf-16 -t utf-8 {name} | lockstep doctor nccl -"
        )
    strange = len(head) - len(head.translate(None, _CONTROL).decode("utf-8", "ignore").encode())
    if head and strange > _STRANGE * len(head):
        raise UnreadableLog(f"{name} is a binary file, no log. Name the text that NCCL or the job wrote.")
