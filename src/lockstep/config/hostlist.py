"""SLURM's short form of a list of hosts, written out: ``node[01-03,07],gpu5-[1-2]x``."""

from __future__ import annotations

import itertools
import re

from lockstep.config import host_name
from lockstep.errors import TopologyError

MOST_HOSTS = 65536
"""More nodes than SLURM manages; a longer list is a mistake, and must not fill the memory."""

_PIECE = re.compile(r"\[(?P<numbers>[^\[\]]*)\]|(?P<letters>[^\[\],\s]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str) -> list[str]:
    """Every host of the list, in its order; of several brackets in one name the last runs fastest."""
    text = text.strip()
    hosts: list[str] = []
    position = 0
    while True:
        names, position = _name(text, position, room=MOST_HOSTS - len(hosts))
        hosts.extend(names)
        if position == len(text):
            return hosts
        position += 1  # the comma that ended the name


def shortened(text: str) -> str:
    """The text as an error shows it: whole as a rule, cut when it is pages long."""
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _name(text: str, start: int, room: int) -> tuple[list[str], int]:
    """The hosts one name stands for, and the position of the comma behind it (or of the end)."""
    position, count = start, 1
    pieces: list[list[str]] = []
    while position < len(text) and text[position] != ",":
        match = _PIECE.match(text, position)
        if match is None:
            raise _bad(text, f"{text[position]!r} at character {position + 1} has no partner or does not belong there")
        if match["letters"] is not None:
            pieces.append([match["letters"]])
        else:
            spans = _spans(match["numbers"], text)
            # Counted before it is written out: a range costs as much memory as it has numbers.
            count *= sum(last - first + 1 for first, last, _ in spans)
            if count > room:
                raise TopologyError(
                    f"The host list {shortened(text)} names more than {MOST_HOSTS} hosts. Check where it comes from, "
                    f"or set MASTER_ADDR to the host of rank 0 for all processes."
                )
            pieces.append([f"{n:0{width}d}" for first, last, width in spans for n in range(first, last + 1)])
        position = match.end()
    if not pieces:
        raise _bad(text, f"a host's name is missing at character {start + 1}")
    # One stands for all: they differ in digits only.
    if not host_name.is_host("".join(part[0] for part in pieces)):
        name = shortened(text[start:position])
        raise _bad(text, f"{name} is not a host's name; allowed are {host_name.ALLOWED}")
    return ["".join(parts) for parts in itertools.product(*pieces)], position


def _spans(body: str, text: str) -> list[tuple[int, int, int]]:
    """First, last and width of each range in a pair of brackets."""
    spans = []
    for part in body.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _bad(text, f"[{body}] holds {part!r}, which is neither a number nor a range such as 01-16")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _bad(text, f"the range {part!r} runs backwards")
        # Leading zeros belong to the host's name; how wide it is, the first number of the range says.
        spans.append((first, last, len(match[1])))
    return spans


def _bad(text: str, what: str) -> TopologyError:
    return TopologyError(
        f"The host list {shortened(text)} cannot be read: {what}. "
        f"Its form is node[01-03,07],gpu5; check SLURM_STEP_NODELIST and SLURM_JOB_NODELIST, "
        f"or set MASTER_ADDR to the host of rank 0 for all processes."
    )
