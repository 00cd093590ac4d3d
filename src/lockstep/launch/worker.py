"""What every rank is started through: ``python -m lockstep.launch.worker [-m] script args…``.

It runs the script as Python would, as ``__main__``, and adds what the launcher needs to say why a rank ended:

- an exception that nobody caught is written down for the launcher, which shows it, and in full into the rank's log;
- a crash in native code writes the Python lines that led to it into the run directory;
- SIGUSR2 writes the stacks of all threads into the run directory, even while the main thread is in C++;
- the rank dies with its launcher, however that ends, so that nothing is left running.

It imports neither torch nor anything else that takes time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys

from lockstep.config import env
from lockstep.host.processes import die_with_parent
from lockstep.launch import leftovers
from lockstep.rundir import constants, files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType, TracebackType
    from typing import Any, TextIO

_STILL_THERE = 15.0
"""Seconds after an exception in which a process has ended, unless something holds it up."""
_kept: list[Any] = []
"""Files that must stay open as long as the process lives."""


def main() -> None:
    """Run the script that the command line names."""
    argv = sys.argv[1:]
    module = bool(argv) and argv[0] == "-m"
    script, *args = argv[1:] if module else argv
    environ = env.snapshot()
    launcher = environ.get(leftovers.LAUNCHER, "")
    die_with_parent(int(launcher) if launcher.isdecimal() else os.getppid())
    directory, own_pid = environ.get(constants.VARIABLE), os.getpid()
    _write_stack_on_crash(_write_stacks_on_signal(directory, environ) if directory else None)
    leftovers.use_folder(environ.get(leftovers.VARIABLE, ""))
    _print_without_us()
    sys.argv = [script, *args]
    try:
        if module:
            _run_module(script)
        else:
            _run_script(script)
    except BaseException as error:
        # Here, and not in an excepthook: the script may have replaced that, and Python calls none for SystemExit.
        # A child that the script has forked prints its own errors: it is not the rank that fails.
        failed = os.getpid() == own_pid and not (isinstance(error, SystemExit) and error.code in (None, 0))
        if directory and failed:
            _report(error, directory, environ)
        raise


def _report(error: BaseException, directory: str, environ: Mapping[str, str]) -> None:
    """For the launcher, which shows the failure of the job in one box; the whole traceback goes to the rank's log."""
    with contextlib.suppress(Exception):  # the script's own error must be printed in any case
        _write_report(error, directory, environ)


def _write_report(error: BaseException, directory: str, environ: Mapping[str, str]) -> None:
    from dataclasses import replace
    from pathlib import Path

    from lockstep.rundir import crash_report, rank_log
    from lockstep.rundir.code_frames import shorten

    log = rank_log.of_launched_rank(environ)
    said = crash_report.of_this_process(type(error), error, error.__traceback__)
    said = replace(said, log="" if log is None else shorten(str(log)))
    by_hand = isinstance(error, KeyboardInterrupt) and "RANK" not in environ  # one process ends as by Python itself
    if crash_report.write(Path(directory), said) and log is not None and not by_hand:
        rank_log.take(log)


def _run_script(script: str) -> None:
    """As ``python script.py`` does, in the real ``__main__``, so that pickling and multiprocessing find it there."""
    if not getattr(sys.flags, "safe_path", False):  # with that, Python adds no folder of its own
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    path = os.path.abspath(script)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = _empty_main()
    module.update(__file__=path, __spec__=None, __doc__=None, __loader__=None, __package__=None, __cached__=None)
    exec(code, module)


def _run_module(name: str) -> None:
    import runpy

    _empty_main()
    # What `python -m` itself calls. The public run_module takes the module out of sys.modules before its threads and
    # exit functions have run, which then cannot pickle what it defines.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _empty_main() -> dict[str, Any]:
    main_module: ModuleType = sys.modules["__main__"]
    module = main_module.__dict__
    for name in [name for name in module if name not in ("__name__", "__builtins__")]:
        del module[name]
    return module


def _print_without_us() -> None:
    before = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        trace = _from_script(trace)
        value = value.with_traceback(trace)
        if not _log(kind, value, trace):
            before(kind, value, trace)

    sys.excepthook = show


def _log(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> bool:
    """Write the traceback to the rank's log instead of the screen; False where the launcher will not show it."""
    import threading
    import traceback

    from lockstep.rundir import rank_log

    log = rank_log.taken()
    if log is None or not rank_log.append(log, "".join(traceback.format_exception(kind, value, trace))):
        return False
    # The box comes when the process has ended: a thread that does not let it end must not hide that it has failed.
    note = f"{kind.__name__} was raised, and the process has not ended yet; traceback: {log}"
    later = threading.Timer(_STILL_THERE, lambda: print(note, file=sys.stderr, flush=True))
    later.daemon = True
    later.start()
    return True


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as it would be without us: empty when the script could not even be compiled."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _write_stacks_on_signal(directory: str, environ: Mapping[str, str]) -> TextIO | None:
    folder = os.path.join(directory, "stacks")
    try:
        files.make_folder(folder)
        path = os.path.join(folder, constants.stack_file(constants.rank_in(environ)))
        file = open(path, "w", opener=files.private)  # noqa: SIM115  # stays open as long as the process
    except OSError:
        return None  # a disk that fails must not keep the script from running
    _kept.append(file)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file


def _write_stack_on_crash(file: TextIO | None) -> None:
    """Into the file, where the failure report finds it; else to stderr."""
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # without a stderr there is nowhere to write
        if not faulthandler.is_enabled():
            faulthandler.enable(file or sys.stderr)


if __name__ == "__main__":
    # In a module of its own name: the script takes the place of everything in this one.
    from lockstep.launch import worker

    worker.main()
