"""``lockstep doctor nccl LOG…``: what NCCL's logs say, in words; with ``--run`` it starts the job that writes them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.rundir.printable import printable

if TYPE_CHECKING:
    from lockstep.doctor.nccl.read import Reading, Watch

JOB_AFTER = "--run"
"""The words after this one are the job's: they come as `job`, untouched."""
_LARGE = 64 << 20
"""Bytes from which on the progress is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "logs",
        metavar="LOG",
        nargs="*",
        help="logs of any number of ranks, a folder of them, a run directory, or - for what is piped in",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        JOB_AFTER,
        action="store_true",
        help="start a job with NCCL_DEBUG=INFO, each process writing a log of its own, and read these; what follows is "
        "what `lockstep launch` takes: [options] [--] train.py [its arguments]",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, and print; 1 when something is in error, or as the job that was started ended."""
    if arguments.run:
        return _run(arguments)
    if not arguments.logs:
        raise ConfigError(
            "No log was named. Name the files that NCCL wrote (NCCL_DEBUG=INFO), or start the job from here: "
            "lockstep doctor nccl --run -- train.py"
        )
    from lockstep.doctor.finding import exit_code
    from lockstep.doctor.nccl.read import read

    with _progress() as watch:
        reading = read(arguments.logs, watch)
    _show(reading, as_json=arguments.json)
    return exit_code(reading.findings)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.logs:
        raise ConfigError(f"--run starts a job, and LOG names one that has run ({arguments.logs[0]}). Choose one.")
    if not [word for word in arguments.job if word != "--"]:
        raise ConfigError("--run needs a script: lockstep doctor nccl --run -- train.py [its arguments]")
    from lockstep.config import env
    from lockstep.doctor.finding import exit_code
    from lockstep.doctor.nccl import job

    ran = job.run(arguments.job, env.snapshot(), output=sys.stderr if arguments.json else None)
    _show(ran.reading, as_json=arguments.json, **ran.plain())
    return ran.code or exit_code(ran.reading.findings)


def _show(reading: Reading, *, as_json: bool, **more: object) -> None:
    from lockstep.doctor.finding import to_json
    from lockstep.doctor.nccl import findings, report

    if as_json:
        shown = {
            **more,
            "logs": list(reading.logs),
            "story": findings.plain(reading.summary),
            **to_json(reading.findings),
        }
        print(json.dumps(shown, indent=2))
        return
    for name, value in more.items():
        print(printable(f"{name}: {value}"))
    print(printable("\n".join(report.lines(reading))))


@contextmanager
def _progress() -> Iterator[Watch | None]:
    """A bar for logs that take a while, where somebody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    from lockstep.doctor.nccl.reader import Log, Progress

    bars: list[Any] = []

    def watch(log: Log) -> Progress:
        while bars:
            bars.pop().close()
        size = log.size()
        if size is not None and size < _LARGE:
            return lambda count: None
        bar: Any = tqdm(total=size, unit="B", unit_scale=True, desc=log.name[-40:], leave=False)
        bars.append(bar)
        return lambda count: (bar.update(count), None)[1]

    try:
        yield watch
    finally:
        while bars:
            bars.pop().close()
