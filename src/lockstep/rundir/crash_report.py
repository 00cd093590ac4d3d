"""The last words of a rank: what ended it, written by the rank itself, read by the launcher."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time as clock
import traceback as tracebacks
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.config import env
from lockstep.errors import LOST_PEER, DistributedOperationException, LockstepError, PeerFailure, walk_chain
from lockstep.rundir import files
from lockstep.rundir.constants import rank_in
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.regular_file import read_json

MESSAGE_LIMIT = 10_000
TRACEBACK_LIMIT = 100_000
# Room for both texts when every character is escaped.
_FILE_LIMIT = 4_000_000

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHIM = os.path.join(_OURS, "launch", "worker.py")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FILE = re.compile(r"rank_(\d+)\.json")

_LEAVING = ("SystemExit", "KeyboardInterrupt")

_advisers: list[Callable[[BaseException], str]] = []


def add_adviser(adviser: Callable[[BaseException], str]) -> None:
    """Have a package of the running half asked what it knows of an exception: it gives a text, or nothing.

    For the whole process, as the excepthook is: who writes a report of a crash may belong to the starting half, and
    knows nobody whom it could ask.
    """
    if adviser not in _advisers:
        _advisers.append(adviser)


@dataclass(frozen=True, kw_only=True)
class CrashReport:
    """What ended one rank."""

    rank: int
    local_rank: int
    host: str
    pid: int
    attempt: str
    """Which start of the job it was; words of an earlier one may still lie there."""

    time: float
    """Seconds since the epoch, by the clock of ``host``."""

    kind: str
    """The name of the exception's type."""

    message: str
    """Its text; for SystemExit the code."""

    traceback: str
    """As Python prints it, without the frames that start the script."""

    line: str
    """The last line of the user's own code on the way to the error: ``train.py:12 in main``."""

    follows: bool
    """Whether it is only a consequence of another rank's failure."""

    cause_rank: int | None
    """The rank that failed first, where this one was told."""

    advice: str = ""
    """What the running half has to say about it."""

    lead: str = ""
    """Where this rank only noticed that another one strayed: which one, and where."""


# ---------------------------------------------------------------- in the rank


def from_exception(
    kind: type[BaseException],
    value: BaseException | None,
    trace: TracebackType | None,
    *,
    rank: int,
    local_rank: int,
    attempt: str = "",
) -> CrashReport:
    """Turn what an excepthook is given into last words. Never raises, whatever the exception is like."""
    follows, cause = _led_by(value, rank)
    return CrashReport(
        rank=rank,
        local_rank=local_rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        attempt=attempt,
        time=clock.time(),
        kind=kind.__name__,
        message=_cut(message_of(value), MESSAGE_LIMIT),
        traceback=_cut(_traceback(kind, value, trace), TRACEBACK_LIMIT),
        line=_line(value, trace),
        follows=follows,
        cause_rank=cause,
        advice=_cut(advice_on(value), MESSAGE_LIMIT),
        lead=_cut(getattr(value, "lead", ""), MESSAGE_LIMIT)
        if isinstance(value, DistributedOperationException)
        else "",
    )


def advice_on(value: BaseException | None) -> str:
    """What those who know have to say about an exception. Never raises, as there is another error to tell."""
    said = []
    for adviser in _advisers:
        with suppress(Exception):
            said.append("" if value is None else adviser(value))
    return "\n".join(text for text in said if text)


