"""How a run ended: one `Outcome` per rank, and `RanksFailed`, which tells the story in the order it happened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LOST_PEER
from lockstep.host.processes import name_signal

DIED = "Died"
TIMED_OUT = "TimedOut"
STOPPED = "Stopped"

_TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank's call ended."""

    rank: int
    """Which rank."""
    ok: bool
    """The function returned, and the rank could be reset afterwards."""
    value: Any = None
    """What it returned."""
    error_type: str | None = None
    """The exception's class name, or "Died", "TimedOut", "Stopped" (by the harness, after another rank failed)."""
    error_line: str = ""
    """The error in one line."""
    error_text: str = ""
    """The traceback; for a death what ended the process, in words; for a time-out the stacks of all threads."""
    exit_code: int | None = None
    """Of a process that ended by itself: its code, or minus the signal's number."""
    output: str = ""
    """What the process wrote to stdout and stderr during the run, C++ included."""
    seconds: float = 0.0
    """From the start of the run to this end."""


class RanksFailed(Exception):
    """A function did not return on every rank. The text starts with the failure that came first."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        """One per rank, in rank order."""
        self.failures = in_order([outcome for outcome in outcomes if not outcome.ok])
        """Those that failed, the first failure first."""
        super().__init__(_story(name, self.outcomes, self.failures))


def in_order(failures: Sequence[Outcome]) -> list[Outcome]:
    """Failures as they happened, those the harness itself caused last.

    A rank notes the time of its exception, but a death is noted by the parent, a moment late. By then another rank
    may have failed because of it: a complaint about a lost peer comes after a death.
    """
    deaths = any(outcome.error_type == DIED for outcome in failures)

    def when(outcome: Outcome) -> tuple[bool, bool, float]:
        lost_peer = outcome.error_type != DIED and LOST_PEER.search(outcome.error_text) is not None
        return outcome.error_type == STOPPED, deaths and lost_peer, outcome.seconds

    return sorted(failures, key=when)


def describe_exit(code: int | None) -> str:
    """The end of a process in words."""
    if code is None:
        return "closed its connection to the harness, but is still running"
    if code >= 0:
        return f"exited with code {code} before the function returned"
    name = name_signal(code)
    hints = {"SIGKILL": "kill -9, or out of memory", "SIGABRT": "an abort in native code", "SIGSEGV": "a bad pointer"}
    return f"killed by {name}" + (f" ({hints[name]})" if name in hints else "")


def innermost_frame(stacks: str) -> str:
    """Where the main thread was, from faulthandler's text, which lists the main thread last."""
    last = stacks.rpartition("hread 0x")[2]
    frame = re.search(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)', last)
    return f"{frame['name']}, {frame['file']}:{frame['line']}" if frame else ""


def _story(name: str, outcomes: Sequence[Outcome], failures: Sequence[Outcome]) -> str:
    first, *others = failures
    size = len(outcomes)
    if first.error_type == TIMED_OUT:
        late = [outcome for outcome in failures if outcome.error_type == TIMED_OUT]
        lines = [f"{name}: {len(late)} of {size} ranks had not finished after {first.seconds:.1f} s"]
        for outcome in late:
            lines += ["", f"rank {outcome.rank} of {size}: {outcome.error_text.rstrip()}"]
        others = [outcome for outcome in failures if outcome not in late]
    else:
        verb = "died" if first.error_type == DIED else "failed"
        lines = [
            f"{name}: rank {first.rank} of {size} {verb} first, after {first.seconds:.2f} s: {first.error_line}",
            "",
            first.error_text.rstrip(),
        ]
        if first.error_type == DIED:
            del lines[1:]  # the text is the line
    if others:
        lines += ["", "then:"]
        lines += [f"  rank {o.rank}, {o.seconds - first.seconds:+.2f} s: {o.error_line}" for o in others]
    finished = [str(outcome.rank) for outcome in outcomes if outcome.ok]
    if finished:
        lines += ["", f"returned: rank {', '.join(finished)}"]
    for outcome in outcomes:
        written = outcome.output.splitlines()
        if written:
            left_out = len(written) - _TAIL_LINES
            note = f" (last {_TAIL_LINES} of {len(written)} lines)" if left_out > 0 else ""
            lines += ["", f"output of rank {outcome.rank}{note}:"]
            lines += [f"  | {line}" for line in written[-_TAIL_LINES:]]
    return "\n".join(lines)
