"""One job from start to end on this machine: its run directory, its processes, what is said when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.config import env
from lockstep.launch import report
from lockstep.launch.output import Output
from lockstep.launch.plan import Plan
from lockstep.launch.report import Exit
from lockstep.rundir import place, words
from lockstep.rundir.place import RunDirectory


def run(plan: Plan, environ: Mapping[str, str]) -> int:
    """Run the job; the exit code that the launcher ends with."""
    directory = place.make(environ.get(place.VARIABLE), plan.value("project_dir", None))
    try:
        return _Job(plan, directory, environ).run()
    finally:
        place.sign_out(directory)


class _Job:
    def __init__(self, plan: Plan, directory: RunDirectory, environ: Mapping[str, str]) -> None:
        self.plan = plan
        self.directory = directory
        self.environ = environ
        self.quiet = bool(plan.value("quiet", False))
        log_dir = plan.value("log_dir", None)
        self.logs = Path(log_dir).absolute() if log_dir is not None else directory.logs
        self.kills = report.out_of_memory_kills()

    def run(self) -> int:
        for note in (*self.plan.notes, *filter(None, [self.directory.note])):
            self.say(note)
        self._write_down()
        env.publish({**self.plan.env, place.VARIABLE: str(self.directory.path)})
        if self.plan.kind == "agent":
            return self._with_agent()
        return self._with_child()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        if not self.quiet:
            sys.stderr.write(f"lockstep launch: {text}\n")
            sys.stderr.flush()

    def _write_down(self) -> None:
        facts = {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "interpreter": sys.executable,
            "working directory": str(Path.cwd()),
            "command": sys.argv,
        }
        with contextlib.suppress(OSError):  # a full disk must not keep the job from running
            self.directory.config.write_text(json.dumps(self.plan.to_dict(), indent=1) + "\n")
            self.directory.env.write_text(json.dumps(facts, indent=1) + "\n")

    # --- several processes -------------------------------------------------------------------------------------

    def _with_agent(self) -> int:
        from lockstep.launch import agent

        output = Output(prefix=self.plan.value("tee", "0"), collapse=self.quiet)
        try:
            ending = agent.run(self.plan, self.logs, output, self.say, lambda exits: self._one_line(exits))
        finally:
            output.close()
        if ending.signal is not None:
            self.say(f"ended by {signal.Signals(ending.signal).name}; all processes are gone.")
            return 128 + ending.signal
        return self._fail(ending.exits) if ending.exits else 0

    # --- one process: the script itself, mpirun or srun ---------------------------------------------------------

    def _with_child(self) -> int:
        alone = self.plan.kind == "alone"
        output = Output() if alone else None
        ends = output.open(0, self.logs) if output is not None else {}
        # With a terminal to read from, the script stays in its foreground, where the terminal's Ctrl-C reaches it.
        foreground = sys.stdin is not None and sys.stdin.isatty()
        try:
            child = subprocess.Popen(
                self.plan.argv, stdout=ends.get("out"), stderr=ends.get("err"), start_new_session=not foreground
            )
            if output is not None:
                output.started()
            stopped, code = self._stay(child, foreground)
        finally:
            if output is not None:
                output.close()
        if stopped is not None and code in (-stopped, 128 + stopped, 0):
            return 128 + stopped
        if code < 0 and alone:
            return self._fail((Exit(rank=0, code=code, pid=child.pid),))
        if code and not alone:
            return self._fail_elsewhere(code)
        return 128 - code if code < 0 else code

    def _stay(self, child: subprocess.Popen[bytes], foreground: bool) -> tuple[int | None, int]:
        """Wait for the child, passing signals on: the signal that ended us, if one did, and the child's code."""
        received: list[int] = []

        def send(number: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number) if foreground else os.killpg(child.pid, number)

        def handle(number: int, _: Any) -> None:
            received.append(number)
            if len(received) > 1:
                send(signal.SIGKILL)
            elif not (foreground and number == signal.SIGINT):  # the terminal has sent that one to both of us
                send(number)

        with _handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), handle):
            grace = self.plan.value("grace", 30.0)
            while True:
                try:
                    code = child.wait(grace if received else 0.5)
                    break
                except subprocess.TimeoutExpired:
                    if received:
                        send(signal.SIGKILL)
        if not foreground:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # what it has left running
        return (received[0] if received else None), code

    # --- when it fails -----------------------------------------------------------------------------------------

    def _words(self) -> list[words.LastWords]:
        return words.read_all(self.directory.path, env.snapshot().get("LOCKSTEP_ATTEMPT"))

    def _out_of_memory(self) -> bool:
        kills = report.out_of_memory_kills()
        return kills is not None and self.kills is not None and kills > self.kills

    def _fail(self, exits: tuple[Exit, ...]) -> int:
        text, code = report.tell(exits, self._words(), logs=self.logs, out_of_memory=self._out_of_memory())
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        return code

    def _fail_elsewhere(self, code: int) -> int:
        """mpirun or srun failed: they have said what they know; the ranks' own words say why."""
        said = words.read_all(self.directory.path)
        if said:
            exits = tuple(Exit(rank=word.rank, code=code or 1, pid=word.pid) for word in said)
            self._fail(exits)
        return 128 - code if code < 0 else code

    def _one_line(self, exits: tuple[Exit, ...]) -> str:
        return report.one_line(exits, self._words(), self._out_of_memory())


@contextlib.contextmanager
def _handling(numbers: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
