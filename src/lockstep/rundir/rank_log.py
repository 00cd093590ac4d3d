"""The log file of a rank, into which its whole traceback goes where the launcher shows the failure.

It is the file in which the launcher keeps what the rank writes to stderr; under mpirun, whose output is its own, a file
at the same place in the run directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.rundir import constants, files
from lockstep.rundir.layout import RunDirectory


class _Taken:
    """The log that this process writes its traceback to, once it has failed and the launcher will show that."""

    path: Path | None = None
    pid = 0


_taken = _Taken()


def take(path: Path) -> None:
    """From now on the screen is the launcher's: what this process has to say of its failure goes to the log."""
    _taken.path, _taken.pid = path, os.getpid()


def taken() -> Path | None:
    """The log, where the launcher shows this failure; None where this process has to print it itself."""
    return _taken.path if _taken.pid == os.getpid() else None


def of_launched_rank(environ: Mapping[str, str]) -> Path | None:
    """The log of this process; None where no launcher of ours will show why it failed.

    The launcher's own file in the run directory proves that it sees what this rank writes there.
    """
    if "LOCKSTEP_LAUNCH" not in environ:
        return None
    if named := environ.get(constants.LOG_FILE):
        return Path(named)
    directory = RunDirectory(path=Path(environ.get(constants.VARIABLE, "")))
    if not directory.path.is_absolute() or not directory.config.exists():
        return None
    return directory.log(constants.rank_in(environ), "err")


def append(path: Path, text: str) -> bool:
    """Add a text to the log; False where that cannot be done."""
    with suppress(OSError, ValueError):
        files.make_folder(path.parent)
        with open(path, "ab", opener=files.private) as file:
            file.write(text.encode(errors="backslashreplace"))
        return True
    return False
