"""What is on the screen when a job has failed: the first failure as the whole story, the other ranks in a line."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.blackbox.snapshot import Snapshot
from lockstep.errors import first_line
from lockstep.guard.crash import Crash, different_calls
from lockstep.guard.diagnosis import RankLocation
from lockstep.guard.node_exchange import Node
from lockstep.guard.rank_location import at, label, last_seen
from lockstep.guard.remedies import KILLED, ended_rank_cause
from lockstep.guard.source import excerpt
from lockstep.host.processes import name_signal
from lockstep.rundir.code_frames import CodeFrame, is_users, shorten
from lockstep.rundir.crash_report import Advice, CrashReport, first_failure
from lockstep.rundir.format_ranks import name_ranks
from lockstep.rundir.printable import printable, uncoloured
from lockstep.terminal.failure_box import FailureBox
from lockstep.terminal.rank_failure import closing, headline, of_report

TITLE = "lockstep launch: the job failed"
_SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault: native code accessed memory that does not belong to it",
    signal.SIGABRT: "abort: a check in native code failed, or memory was corrupted",
    signal.SIGBUS: "bus error: often /dev/shm is full, or a memory-mapped file became shorter",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGILL: "illegal instruction: native code built for another processor",
}
_ENDED: dict[int, str] = {
    signal.SIGINT: "was interrupted (Ctrl-C)",
    signal.SIGTERM: "was asked to stop",
    signal.SIGHUP: "lost its terminal",
    signal.SIGPIPE: "wrote to a pipe that nobody reads",
    signal.SIGXCPU: "used up its CPU time limit",
}
_TAIL = 12
"""Lines of a rank's stderr that are shown when it left no crash report."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How one rank of this machine ended."""

    rank: int
    code: int
    """Its exit code; negative when a signal ended it."""
    pid: int
    by_us: bool = False
    """Whether the launcher ended it, because another rank had failed."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """What is shown of a job that failed, and how the launcher ends."""

    box: FailureBox
    code: int
    """The exit code of the job."""
    traceback: str = ""
    """Of the first failure, with the frames of libraries."""


def out_of_memory_kills() -> int | None:
    """How often the operating system has killed a process for want of memory; None if it does not count them."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def how_it_ended(code: int, out_of_memory: bool = False) -> str:
    """An exit code or signal as a verb: "exited with code 3", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}{_as_shell(code)}"
    if code == -signal.SIGKILL:
        return f"was killed by {'the operating system (out of memory)' if out_of_memory else 'SIGKILL'}"
    name = name_signal(code)
    if " " in name:
        return f"was ended by {name}"
    if -code in _SIGNALS:
        return f"crashed: {_SIGNALS[-code]} ({name})"
    return f"{_ENDED.get(-code, 'was ended by a signal')} ({name})"


def _as_shell(code: int) -> str:
    """A shell, which --no_python may have started, turns its child's signal into a code."""
    with suppress(ValueError):
        return f" (128 + {code - 128}: {signal.Signals(code - 128).name} in a process it started)" if code > 128 else ""
    return ""


def render_report(
    exits: Sequence[Exit],
    words: Sequence[CrashReport],
    *,
    logs: Path,
    boxes: Sequence[Snapshot] = (),
    crashes: Mapping[int, Crash] | None = None,
    lost: Sequence[Node] = (),
    out_of_memory: bool = False,
    last_errors: Mapping[int, bytes | bytearray] | None = None,
    nodes: int = 1,
) -> FailureReport:
    """What is shown, and the exit code of the job.

    ``boxes`` show what a rank without a crash report was doing, ``last_errors`` the end of what each rank wrote to
    stderr.
    """
    own = {ended.rank: ended for ended in exits}
    reports = _of_these(exits, words)
    first = _first(exits, reports)
    ended, report = own[first], reports.get(first)
    code = _code(ended, report)
    if lost and (ended.by_us or (report is not None and report.follows)):
        where = f", at {report.line}" if report is not None and report.line else ""
        seen = f"its launcher does not answer, and the ranks here lost the connection to it{where}"
        what, _, fix = lost_text(lost, seen).partition("\n")
        others = _others(own, reports, (), out_of_memory)
        entries = closing(Advice(fix=fix), others=others, log=shorten(str(logs)))
        return FailureReport(box=FailureBox(title=TITLE, headline=what, closing=entries), code=code)
    if report is None:
        tail = _tail((last_errors or {}).get(first, b""))
        found = _without_report(ended, boxes, (crashes or {}).get(first), tail, out_of_memory, nodes)
        others = _others(own, reports, (first,), out_of_memory)
        entries = closing(found.advice, others=others, log=f"{shorten(str(logs))}/rank_{first}.err", holds="output")
        box = FailureBox(
            title=TITLE,
            headline=found.headline,
            frames=found.frames,
            details=(*found.advice.details.splitlines(), *tail),
            closing=entries,
        )
        return FailureReport(box=box, code=code)
    report = _with_finished(report, own, boxes)
    same = [rank for rank, other in reports.items() if _key(other) == _key(report) and not other.follows]
    box = of_report(
        report,
        title=TITLE,
        ranks=same if first in same else (first,),
        others=_others(own, reports, (first, *same), out_of_memory),
        log=report.log or f"{shorten(str(logs))}/rank_{first}.err",
    )
    return FailureReport(box=box, code=code, traceback=report.traceback)


