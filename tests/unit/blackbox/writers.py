"""Processes that write boxes, for the tests: ``python -m tests.unit.blackbox.writers <what> <folder> <rank> …``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.blackbox import layout
from lockstep.blackbox.box import Box
from lockstep.blackbox.peers import Peers, box_path
from lockstep.blackbox.snapshot import Raw

LIMIT = 60.0
"""Seconds after which a writer ends by itself, should its test have died."""


def make(folder: Path, rank: int = 0, attempt: str = "", **more: Any) -> Box:
    facts: dict[str, Any] = {"world_size": 2, "local_rank": rank, "node": 0, "host": "here", "pid": os.getpid()}
    return Box.create(box_path(folder, rank), rank=rank, attempt=attempt, **{**facts, **more})


def start(what: str, folder: Path, rank: int, *words: object) -> subprocess.Popen[str]:
    """Start a writer; it says "ready" when its box is there."""
    command = [sys.executable, "-m", "tests.unit.blackbox.writers", what, str(folder), str(rank), *map(str, words)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate(timeout=20)


def hammer(folder: Path, rank: int, distinct: int) -> None:
    """Write as fast as can be; what belongs together carries the same number, so that a mixture shows."""
    box = make(folder, rank)
    print("ready", flush=True)
    until = time.monotonic() + LIMIT
    count = generation = 0
    while time.monotonic() < until:
        generation += 1
        box.generation(generation)
        for seq in range(1, 2001):
            count += 1
            kind = seq % distinct
            number = box.enter(f"op {kind}", ("signature", kind, "x" * (kind % 50)))
            box.step(seq)
            box.phase(f"phase {kind}")
            box.pace(*[count % 1000] * 6)
            if not seq % 7:
                box.raw(Raw(name=f"raw {seq}", number=seq, site=f"site {seq}" * (seq % 5), since=float(seq)))
                box.beat()
            box.leave(number)


def stay(folder: Path, rank: int) -> None:
    """Be in a collective until killed."""
    box = make(folder, rank)
    box.step(7)
    box.phase("backward")
    box.leave(box.enter("barrier"))
    box.enter("gather", "float32 (2, 3)")
    print("ready", flush=True)
    time.sleep(LIMIT)


def meet(folder: Path, rank: int, other: int, entries: int) -> None:
    """Enter together with another rank, again and again; every 10th time with another signature than the other's.

    Prints the numbers of the entries that it saw to differ.
    """
    box = make(folder, rank)
    print("ready", flush=True)
    sys.stdin.readline()
    peers = Peers(folder, rank, [rank, other])
    seen = []
    theirs = memoryview_of(box_path(folder, other))
    for turn in range(1, entries + 1):
        # Both leave this line at almost the same moment.
        spins = 0
        while theirs[layout.LEFT] < turn - 1:
            spins += 1
            if not spins % 200:
                time.sleep(0)
        number = box.enter("gather", f"shape {rank if turn % 10 == 0 else 'same'}")
        if peers.compare(number) is not None:
            seen.append(number)
        box.leave(number)
    box.close("finished")
    print(" ".join(map(str, seen)), flush=True)


def memoryview_of(path: Path) -> memoryview:
    import mmap

    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), layout.SIZE, access=mmap.ACCESS_READ)
        return memoryview(mapped).cast("B").cast("Q")


if __name__ == "__main__":
    job = {"hammer": hammer, "stay": stay, "meet": meet}[sys.argv[1]]
    job(Path(sys.argv[2]), *map(int, sys.argv[3:]))
