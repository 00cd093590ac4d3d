"""The last words of a rank: what ended it, written by the rank itself, read by the launcher."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time as clock
import traceback as tracebacks
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.config import env
from lockstep.errors import LOST_PEER, LockstepError, PeerFailure, first_line, walk_chain
from lockstep.rundir import files
from lockstep.rundir.code_frames import CodeFrame, frames_of, is_machinery, is_users, shorten
from lockstep.rundir.constants import rank_in
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.regular_file import read_json

MESSAGE_LIMIT = 10_000
TRACEBACK_LIMIT = 100_000
# Room for both texts when every character is escaped.
_FILE_LIMIT = 4_000_000

_FILE = re.compile(r"rank_(\d+)\.json")

_LEAVING = ("SystemExit", "KeyboardInterrupt")

_CAUSES = 4
"""Errors of a chain that are named."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What somebody who knows has to say about an exception."""

    lead: str = ""
    """What happened, in a sentence, in the place of the exception's own text."""
    details: str = ""
    """More lines."""
    cause: str = ""
    """The likely cause."""
    fix: str = ""
    """What to do."""

    def __str__(self) -> str:
        cause, fix = self.cause and f"Likely cause: {self.cause}", self.fix and f"Fix: {self.fix}"
        return "\n".join(filter(None, [self.lead, self.details, cause, fix]))


_advisers: list[Callable[[BaseException], Advice | None]] = []


def add_adviser(adviser: Callable[[BaseException], Advice | None]) -> None:
    """Have a package of the running half asked what it knows of an exception.

    For the whole process, as the excepthook is: who writes a report of a crash may belong to the starting half, and
    knows nobody whom it could ask.
    """
    if adviser not in _advisers:
        _advisers.append(adviser)


def remove_adviser(adviser: Callable[[BaseException], Advice | None]) -> None:
    """Do not ask any more."""
    if adviser in _advisers:
        _advisers.remove(adviser)


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

    lead: str = ""
    """What happened, where this rank only noticed it, or where the exception's own text does not show it."""

    details: str = ""
    """More lines on it."""

    cause: str = ""
    """The likely cause."""

    fix: str = ""
    """What to do."""

    frames: tuple[CodeFrame, ...] = ()
    """The user's own lines on the way to the error, with their source; innermost last."""

    raised_in: str = ""
    """Where in another library it was raised, if not in the user's own code."""

    causes: tuple[str, ...] = ()
    """What the exception was raised from, or contains, in a line each."""

    node: int | None = None
    """The node of the rank, where the job has several."""

    log: str = ""
    """The file that has the whole traceback."""


# ---------------------------------------------------------------- in the rank


def from_exception(
    kind: type[BaseException],
    value: BaseException | None,
    trace: TracebackType | None,
    *,
    rank: int,
    local_rank: int,
    attempt: str = "",
    node: int | None = None,
) -> CrashReport:
    """Turn what an excepthook is given into last words. Never raises, whatever the exception is like."""
    follows, cause = _led_by(value, rank)
    advice = advice_on(value)
    frames: tuple[CodeFrame, ...] = ()
    raised_in = ""
    with suppress(Exception):
        frames, raised_in = frames_of(value, trace)
    return CrashReport(
        rank=rank,
        local_rank=local_rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        attempt=attempt,
        time=clock.time(),
        kind=kind.__name__,
        message=_cut(message_of(value), MESSAGE_LIMIT),
        traceback=_cut(format_traceback(kind, value, trace), TRACEBACK_LIMIT),
        line=_line(value, trace),
        follows=follows,
        cause_rank=cause,
        lead=_cut(advice.lead, MESSAGE_LIMIT),
        details=_cut(advice.details, MESSAGE_LIMIT),
        cause=_cut(advice.cause, MESSAGE_LIMIT),
        fix=_cut(advice.fix, MESSAGE_LIMIT),
        frames=frames,
        raised_in=raised_in,
        causes=_causes(value),
        node=node,
    )


