"""`python -m tests.fuzz.hunt FIRST COUNT`: every program that fails, not only the first of a job.

After a failure, the programs that are left run in another job. `--without probe redraw` leaves out programs with what
is known to fail. To make a program that fails smaller, override its choices, or start from the plainest program, which
is that of a negative seed: `hunt 17 1 workers=0`, `hunt -1 1 workers=1 "iteration='zip'"`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from tests.fuzz.jobs import Job, run
from tests.fuzz.program import draw, parse
from tests.fuzz.reference import differences


def main(asked: argparse.Namespace) -> None:
    """Run the programs; print those that fail."""
    programs = {seed: draw(seed, **parse(asked.choices)) for seed in range(asked.first, asked.first + asked.count)}
    if asked.library == "accelerate":
        programs = {seed: program for seed, program in programs.items() if program.accelerate_agrees()}
    seeds = [seed for seed in programs if not any(word in str(programs[seed]) for word in asked.without)]
    count, failed, started = len(seeds), 0, time.monotonic()
    while seeds:
        job = Job(
            seeds=tuple(seeds),
            ranks=asked.ranks,
            launcher=asked.launcher,
            library=asked.library,
            choices=tuple(asked.choices),
        )
        with tempfile.TemporaryDirectory() as folder:
            result = run(Path(folder), job)
        for seed, seen in result.programs.items():
            if lines := differences(programs[seed], seen):
                failed += 1
                print("WRONG", programs[seed], *(f"\n    {line}" for line in lines[:4]), flush=True)
        seeds = seeds[len(result.programs) :]
        if result.code or seeds:
            failed += 1
            print(f"FAILED with {result.code}", programs[seeds[0]] if seeds else "at the end", flush=True)
            print(result.text if asked.verbose else summary(result.text), flush=True)
            seeds = seeds[1:]
    print(f"{failed} of {count} failed, {time.monotonic() - started:.0f} s")


def summary(text: str) -> str:
    """What says most of a job's screen."""
    lines = [line for line in text.splitlines() if re.search(r"Error|Exception|guard|Process \d|cause|hang|took", line)]
    return "\n".join(f"    {line[:220]}" for line in lines[:14])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("choices", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", default="torchrun", choices=["torchrun", "lockstep"])
    parser.add_argument("--library", default="lockstep", choices=["lockstep", "accelerate"])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--verbose", action="store_true")
    main(parser.parse_args())