def _with_finished(report: CrashReport, own: Mapping[int, Exit], boxes: Sequence[Snapshot]) -> CrashReport:
    """The report of a rank that only lost the connection to one that had come to its end: that one is the cause."""
    done = [rank for rank, ended in own.items() if ended.code == 0 and not ended.by_us]
    if not (report.follows and report.cause_rank is None and not report.lead and done):
        return report
    last = next((box.history[-1] for box in boxes if box.rank == done[0] and box.history), None)
    who = name_ranks(done)
    line = report.line.removesuffix(" in <module>")
    why = ended_rank_cause(RankLocation(ranks=tuple(done), doing="have finished"), [])
    lead = (
        f"{who[:1].upper()}{who[1:]} reached the end of the script{f' after {at(last)}' if last is not None else ''}, "
        f"while rank {report.rank} was still at {line or 'work'}."
    )
    return replace(report, lead=lead, cause=why.cause, fix=why.fix)


def _key(report: CrashReport) -> tuple[str, str, str]:
    """What makes it the same failure on several ranks."""
    return report.kind, report.message, report.line


def _code(ended: Exit, report: CrashReport | None) -> int:
    """The exit code of a job that this rank has failed."""
    if report is not None and ended.by_us:  # it had failed already, and was only not gone yet
        return int(report.message) if report.kind == "SystemExit" and report.message.isdecimal() else 1
    return ended.code if ended.code > 0 else 128 - ended.code if ended.code < 0 else 1


def one_line(
    exits: Sequence[Exit], words: Sequence[CrashReport], boxes: Sequence[Snapshot] = (), out_of_memory: bool = False
) -> str:
    """Who failed first, and of what, in one sentence."""
    reports = _of_these(exits, words)
    first = _first(exits, reports)
    if first in reports:
        return printable(f"{headline(reports[first]).rstrip('.')}.")
    ended = next(ended for ended in exits if ended.rank == first)
    return printable(_without_report(ended, boxes, None, (), out_of_memory).headline)


def interrupted_at(words: Sequence[CrashReport]) -> str:
    """Where the ranks were when Ctrl-C ended them: "rank 0 at train.py:12; ranks 1-7 at train.py:30"."""
    groups: dict[str, list[int]] = {}
    for report in words:
        if report.kind == "KeyboardInterrupt" and report.line:
            groups.setdefault(report.line.removesuffix(" in <module>"), []).append(report.rank)
    parts = [f"{name_ranks(ranks)} at {line}" for line, ranks in groups.items()]
    return printable("; ".join(parts[:4]) + ("; …" if len(parts) > 4 else ""))


def _box_of(ended: Exit, boxes: Sequence[Snapshot]) -> Snapshot | None:
    """The black box of this process, which outlives it; not one that an earlier job has left in the same directory."""
    return next((box for box in boxes if box.rank == ended.rank and box.pid == ended.pid and not box.closed), None)


def _of_these(exits: Sequence[Exit], words: Sequence[CrashReport]) -> dict[int, CrashReport]:
    """The reports by rank, without those that an earlier job has left in the same directory."""
    pids = {ended.rank: ended.pid for ended in exits}
    return {word.rank: word for word in words if pids.get(word.rank) == word.pid}


def _first(exits: Sequence[Exit], reports: Mapping[int, CrashReport]) -> int:
    codes = {ended.rank: ended.code for ended in exits}
    stopped = [ended.rank for ended in exits if ended.by_us]
    first = first_failure(list(reports.values()), codes, stopped)
    return first if first in codes else exits[0].rank


def lost_text(lost: Sequence[Node], seen: str) -> str:
    """Nodes that left the job without notice, and what to do."""
    who = printable(", ".join(map(str, lost)))
    return (
        f"{who[:1].upper()}{who[1:]} {'is' if len(lost) == 1 else 'are'} lost: {seen}.\n"
        "Check whether the node is up, its kernel log, and what the scheduler recorded; if it is up, the last lines of "
        "its launcher, and the network to it. Then start the job again from its last checkpoint."
    )