def of_this_process(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> CrashReport:
    """The same, with rank and attempt from the environment that the launcher gave this process."""
    environ = env.snapshot()
    attempt = environ.get("LOCKSTEP_ATTEMPT", "")
    local_rank = _number(environ.get("LOCAL_RANK"))
    return from_exception(kind, value, trace, rank=rank_in(environ), local_rank=local_rank, attempt=attempt)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def write(directory: Path, words: CrashReport) -> bool:
    """Leave last words in a run directory. A disk that fails must not hide the user's error: False, no exception."""
    try:
        path = RunDirectory(path=directory).words(words.rank)
        files.make_folder(path.parent)
        files.replace(path, json.dumps(asdict(words), indent=1).encode())
    except Exception:
        return False
    return True


def message_of(value: BaseException | None) -> str:
    """An exception's text; for SystemExit the code. Never raises."""
    if value is None:
        return ""
    try:
        if isinstance(value, SystemExit):
            return str(0 if value.code is None else value.code)
        return str(value)
    except BaseException as error:
        # Also what is no Exception: nothing that a text's maker does may end the telling.
        return f"<its text cannot be made: {type(error).__name__}>"


def _traceback(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> str:
    if value is None:
        return f"{kind.__name__}\n"
    try:
        try:
            return _format(kind, value, trace)
        except RuntimeError:  # maybe of a signal's handler: torch's raises wherever it is when a loader's worker died
            return _format(kind, value, trace)
    except Exception as error:
        return f"<the traceback cannot be made: {type(error).__name__}>\n"


def _format(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str:
    whole = tracebacks.TracebackException(kind, value, trace)
    for part in walk_chain(whole, suppressed=True):
        user = [frame for frame in part.stack if not _is_machinery(frame.filename)]
        # A script that does not parse has no frame of its own, but says where by itself.
        if user or issubclass(kind, SyntaxError):
            part.stack[:] = user
    return "".join(whole.format())


def _is_machinery(filename: str) -> bool:
    """What stands between the interpreter and the user's script, or between an import and what it imports."""
    return (
        filename.startswith(("<frozen importlib", "<frozen runpy"))
        or filename == f"{_STANDARD}runpy.py"
        or filename == _SHIM
    )


def _line(value: BaseException | None, trace: TracebackType | None) -> str:
    last = user = None
    while trace is not None:
        code = trace.tb_frame.f_code
        last = (code.co_filename, trace.tb_lineno, code.co_name)
        if _is_users(code.co_filename):
            user = last
        trace = trace.tb_next
    if isinstance(value, SyntaxError) and value.filename and (user is None or _is_users(value.filename)):
        return f"{_short(value.filename)}:{value.lineno}"
    chosen = user or last
    return "" if chosen is None else f"{_short(chosen[0])}:{chosen[1]} in {chosen[2]}"


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    with suppress(OSError):  # the working directory is gone
        filename = os.path.abspath(filename)
    return not filename.startswith((_OURS, _STANDARD)) and not any(part in filename for part in _PACKAGES)


def _short(filename: str) -> str:
    with suppress(OSError):
        here = os.getcwd() + os.sep
        return filename.removeprefix(here)
    return filename


def _led_by(value: BaseException | None, rank: int) -> tuple[bool, int | None]:
    """Whether another rank's failure led to this exception, and which rank's if that is known."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, PeerFailure):
            return value.rank != rank, value.rank if value.rank != rank else None
        # Our other errors are about this rank, whatever words they use; what they came from counts.
        plain = isinstance(value, RuntimeError) and not isinstance(value, LockstepError)
        # A rank whose own mistake reads like this is still found: when every rank only follows, the earliest is taken.
        if plain and LOST_PEER.search(message_of(value)):
            return True, None
        before = value.__cause__
        if before is None and isinstance(value, SystemExit) and not value.__suppress_context__:
            before = value.__context__  # `except ...: sys.exit(1)` ends for what it caught
        value = before
    return False, None


def _cut(text: str, limit: int) -> str:
    """The text with its middle left out if it is too long, and with nothing in it that cannot be printed later."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} and some more characters are left out here ...]\n"
    room = limit - len(note)
    return text[: room // 2] + note + text[len(text) - (room - room // 2) :]


# ---------------------------------------------------------------- in the launcher


def read_all(directory: Path, attempt: str | None = None) -> list[CrashReport]:
    """The last words that lie in a run directory, by rank; those of one ``attempt`` only, if it is given.

    What cannot be read as last words is passed over: a rank may have been killed in the middle of everything.
    """
    found = []
    with suppress(OSError), os.scandir(RunDirectory(path=directory).words(0).parent) as entries:
        for entry in entries:
            match = _FILE.fullmatch(entry.name)
            with suppress(OSError, ValueError, RecursionError):
                if match and entry.is_file(follow_symlinks=False):
                    words = _parse(Path(entry.path))
                    if words.rank == int(match[1]) and attempt in (None, words.attempt):
                        found.append(words)
    return sorted(found, key=lambda words: words.rank)


def _parse(path: Path) -> CrashReport:
    data = read_json(path, limit=_FILE_LIMIT)
    if not isinstance(data, dict):
        raise ValueError("not a table")
    known = [field for field in fields(CrashReport) if field.name in data or field.default is MISSING]
    return CrashReport(**{field.name: _checked(field.name, field.type, data) for field in known})


def _checked(name: str, kind: Any, data: dict[str, Any]) -> Any:
    if name not in data:
        raise ValueError(f"{name} is missing")
    value = data[name]
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "int | None": value is None or (isinstance(value, int) and not isinstance(value, bool)),
        "float": isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }
    if not fits[kind]:
        raise ValueError(f"{name} is no {kind}")
    return value


def first_failure(
    words: Collection[CrashReport], exits: Mapping[int, int], stopped: Collection[int] = ()
) -> int | None:
    """The rank whose failure led to the others, or None when none failed.

    ``exits`` holds exit codes by rank (a signal is negative), ``stopped`` the ranks that the launcher itself sent a
    signal to: how these ended says little.
    """
    failed = sorted((w for w in words if exits.get(w.rank) != 0), key=lambda w: (w.time, w.rank))
    spoke = {w.rank for w in failed}
    silent = [rank for rank, code in sorted(exits.items()) if code != 0 and rank not in spoke]
    own = [w for w in failed if not w.follows]
    # Told by a signal handler of the user's to leave, not by an error.
    sent = [w.rank for w in own if w.rank in stopped and w.kind in _LEAVING]
    named = [w.cause_rank for w in failed if w.cause_rank is not None]
    killed = [rank for rank in silent if exits[rank] < 0 and exits[rank] != -signal.SIGTERM and rank not in stopped]
    # Clocks of several machines do not compare; what a rank was told through the job's store does.
    apart = len({w.host for w in own}) > 1
    order = (
        [rank for rank in named if apart and rank in {w.rank for w in own} - set(sent)],
        [w.rank for w in own if w.rank not in sent],
        [rank for rank in named if rank in killed],
        killed,
        sent,
        [rank for rank in named if rank in silent],
        [rank for rank in silent if exits[rank] > 0 and rank not in stopped],
        [rank for rank in named if rank in spoke],
        [w.rank for w in failed],
        [rank for rank in silent if rank not in stopped],
        silent,
    )
    return next((rank for group in order for rank in group), None)