def advice_on(value: BaseException | None) -> Advice:
    """What is known about an exception, by itself or by an adviser. Never raises: there is another error to report."""
    if isinstance(value, LockstepError) and (value.lead or value.cause or value.fix):
        return Advice(lead=value.lead, cause=value.cause, fix=value.fix)
    for adviser in _advisers:
        with suppress(Exception):
            if value is not None and (found := adviser(value)) is not None:
                return found
    if isinstance(value, ModuleNotFoundError) and value.name:
        return Advice(
            cause=f"{value.name} is not installed for {sys.executable}, or its name is misspelled.",
            fix="Install it into that environment, or start the job with the Python that has it.",
        )
    return Advice()


def _causes(value: BaseException | None) -> tuple[str, ...]:
    """The other errors of a chain or group: "KeyError at data.py:12 in load: 'label'"."""
    found = []
    with suppress(Exception):
        for error in list(walk_chain(value))[1:]:
            line = line_of(error)
            message = first_line(message_of(error))
            text = f"{type(error).__name__}{f' at {line}' if line else ''}{f': {message}' if message else ''}"
            found.append(_cut(text if len(text) <= 300 else f"{text[:297]}...", 400))
    return (*found[:_CAUSES], *([f"{len(found) - _CAUSES} more"] if len(found) > _CAUSES else []))


def of_this_process(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> CrashReport:
    """The same, with rank and attempt from the environment that the launcher gave this process."""
    environ = env.snapshot()
    attempt = environ.get("LOCKSTEP_ATTEMPT", "")
    local_rank = _number(environ.get("LOCAL_RANK"))
    node = _number(environ.get("GROUP_RANK")) if _number(environ.get("GROUP_WORLD_SIZE")) > 1 else None
    rank = rank_in(environ)
    return from_exception(kind, value, trace, rank=rank, local_rank=local_rank, attempt=attempt, node=node)


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


def format_traceback(
    kind: type[BaseException], value: BaseException | None, trace: TracebackType | None, *, short: bool = False
) -> str:
    """As Python prints it, without the frames that start the script; ``short``: with the user's own frames only.

    Never raises.
    """
    if value is None:
        return f"{kind.__name__}\n"
    try:
        try:
            return _format(kind, value, trace, short)
        except RuntimeError:  # maybe of a signal's handler: torch's raises wherever it is when a loader's worker died
            return _format(kind, value, trace, short)
    except Exception as error:
        return f"<the traceback cannot be made: {type(error).__name__}>\n"


def _format(kind: type[BaseException], value: BaseException, trace: TracebackType | None, short: bool) -> str:
    whole = tracebacks.TracebackException(kind, value, trace)
    for part in walk_chain(whole, suppressed=True):
        kept = [frame for frame in part.stack if not is_machinery(frame.filename)]
        users = [frame for frame in kept if is_users(frame.filename)] if short else []
        # A script that does not parse has no frame of its own, but says where by itself.
        if kept or issubclass(kind, SyntaxError):
            part.stack[:] = users or kept
    return "".join(whole.format())


def line_of(value: BaseException) -> str:
    """The last line of the user's own code on the way to an error: ``train.py:12 in main``."""
    return _line(value, value.__traceback__)


def _line(value: BaseException | None, trace: TracebackType | None) -> str:
    last = user = None
    while trace is not None:
        code = trace.tb_frame.f_code
        last = (code.co_filename, trace.tb_lineno, code.co_name)
        if is_users(code.co_filename):
            user = last
        trace = trace.tb_next
    if isinstance(value, SyntaxError) and value.filename and (user is None or is_users(value.filename)):
        return f"{shorten(value.filename)}:{value.lineno}"
    chosen = user or last
    return "" if chosen is None else f"{shorten(chosen[0])}:{chosen[1]} in {chosen[2]}"


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
        "tuple[str, ...]": isinstance(value, list) and all(isinstance(text, str) for text in value),
        "tuple[CodeFrame, ...]": isinstance(value, list),
    }
    if not fits[kind]:
        raise ValueError(f"{name} is not of type {kind}")
    if name == "frames":
        return tuple(CodeFrame.from_dict(frame) for frame in value)
    return tuple(value) if isinstance(value, list) else value


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
