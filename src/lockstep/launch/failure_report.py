"""What the screen says last when a job fails: the first failure in full, the others in a line each."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.blackbox.snapshot import Snapshot
from lockstep.errors import first_line
from lockstep.guard.crash import Crash, different_calls, format_stack
from lockstep.guard.node_exchange import Node
from lockstep.guard.rank_location import last_steps
from lockstep.guard.remedies import KILLED
from lockstep.host.processes import name_signal
from lockstep.rundir.crash_report import CrashReport, first_failure
from lockstep.rundir.format_ranks import name_ranks
from lockstep.rundir.printable import printable, uncoloured

_SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault: native code touched memory that is not its own",
    signal.SIGABRT: "aborted itself: a check in native code failed, or memory was corrupted",
    signal.SIGBUS: "bus error: often /dev/shm is full, or a memory-mapped file became shorter",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGILL: "illegal instruction: native code built for another processor",
    signal.SIGINT: "interrupted (Ctrl-C)",
    signal.SIGTERM: "asked to end",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGPIPE: "wrote to something that nobody reads",
    signal.SIGXCPU: "used up its CPU time limit",
}
_TAIL = 20
"""Lines of a rank's stderr that are shown when it left no words."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How one rank of this machine ended."""

    rank: int
    """Which rank."""
    code: int
    """Its exit code; negative when a signal ended it."""
    pid: int
    """Its process."""
    by_us: bool = False
    """Whether the launcher ended it, because another rank had failed."""


