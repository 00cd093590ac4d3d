"""One job from start to end on this machine: its run directory, its processes, what is said when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.blackbox import read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.config import env
from lockstep.config.traceback import read_traceback
from lockstep.errors import ConfigError
from lockstep.guard import stack_note
from lockstep.guard.crash import Crash, read_crash
from lockstep.guard.node_exchange import Node
from lockstep.guard.reporter import STOPPED
from lockstep.job_store import signed_store
from lockstep.launch import failure_report, leftovers
from lockstep.launch.failure_report import Exit
from lockstep.launch.orphan_reaper import OrphanReaper
from lockstep.launch.output import Output
from lockstep.launch.plan import LaunchPlan
from lockstep.rundir import constants, crash_report, files, layout
from lockstep.rundir.code_frames import shorten
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.printable import printable
from lockstep.terminal import show

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end a job."""


def run(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run the job; the exit code that the launcher ends with."""
    logs = _make_logs(plan)
    keeping = OrphanReaper()
    orderly = False
    try:
        directory = layout.make(environ.get(constants.VARIABLE), plan.value("project_dir", None))
        try:
            job = _Job(plan, directory, logs or directory.logs, keeping)
            code = job.run()
            orderly = not job.interrupted
            return code
        finally:
            layout.sign_out(directory)
    finally:
        keeping.release(sweep=not orderly)


def _make_logs(plan: LaunchPlan) -> Path | None:
    """The folder that was asked for; one that cannot be used is better said now than found empty later."""
    asked = plan.value("log_dir", None)
    if asked is None:
        return None
    logs = Path(asked).absolute()
    try:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(logs, os.W_OK | os.X_OK):
            raise PermissionError(0, "not allowed to write there")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--log_dir {asked} cannot be used ({reason}). Name a folder that can be written, or leave it out: output "
            "is then kept in the run directory."
        ) from None
    return logs


class _Job:
    def __init__(self, plan: LaunchPlan, directory: RunDirectory, logs: Path, keeping: OrphanReaper) -> None:
        self.plan = plan
        self.directory = directory
        self.logs = logs
        self.keeping = keeping
        self.quiet = bool(plan.value("quiet", False))
        self.kills = failure_report.out_of_memory_kills()
        self.output: Output | None = None
        self.last_errors: Mapping[int, bytes | bytearray] = {}
        self.interrupted = False
        """Whether a signal ended the job, so that something may be left running."""

    def run(self) -> int:
        read_traceback(env.snapshot())  # a value that is not allowed is better reported now than after a failure
        for note in (*self.plan.notes, *filter(None, [self.directory.note])):
            self.log(note)
        self._write_down()
        env.publish(
            {**self.plan.env, constants.VARIABLE: str(self.directory.path), leftovers.VARIABLE: self.keeping.mark}
        )
        if self.plan.kind in ("agent", "alone"):
            env.publish({leftovers.LAUNCHER: str(os.getpid())})
        if self.plan.kind == "alone":
            env.publish({constants.LOG_FILE: str(self.logs / "rank_0.err")})
        else:
            env.withdraw(constants.LOG_FILE)  # of a job that has started this one
        self._make_secret()
        if self.plan.kind == "agent":
            return self._with_agent()
        return self._with_child()

    def _make_secret(self) -> None:
        """A secret for the job, in the environment alone: the plan and the run directory may be shown to others."""
        if signed_store.read_secret(env.snapshot()):
            return
        if self.plan.kind != "agent" or self.plan.machines == 1:
            env.publish({signed_store.VARIABLE: secrets.token_hex(32)})
        else:  # started one by one, the nodes could not come to one that only they know
            self.log(
                "values in the job's store are not signed; to have them signed, set "
                f"{signed_store.VARIABLE} to the same random text on every node."
            )

    def log(self, text: str) -> None:
        """A line of the launcher's own."""
        self.show(f"lockstep launch: {text}")

    def show(self, text: str) -> None:
        """A text as it is, after what the ranks have printed so far."""
        if self.quiet:
            return
        if self.output is None:
            self._print(text)
        else:
            self.output.print(text)

    def _print(self, text: str) -> None:
        # Nobody reads it, stderr is closed, or a signal has come while this was printing.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _write_down(self) -> None:
        # A full disk, or a working directory that is gone, must not keep the job from running.
        with contextlib.suppress(OSError):
            files.replace(self.directory.config, f"{json.dumps(self.plan.to_dict(), indent=1)}\n".encode())
        with contextlib.suppress(OSError):
            facts = {
                "host": platform.node(),
                "system": f"{platform.system()} {platform.release()}",
                "python": platform.python_version(),
                "interpreter": sys.executable,
                "working directory": os.getcwd(),
                "command": sys.argv,
            }
            files.replace(self.directory.env, f"{json.dumps(facts, indent=1)}\n".encode())

    # --- several processes -------------------------------------------------------------------------------------

    def _with_agent(self) -> int:
        # When machine 0 has ended, torch prints a page on the others for each message that does not get through.
        # Torch looks at this when it is loaded; the ranks do not inherit it.
        with env.patched({"TORCH_CPP_LOG_LEVEL": env.snapshot().get("TORCH_CPP_LOG_LEVEL", "ERROR")}):
            from lockstep.launch import agent

        # Torch handles these even where our caller, such as nohup, has told us to ignore them.
        heeded = ",".join(number.name for number in _heeded())
        env.publish({"TORCHELASTIC_SIGNALS_TO_HANDLE": heeded or "SIGTERM"})
        self.output = Output(prefix=self.plan.value("tee", "0"), collapse=self.quiet)
        with _handling({}):  # puts back what torch changes
            try:
                ending = agent.run(self.plan, self.logs, self.output, self.log, self.show, self._one_line)
            except OSError as error:
                if error.filename != self.plan.argv[0]:
                    raise
                raise _not_started(error) from None
            finally:
                with _handling(dict.fromkeys(_heeded(), _leave)):
                    self.output.close()
                    self.last_errors = self.output.last_errors
                    self.output = None
        if ending.saved:
            self.interrupted = ending.signal is not None
            self.log("asked to stop: the ranks have saved their state and exited. The same command resumes from there.")
            return constants.SAVED
        if ending.signal is not None:
            self.interrupted = True
            if where := failure_report.interrupted_at(self._words()):
                self.log(f"interrupted: {where} (tracebacks: {shorten(str(self.logs))})")
            self.log(f"ended by {signal.Signals(ending.signal).name}; all processes are gone.")
            return 128 + ending.signal
        if ending.verdict:
            self._print(ending.verdict)
            return STOPPED
        return self._fail(ending.exits, ending.lost) if ending.exits else 0

    # --- one process: the script itself, mpirun or srun ---------------------------------------------------------

    def _with_child(self) -> int:
        alone = self.plan.kind == "alone"
        output = Output(prefix=self.plan.value("tee", "0")) if alone else None
        # With a terminal to read from, the script stays in its foreground, where the terminal's Ctrl-C reaches it.
        child = _Child(foreground=sys.stdin is not None and sys.stdin.isatty(), grace=self.plan.value("grace", 30.0))
        passing = {signal.SIGUSR1: lambda number, _: child.send(number)}
        with _handling({**dict.fromkeys(_heeded(), child.on_signal), **passing}):
            try:
                ends = output.open(0, self.logs) if output is not None else {}
                child.start(self.plan.argv, ends)
                if output is not None:
                    output.started()
                code = child.wait()
                self._end_left(child)
            finally:
                if output is not None:
                    output.close()
                    self.last_errors = output.last_errors
        if child.received:
            self.interrupted = True
            if code in (0, -child.received[0], 128 + child.received[0]) or len(child.received) > 1:
                return 128 + child.received[0]
        if code and alone and (code < 0 or self._raised(child.pid)):
            if output is not None and output.amid_line:
                self._print("")
            return self._fail((Exit(rank=0, code=code, pid=child.pid),))
        if code and not alone:
            return self._fail_elsewhere(code)
        return 128 - code if code < 0 else code

    def _end_left(self, child: _Child) -> None:
        """End what the child has left running in its process group."""
        if child.foreground:
            self.keeping.end_group(os.getpgrp())
        else:
            child.send(signal.SIGKILL)

    # --- when it fails -----------------------------------------------------------------------------------------

    def _words(self) -> list[crash_report.CrashReport]:
        return crash_report.read_all(self.directory.path, env.snapshot().get("LOCKSTEP_ATTEMPT"))

    def _boxes(self) -> list[Snapshot]:
        boxes = self.directory.boxes
        return [stack_note.merged(box, stack_note.place(boxes, box.rank)) for box in read.read_all(boxes)]

    def _crashes(self, exits: tuple[Exit, ...]) -> dict[int, Crash]:
        found = {ended.rank: read_crash(self.directory.stacks, ended.rank) for ended in exits if ended.code < 0}
        return {rank: crash for rank, crash in found.items() if crash is not None}

    def _out_of_memory(self) -> bool:
        kills = failure_report.out_of_memory_kills()
        return kills is not None and self.kills is not None and kills > self.kills

    def _fail(self, exits: tuple[Exit, ...], lost: tuple[Node, ...] = ()) -> int:
        report = failure_report.render_report(
            exits,
            self._words(),
            logs=self.logs,
            boxes=self._boxes(),
            crashes=self._crashes(exits),
            lost=lost,
            out_of_memory=self._out_of_memory(),
            last_errors=self.last_errors,
            nodes=self.plan.machines,
        )
        if report.traceback and read_traceback(env.snapshot()) == "full":
            self._print(printable(report.traceback.rstrip()))
        self._print(show.render(report.box))
        return report.code

    def _raised(self, pid: int) -> bool:
        """Whether an exception ended the only process, and not a call of sys.exit, which says all it has to say."""
        return any(word.pid == pid and word.kind != "SystemExit" for word in self._words())

    def _fail_elsewhere(self, code: int) -> int:
        """mpirun or srun failed: they have said what they know; the ranks' own words say why."""
        said = [word for word in crash_report.read_all(self.directory.path) if self._is_new(word)]
        if not said:
            return 128 - code if code < 0 else code
        # srun gives the code of whichever node it ended last: the first failure's own is the one that says something.
        exits = tuple(Exit(rank=word.rank, code=_code_of(word), pid=word.pid) for word in said)
        if self.plan.kind == "srun":  # the agents on the nodes have told it
            return failure_report.render_report(exits, said, logs=self.logs).code
        return self._fail(exits)

    def _is_new(self, word: crash_report.CrashReport) -> bool:
        """Not left by an earlier job in the same directory. By the file system's clock: hosts' clocks differ."""
        try:
            return self.directory.words(word.rank).stat().st_mtime >= self.directory.config.stat().st_mtime
        except OSError:
            return True

    def _one_line(self, exits: tuple[Exit, ...]) -> str:
        return failure_report.one_line(exits, self._words(), self._boxes(), self._out_of_memory())


def _code_of(word: crash_report.CrashReport) -> int:
    """The exit code of a rank that left these words."""
    if word.kind == "SystemExit":
        return int(word.message) if word.message.isdecimal() else 1
    return 128 + signal.SIGINT if word.kind == "KeyboardInterrupt" else 1


class _Child:
    """A process that signals are passed on to."""

    def __init__(self, *, foreground: bool, grace: float) -> None:
        self.foreground = foreground
        self.received: list[int] = []
        """The signals that we were sent."""
        self._grace = grace
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None

    @property
    def pid(self) -> int:
        """Its number; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    def start(self, argv: tuple[str, ...], ends: Mapping[str, int]) -> None:
        try:
            self._process = subprocess.Popen(
                argv, stdout=ends.get("out"), stderr=ends.get("err"), start_new_session=not self.foreground
            )
        except OSError as error:
            raise _not_started(error) from None
        for number in self.received:  # while it was being started
            self.send(number)
            self._limit()

    def wait(self) -> int:
        assert self._process is not None
        code = self._process.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        return code

    def on_signal(self, number: int, _: Any) -> None:
        self.received.append(number)
        if self._process is None:
            return
        if len(self.received) > 1:
            self.send(signal.SIGKILL)
        elif not (self.foreground and number in (signal.SIGINT, signal.SIGQUIT)):  # the terminal sends these to both
            self.send(number)
        self._limit()

    def _limit(self) -> None:
        """From the first signal on, it has so long to end by itself."""
        if self._timer is None:
            self._timer = threading.Timer(self._grace, self.send, [signal.SIGKILL])
            self._timer.daemon = True
            self._timer.start()

    def send(self, number: int) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.foreground:
                self._process.send_signal(number)
            else:
                os.killpg(self._process.pid, number)


def _not_started(error: OSError) -> ConfigError:
    return ConfigError(
        f"{error.filename} cannot be started ({error.strerror}). Check that it is a program for this machine; a script "
        "needs a first line such as #!/bin/sh."
    )


def _heeded() -> list[signal.Signals]:
    """The signals that end us; who started us with one of them ignored, as nohup does, wants that to stay."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _leave(number: int, _: Any) -> None:
    """All processes are gone, and only the rest of their output is not shown yet: no reason to stay."""
    os._exit(128 + number)


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*_ENDING, *handlers)}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is not old:
                signal.signal(number, old)
