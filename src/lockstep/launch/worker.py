"""What every rank is started through: ``python -m lockstep.launch.worker [-m] script args…``.

It runs the script as Python would, as ``__main__``, and adds what the launcher needs to say why a rank ended:

- an exception that nobody caught is written down as the rank's last words before it is printed;
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
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from lockstep.config import env
from lockstep.rundir.place import RunDirectory

_kept: list[Any] = []
"""Files that must stay open as long as the process lives."""


def main() -> None:
    """Run the script that the command line names."""
    argv = sys.argv[1:]
    module = bool(argv) and argv[0] == "-m"
    script, *args = argv[1:] if module else argv
    _die_with_launcher()
    environ = env.snapshot()
    if environ.get("LOCKSTEP_RUN_DIR"):
        directory = RunDirectory(path=Path(environ["LOCKSTEP_RUN_DIR"]))
        _keep_last_words(directory)
        _write_stacks_on_signal(directory, environ)
    sys.argv = [script, *args]
    run = _run_module if module else _run_script
    try:
        run(script)
    except SystemExit as leaving:
        # Python calls no hook for it, and where a script says sys.exit(3) is what its user will look for.
        if leaving.code not in (None, 0) and environ.get("LOCKSTEP_RUN_DIR"):
            from lockstep.rundir import words

            words.write(directory.path, words.of_this_process(type(leaving), leaving, leaving.__traceback__))
        raise


def _run_script(script: str) -> None:
    """As ``python script.py`` does, in the real ``__main__``, so that pickling and multiprocessing find it there."""
    sys.path[0] = str(Path(script).resolve().parent)
    main_module: ModuleType = sys.modules["__main__"]
    code = compile(Path(script).read_bytes(), script, "exec")
    names = main_module.__dict__
    for name in [name for name in names if name not in ("__name__", "__builtins__")]:
        del names[name]
    names.update(__file__=script, __spec__=None, __doc__=None, __loader__=None, __package__=None, __cached__=None)
    exec(code, names)


def _run_module(name: str) -> None:
    import runpy

    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _keep_last_words(directory: RunDirectory) -> None:
    before = sys.excepthook

    def keep(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        from lockstep.rundir import words

        words.write(directory.path, words.of_this_process(kind, value, trace))
        before(kind, value.with_traceback(_from_script(trace)), _from_script(trace))

    sys.excepthook = keep


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as it would be without us."""
    start = trace
    while start is not None:
        name = start.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith("<frozen"):
            return start
        start = start.tb_next
    return trace


def _write_stacks_on_signal(directory: RunDirectory, environ: Mapping[str, str]) -> None:
    from lockstep.rundir import words

    try:
        directory.stacks.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(directory.stack(words.rank_in(environ)), "w")  # noqa: SIM115  # stays open as long as the process
    except OSError:
        return  # a disk that fails must not keep the script from running
    _kept.append(file)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def _die_with_launcher() -> None:
    """Have Linux kill this process when the launcher is gone, killed or not."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it went in between


if __name__ == "__main__":
    # In a module of its own name: the script takes the place of everything in this one.
    from lockstep.launch import worker

    worker.main()