def _others(
    own: Mapping[int, Exit], reports: Mapping[int, CrashReport], shown: Sequence[int], out_of_memory: bool
) -> str:
    """The other ranks in one sentence, by ranges."""
    groups: dict[str, list[int]] = {}
    for rank, ended in own.items():
        if rank not in shown:
            groups.setdefault(_what(ended, reports.get(rank), shown, out_of_memory), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in groups.items())


def _what(ended: Exit, report: CrashReport | None, shown: Sequence[int], out_of_memory: bool) -> str:
    if report is not None and report.follows:
        if report.cause_rank is None:
            return "lost the connection"
        return "stopped because of it" if report.cause_rank in shown else f"stopped because of rank {report.cause_rank}"
    if report is not None:
        text = first_line(report.message)
        said = f"raised {report.kind}{f' at {report.line}' if report.line else ''}{f': {text}' if text else ''}"
        return said if len(said) <= 160 else f"{said[:157]}..."
    if ended.by_us:
        return "ended by the launcher"
    return "had finished" if ended.code == 0 else how_it_ended(ended.code, out_of_memory)


# --- a rank that left no report -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SilentEnd:
    headline: str
    frames: tuple[CodeFrame, ...]
    advice: Advice


def _without_report(
    ended: Exit,
    boxes: Sequence[Snapshot],
    crash: Crash | None,
    tail: Sequence[str],
    out_of_memory: bool,
    nodes: int = 1,
) -> _SilentEnd:
    """What is known of a rank that could not report itself: from its exit code, its black box, and faulthandler."""
    how = how_it_ended(ended.code, out_of_memory)
    box = _box_of(ended, boxes)
    frames = tuple(_frames(crash))
    where = before = ""
    if box is not None:
        doing, site = last_seen(box)
        when = f"after step {box.step}" if box.step else "before its first step"
        where = f", {doing}{f' at {shorten(site)}' if site else ''}, {when}"
        done = next((op for op in reversed(box.history) if op.seq <= box.left), None)
        before = f"The last collective it completed is {at(done)}." if done and label(done) not in doing else ""
        frames = frames or tuple(filter(None, [excerpt(site)]))
    elif frames:
        where = f" at {frames[-1].site}"
    advice = _advice(ended, out_of_memory, tail)
    if box is not None and (clash := different_calls(box, boxes)) is not None:
        advice = clash
    who = f"Its process was {ended.pid} on {box.host if box is not None else socket.gethostname()}."
    before = f"{who} {before}".rstrip()
    advice = Advice(details="\n".join(filter(None, [before, advice.details])), cause=advice.cause, fix=advice.fix)
    on = f" on node {box.node} ({box.host})" if box is not None and nodes > 1 else ""
    return _SilentEnd(headline=f"Rank {ended.rank}{on} {how}{where}.", frames=frames, advice=advice)


def _advice(ended: Exit, out_of_memory: bool, tail: Sequence[str]) -> Advice:
    if ended.code == -signal.SIGKILL and out_of_memory:
        return Advice(
            cause="The host ran out of memory, and the kernel's out-of-memory killer ended the process.",
            fix="Use less host memory: fewer processes or loader workers per node, a smaller prefetch_factor or batch; "
            "or raise the memory limit of the container or the batch system.",
        )
    if ended.code == -signal.SIGKILL:
        return Advice(cause="Killed from outside, or by the operating system because memory ran out.", fix=KILLED)
    if ended.code > 0 and not tail:
        return Advice(
            cause="The process left no exception.", fix="Look for os._exit() or exit() in the script and its libraries."
        )
    return Advice()


def _frames(crash: Crash | None) -> Iterator[CodeFrame]:
    """The user's frames of the stack that faulthandler wrote, innermost last."""
    for frame in crash.stack if crash is not None else ():
        if is_users(frame.file):
            read = excerpt(f"{frame.file}:{frame.line}", frame.function)
            yield read or CodeFrame(file=shorten(frame.file), line=frame.line, function=frame.function)


def _tail(written: bytes | bytearray) -> tuple[str, ...]:
    text = uncoloured(written.decode(errors="replace"))
    # By "\n" alone: of a progress bar, which goes back by "\r", only the last state counts.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]
    shown = tuple(f"  {line}" for line in lines[-_TAIL:])
    return ("The last lines it wrote to stderr:", *shown) if any(line.strip() for line in lines) else ()
