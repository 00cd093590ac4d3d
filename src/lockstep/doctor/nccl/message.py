"""One line of a log, taken apart: who wrote it, at which level, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NCCL = re.compile(
    r"(?P<host>[^\s:\[\]<>()]+):(?P<pid>\d+):(?P<thread>\d+) \[(?P<device>-?\d+)\] "
    r"(?:(?P<place>\S+:\d+) )?(?:NCCL )?(?P<level>INFO|WARN|TRACE|ABORT|ERROR) ?(?P<text>.*)"
)
_RANK = re.compile(r"\[rank(\d+)\]|\[Rank (\d+)\]|\[PG [^\]]*?Rank (\d+)\]|aborted on rank (\d+)")
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HINTS = (
    *(b"NCCL", b"nccl", b"c10d", b"socket has", b" WARN ", b"atchdog", b"destroy_process_group", b"Last error:"),
    *(b"CUDA out of memory", b"CUDA error: "),
)
"""What a line that matters has in it."""
_INFO = b" NCCL INFO "
_LONGEST_PID = 20


@dataclass(frozen=True, kw_only=True)
class Message:
    """A line that says something about NCCL."""

    text: str
    """What it says, without the part that names its writer."""
    whole: str
    level: str = ""
    """ "INFO", "WARN", …; empty for a line that is not NCCL's own."""
    host: str = ""
    """The machine that NCCL names."""
    pid: int = 0
    """The process there."""
    thread: int = 0
    """The thread in it."""
    device: int = -1
    """The GPU, by the process's numbering."""
    place: str = ""
    """The file and line in NCCL's source."""
    rank: int | None = None
    """The rank, where torch names it in the line."""
    time: str = ""
    """The time that stands at its beginning, where one does."""


def parse(raw: bytes) -> Message:
    """Take a line apart; one that is not NCCL's own has no level."""
    whole = raw.replace(b"\0", b"").decode("utf-8", "replace").strip()
    if "\x1b" in whole:
        whole = _COLOUR.sub("", whole)
    found = _NCCL.search(whole)
    if found is None or len(found["pid"]) > _LONGEST_PID or len(found["thread"]) > _LONGEST_PID:
        named = _RANK.search(whole)
        rank = next((int(number) for number in named.groups() if number), None) if named else None
        return Message(text=whole, whole=whole, rank=rank, time=_time(whole))
    return Message(
        text=found["text"],
        whole=whole,
        level=found["level"],
        host=found["host"],
        pid=int(found["pid"]),
        thread=int(found["thread"]),
        device=int(found["device"][:_LONGEST_PID]),
        place=found["place"] or "",
        time="" if _INFO in raw else _time(whole),
    )


def _time(whole: str) -> str:
    found = _TIME.search(whole, 0, 200)
    return found[1].replace("T", " ") if found else ""