def out_of_memory_kills() -> int | None:
    """How often the operating system has killed a process for want of memory; None if it does not tell."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def in_words(code: int, out_of_memory: bool = False) -> str:
    """An exit code or signal in plain words."""
    if code >= 0:
        return f"ended with exit code {code}{_as_shell(code)}"
    if code == -signal.SIGKILL:
        if out_of_memory:
            return "killed by the operating system, out of memory"
        return "killed (SIGKILL): from outside, or by the operating system if memory ran out"
    name = name_signal(code)
    return f"ended by {name}" if " " in name else f"{_SIGNALS.get(-code, 'ended by a signal')} ({name})"


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
) -> tuple[str, int]:
    """The text for the screen, and the exit code of the job.

    ``boxes`` show what a rank without words was doing, ``last_errors`` the end of what each rank wrote to stderr.
    """
    own = {ended.rank: ended for ended in exits}
    said = _of_these(exits, words)
    first = _first(exits, said)
    ended = own[first]
    lines = [_rule("the job failed"), f"Output of each rank: {logs}"]
    words_of_first = said.get(first)
    if lost and (ended.by_us or (words_of_first is not None and words_of_first.follows)):
        where = f", at {words_of_first.line}" if words_of_first is not None and words_of_first.line else ""
        seen = f"its launcher does not answer, and the ranks here lost the connection to it{where}"
        lines += [*_followers(own, said, None, out_of_memory), "", lost_text(lost, seen)]
        return printable("\n".join(lines)), _code(ended, words_of_first)
    # The first failure last, where the eye falls.
    lines += [*_followers(own, said, first, out_of_memory), ""]
    tail = _tail((last_errors or {}).get(first, b""))
    lines += _in_full(ended, said.get(first), boxes, (crashes or {}).get(first), tail, out_of_memory)
    return printable("\n".join(lines)), _code(ended, said.get(first))


def _code(ended: Exit, words: CrashReport | None) -> int:
    """The exit code of a job that this rank has failed."""
    if words is not None and ended.by_us:  # it had failed already, and was only not gone yet
        return int(words.message) if words.kind == "SystemExit" and words.message.isdecimal() else 1
    return ended.code if ended.code > 0 else 128 - ended.code if ended.code < 0 else 1


def one_line(
    exits: Sequence[Exit], words: Sequence[CrashReport], boxes: Sequence[Snapshot] = (), out_of_memory: bool = False
) -> str:
    """Who failed first, and of what, in one sentence."""
    said = _of_these(exits, words)
    first = _first(exits, said)
    ended = next(ended for ended in exits if ended.rank == first)
    if first in said:
        return printable(f"Rank {first} failed at {said[first].line}: {_one_line(said[first])}.")
    box = _box_of(ended, boxes)
    return printable(
        f"Rank {first} failed: {in_words(ended.code, out_of_memory)}.{f' {last_steps(box)}' if box else ''}"
    )


def _box_of(ended: Exit, boxes: Sequence[Snapshot]) -> Snapshot | None:
    """The black box of this process, which outlives it; not one that an earlier job has left in the same directory."""
    return next((box for box in boxes if box.rank == ended.rank and box.pid == ended.pid and not box.closed), None)


def _of_these(exits: Sequence[Exit], words: Sequence[CrashReport]) -> dict[int, CrashReport]:
    """The words by rank, without those that an earlier job has left in the same directory."""
    pids = {ended.rank: ended.pid for ended in exits}
    return {word.rank: word for word in words if pids.get(word.rank) == word.pid}


def _first(exits: Sequence[Exit], said: Mapping[int, CrashReport]) -> int:
    codes = {ended.rank: ended.code for ended in exits}
    stopped = [ended.rank for ended in exits if ended.by_us]
    first = first_failure(list(said.values()), codes, stopped)
    return first if first in codes else exits[0].rank


def lost_text(lost: Sequence[Node], seen: str) -> str:
    """Nodes that have left the job without a word, and what to do."""
    who = printable(", ".join(map(str, lost)))
    return (
        f"{who[:1].upper()}{who[1:]} {'is' if len(lost) == 1 else 'are'} lost: {seen}.\n"
        "Look whether the node is up, at its kernel log and at what the scheduler recorded; if it is up, at the last "
        "lines of its launcher, and at the network to it. Then start the job again from its last checkpoint."
    )


def _followers(
    own: Mapping[int, Exit], said: Mapping[int, CrashReport], first: int | None, out_of_memory: bool
) -> list[str]:
    lines: dict[str, list[int]] = {}
    for rank, ended in own.items():
        if rank == first:
            continue
        words = said.get(rank)
        if words is not None and words.follows:
            what = f"followed rank {words.cause_rank}" if words.cause_rank is not None else "lost the connection to it"
        elif words is not None:
            what = _one_line(words)
        elif ended.by_us:
            what = "ended by the launcher"
        else:
            what = "had finished" if ended.code == 0 else in_words(ended.code, out_of_memory)
        lines.setdefault(what, []).append(rank)
    return [f"{name_ranks(ranks)}: {what}" for what, ranks in lines.items()]


def _in_full(
    ended: Exit,
    words: CrashReport | None,
    boxes: Sequence[Snapshot],
    crash: Crash | None,
    tail: Sequence[str],
    out_of_memory: bool,
) -> list[str]:
    host = words.host if words is not None else socket.gethostname()
    who = f"Rank {ended.rank} on {host} (pid {ended.pid}) failed first"
    if words is not None and words.kind == "SystemExit":
        return [f"{who}: it left with sys.exit({words.message}), at {words.line}."]
    if words is not None and words.lead:
        seen = [words.lead, f"{who}, at {words.line}, where it noticed:"]
        return [*seen, "", words.traceback.rstrip(), *(["", words.advice] if words.advice else [])]
    if words is not None:
        return [f"{who}, at {words.line}:", "", words.traceback.rstrip(), *(["", words.advice] if words.advice else [])]
    lines = [f"{who}: {in_words(ended.code, out_of_memory)}."]
    box = _box_of(ended, boxes)
    if box is not None:
        lines += [last_steps(box), *filter(None, [different_calls(box, boxes)])]
    if ended.code == -signal.SIGKILL and not out_of_memory:
        lines.append(KILLED)
    if crash is not None and crash.stack:
        lines += ["Its Python stack:", "", *format_stack(crash.stack), ""]
    if tail:
        lines += ["The last it wrote to stderr:", "", *tail]
    elif ended.code > 0:
        lines.append("It left no exception: look for sys.exit, os._exit or exit() in the script.")
    return lines


def _tail(written: bytes | bytearray) -> list[str]:
    text = uncoloured(written.decode(errors="replace"))
    # By "\n" alone: of a progress bar, which goes back by "\r", only the last state counts.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]
    return [f"  {line}" for line in lines[-_TAIL:]] if any(line.strip() for line in lines) else []


def _one_line(words: CrashReport) -> str:
    said = first_line(words.message)
    first = f"{words.kind}: {said}" if said else words.kind
    return first if len(first) <= 160 else first[:157] + "..."


def _rule(title: str) -> str:
    return f"──── lockstep launch: {title} ".ljust(80, "─")
