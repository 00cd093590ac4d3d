"""``lockstep doctor net``: in the ranks of a job, whoever started it; by itself it starts one on this machine."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import env
from lockstep.doctor import table
from lockstep.errors import ConfigError, LockstepError
from lockstep.rundir import constants
from lockstep.rundir.printable import printable

if TYPE_CHECKING:
    from lockstep.doctor.finding import Finding
    from lockstep.doctor.net.program import NetOptions
    from lockstep.doctor.net.results import NetReport

_OFTEN, _SELDOM = 1.0, 16.0
"""Seconds between two lines about the progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with heat maps there")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the heat maps as a picture there (needs matplotlib)"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds: small sizes, short measurements")
    parser.add_argument("--budget", type=_seconds, default=90.0, metavar="S", help="seconds to measure for (90)")
    parser.add_argument(
        "--patience", type=_seconds, default=120.0, metavar="S", help="seconds to wait for ranks that start late (120)"
    )
    parser.add_argument(
        "--send_recv",
        "--send-recv",
        action="store_true",
        help="also measure send and receive of the process group by pair; on GPUs this is always done",
    )
    parser.add_argument("--script", type=Path, metavar="FILE", help="a script that must be the same on every node")
    alone = parser.add_argument_group("when no launcher has started this")
    alone.add_argument(
        "--num_processes", "--num-processes", type=int, metavar="N", help="ranks to start here (one per GPU, or 2)"
    )
    alone.add_argument("--cpu", action="store_true", help="use the CPU even where there are accelerators")
    # Where rank 0 leaves the exit code for the call that started it: a verdict is no failure of the job.
    parser.add_argument("--verdict", type=Path, help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure; 1 when something is in error."""
    from lockstep.topology import environments

    environ = env.snapshot()
    place = environments.find(environ)
    if arguments.png is not None and place.rank == 0:
        from lockstep.doctor.net import png

        png.require()
    if place.launcher == "none":
        if "LOCKSTEP_LAUNCH" in environ:
            raise ConfigError(
                "`lockstep launch` has started one process, which has nobody to talk to. Ask it for more with "
                "--num_processes, or call `lockstep doctor net` by itself."
            )
        return _start(arguments)
    if arguments.num_processes is not None:
        raise ConfigError(
            f"--num_processes {arguments.num_processes} is for starting ranks, and {place.launcher} has started this "
            "one. Leave it out, and say it to the launcher."
        )
    if arguments.cpu:
        env.publish({env.VARIABLES["cpu"][0]: "true"})
    from lockstep.doctor.net.program import NetOptions

    options = NetOptions(
        patience=arguments.patience,
        budget=arguments.budget,
        quick=arguments.quick,
        send_recv=arguments.send_recv,
        script=arguments.script,
    )
    return in_rank(
        options,
        place.rank,
        as_json=arguments.json,
        page=arguments.html,
        picture=arguments.png,
        verdict=arguments.verdict,
    )


def _start(arguments: argparse.Namespace) -> int:
    """Start ranks on this machine; the exit code is what they found."""
    import tempfile

    from lockstep.doctor import subprocess_launch

    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        verdict = Path(folder) / "verdict"
        # Its own job leaves nothing behind in the folder where it was called.
        environ = {constants.VARIABLE: str(Path(folder) / "run"), **env.snapshot()}
        code = subprocess_launch.launch([*job_words(arguments), "--verdict", str(verdict)], environ)
        return int(verdict.read_text()) if code == 0 and verdict.exists() else code or 1


def job_words(arguments: argparse.Namespace) -> list[str]:
    """What `lockstep launch` is told, to start ranks on this machine each of which runs this again."""
    from lockstep.host.hardware import accelerators

    count, cpu = arguments.num_processes, arguments.cpu
    if count is not None and count < 2:
        raise ConfigError(
            f"--num_processes {count}: a rank needs at least one other to talk to. Ask for 2 or more; "
            "`lockstep doctor` looks at the machine alone."
        )
    if count is None:
        present = 0 if cpu else accelerators(env.snapshot())[0]
        # One accelerator alone has nobody to talk to: two ranks on the CPU at least show the network.
        count, cpu = (present, cpu) if present > 1 else (2, True)
    again = ["doctor", "net", "--budget", str(arguments.budget), "--patience", str(arguments.patience)]
    again += [f"--{name}" for name in ("json", "quick", "send_recv") if getattr(arguments, name)]
    for name in ("html", "png", "script"):
        if getattr(arguments, name) is not None:
            again += [f"--{name}", str(getattr(arguments, name))]
    return ["--num_processes", str(count), *(["--cpu"] if cpu else []), "-m", "lockstep", *again]


def in_rank(
    options: NetOptions,
    rank: int,
    *,
    as_json: bool,
    page: Path | None = None,
    picture: Path | None = None,
    verdict: Path | None = None,
    own_findings: tuple[Finding, ...] = (),
) -> int:
    """Called on: all ranks. Examine and, on rank 0, print; ends the process, since what hangs in it cannot be ended."""
    from lockstep.doctor.net import program

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # At once: Python's own handler would wait until a collective, which has lost its others by then, gives up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    progress = _NetProgress()
    try:
        with _native_output_on_stderr():
            report, _ = program.examine(options, log=progress.show, alarm=progress.alarm, own_findings=own_findings)
    except LockstepError as error:
        finding = program.cannot_start(error, rank)
        print(printable("\n".join(table.lines([finding]))), file=sys.stderr, flush=True)
        program.finish(1)
        return 1
    code = 0 if report is None else _publish(report, as_json=as_json, page=page, picture=picture, rates=options.rates)
    if verdict is not None and report is not None:
        verdict.write_text(str(code))
        code = 0
    program.finish(code)
    return code


@contextmanager
def _native_output_on_stderr() -> Iterator[None]:
    """Keep stdout for the result: gloo of torch 2.9 prints there whom it is connected to."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _publish(report: NetReport, *, as_json: bool, page: Path | None, picture: Path | None, rates: bool) -> int:
    from lockstep.doctor.finding import exit_code
    from lockstep.doctor.net import program, text

    findings = program.judged(report)
    if page is not None:
        from lockstep.doctor.net.html import render

        _write(page, lambda path: path.write_text(render(report, findings), encoding="utf-8"))
    if picture is not None:
        from lockstep.doctor.net.png import draw

        _write(picture, lambda path: draw(report, findings, path))
    if as_json:
        print(json.dumps(text.plain(report, findings), indent=2))
        return exit_code(findings)
    shown = program.judged(report, brief=True)
    lines = text.lines(report, shown) if rates else table.lines(shown)
    print(printable("\n".join([*lines, table.summary(findings)])))
    return exit_code(findings)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """What was measured is worth more than the file: it is told also where that cannot be written."""
    try:
        write(path)
        print(f"lockstep doctor net: wrote {path}", file=sys.stderr)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        print(f"lockstep doctor net: {path} cannot be written: {reason}", file=sys.stderr)


class _NetProgress:
    """The progress, on stderr: what is new at once or a second later, and what takes long ever less often."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.last = -_OFTEN
        self.text = ""
        self.pause = _OFTEN

    def show(self, text: str) -> None:
        now = time.monotonic()
        same = text == self.text
        at_once = not same and text.startswith(("connecting", "barrier"))
        if not at_once and now - self.last < (self.pause if same else _OFTEN):
            return
        self.pause = min(_SELDOM, 2 * self.pause) if same else _OFTEN
        self.last, self.text = now, text
        print(f"lockstep doctor: {now - self.started:5.1f} s  {printable(text)}", file=sys.stderr, flush=True)

    def alarm(self, findings: list[Finding]) -> None:
        print(printable("\n".join(table.lines(findings))), file=sys.stderr, flush=True)
