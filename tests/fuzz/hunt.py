"""`python -m tests.fuzz.hunt FIRST COUNT`: every program that fails, not only the first of a job.

After a failure, the programs that are left run in another job. `--without probe redraw` leaves out programs with what
is known to fail.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from tests.fuzz.jobs import Job, run
from tests.fuzz.program import draw
from tests.fuzz.reference import differences


def main(first: int, count: int, ranks: int, launcher: str, library: str, without: list[str]) -> None:
    """Run the programs; print those that fail."""
    seeds = [seed for seed in range(first, first + count) if not any(word in str(draw(seed)) for word in without)]
    if library == "accelerate":
        seeds = [seed for seed in seeds if draw(seed).accelerate_agrees()]
    count = len(seeds)
    failed = 0
    started = time.monotonic()
    while seeds:
        with tempfile.TemporaryDirectory() as folder:
            result = run(Path(folder), Job(seeds=tuple(seeds), ranks=ranks, launcher=launcher, library=library))
        for seed, seen in result.programs.items():
            if lines := differences(draw(seed), seen):
                failed += 1
                print(f"WRONG {draw(seed)}", *lines[:4], sep="\n    ", flush=True)
        seeds = seeds[len(result.programs) :]
        if result.code or seeds:
            failed += 1
            print(f"FAILED with {result.code} {draw(seeds[0]) if seeds else ''}", summary(result.text), flush=True)
            seeds = seeds[1:]
    print(f"{failed} of {count} failed, {time.monotonic() - started:.0f} s")


def summary(text: str) -> str:
    """What says most of a job's screen."""
    lines = [line for line in text.splitlines() if re.search(r"Error|Exception|guard|Process \d|cause|hang|took", line)]
    return "".join(f"\n    {line[:220]}" for line in lines[:14])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", default="torchrun", choices=["torchrun", "lockstep"])
    parser.add_argument("--library", default="lockstep", choices=["lockstep", "accelerate"])
    parser.add_argument("--without", nargs="*", default=[])
    main(**vars(parser.parse_args()))
