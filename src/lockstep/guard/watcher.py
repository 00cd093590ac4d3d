"""Reads the black boxes of a machine's ranks, and tells or stops when they have fallen out of step.

It runs in ``lockstep launch``, or in a rank where another launcher started the job. Nothing it does touches the ranks
while they move: it reads their files.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lockstep.blackbox import processes, read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.config.stall import STALL_SECONDS
from lockstep.guard import stack_note
from lockstep.guard.diagnose import diagnose
from lockstep.guard.diagnosis import Diagnosis
from lockstep.guard.job import JobSnapshot
from lockstep.guard.node_exchange import Exchange, Node
from lockstep.guard.render import box_of, explain, understand
from lockstep.guard.skipped_backward import warn_of_skip
from lockstep.guard.straggler import QuestionSchedule, Slow, all_wait, find_slow
from lockstep.host.threads import join
from lockstep.rundir import files
from lockstep.rundir.code_frames import shorten
from lockstep.rundir.format_ranks import name_ranks
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.regular_file import read_json
from lockstep.terminal import show

WATCHED = "LOCKSTEP_WATCHED"
"""Set for ranks whose launcher watches over them, and has them write their stacks on SIGUSR2."""
INTERVAL = 0.5
"""Seconds between two looks."""
BLOCKED = 1.0
"""Seconds in one collective after which a rank counts as waiting."""
_SELDOM = 10.0
_LOST = 5.0
"""Seconds without an answer, after a failure, for which a node counts as lost."""
_PACE = "pace"


@dataclass(frozen=True, kw_only=True)
class RenderedDiagnosis:
    """A diagnosis and its text."""

    diagnosis: Diagnosis
    text: str
    """The same as plain text."""
    brief: bool = False
    """Whether the text stands for the diagnosis, which another node shows."""
    logs: str = ""
    """Where more of it is, on this node."""

    def screen(self) -> str:
        """The same for the stderr of this process."""
        return self.text if self.brief else show.render(box_of(self.diagnosis, logs=self.logs))

    def to_dict(self) -> dict[str, Any]:
        """For the watchers of other machines."""
        return {"diagnosis": self.diagnosis.to_dict(), "text": self.text}


class Watcher:
    """The thread that looks."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        tell: Callable[[str], None],
        stop: Callable[[RenderedDiagnosis], None],
        stall: float = STALL_SECONDS,
        mine: Callable[[Snapshot], bool] = lambda box: True,
        restarts: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory = directory
        self._tell = tell
        self._stop = stop
        self._stall = stall
        self._elsewhere: Exchange | None = None
        self._ask_after = 0.0
        self._nodes: dict[int, Node] = {}
        self._unanswered: set[int] = set()
        self._left: set[int] = set()
        """Nodes whose launcher has announced that it ends."""
        self.stopping: float | None = None
        """When it began to stop the job; None before."""
        self._mine = mine
        self._seen: dict[int, int] = {}
        """Rank -> process, of the boxes that the last look found."""
        self._removed = False
        self._restarts = restarts
        self._before: Diagnosis | None = None
        self._told = 0.0
        self._slow: set[tuple[tuple[int, ...], str]] = set()
        self._skipping: set[int] = set()
        self._naming = threading.Lock()
        self._questions = QuestionSchedule()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-guard", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def join(
        self,
        connect: Callable[[], Any],
        node: int,
        nodes: int,
        named: Sequence[Node] = (),
        reach: Callable[[], str] = lambda: "",
    ) -> None:
        """Look together with the watchers of other machines from now on; anew for each start of the ranks.

        ``named`` are the nodes, where they are known; ``reach`` gives what is in the way to the store, if anything is.
        """
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._questions = QuestionSchedule()
        self._nodes = {one.number: one for one in named}
        self._left.clear()
        self._elsewhere = Exchange(
            connect, node=node, nodes=nodes, boxes=self._answer, receive=self._receive, reach=reach
        )

    def find_lost(self) -> list[Node]:
        """After a failure: nodes whose watcher does not answer, though it has not left the job."""
        elsewhere = self._elsewhere
        if elsewhere is None:
            return []
        until = time.monotonic() + 2 * _LOST
        while elsewhere.collect(self._merged(), patience=_LOST) is None and time.monotonic() < until:
            time.sleep(INTERVAL)  # another asks: its round comes first
        return [
            self._nodes[number] for number in elsewhere.silent if number in self._nodes and number not in self._left
        ]

    def announce_end(self) -> None:
        """Called on: the node that hosts the store, which ends with it. The others do not take it for lost then."""
        if self._elsewhere is not None:
            self._elsewhere.publish({"leaves": self._elsewhere.node})

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            join(self._thread, 5)
        if self._elsewhere is not None:
            self._elsewhere.close(self._merged())

    def _run(self) -> None:
        stumbled = False
        while not self._ending.wait(INTERVAL):
            try:
                found = self.poll()
            except Exception:  # without this thread nobody would find out why the job stands still
                if not stumbled:
                    stumbled = True
                    self._tell(f"lockstep guard: an internal error; the guard continues:\n{traceback.format_exc()}")
                continue
            if found is not None and found.diagnosis.certain:
                if self._elsewhere is not None:
                    self._elsewhere.publish(found.to_dict())
                self._end(found)
                return

    def _receive(self, message: dict[str, Any]) -> None:
        """What another machine's watcher has found."""
        if "leaves" in message:
            self._left.add(int(message["leaves"]))
            return
        if "slow" in message:
            self._questions.put_off(time.monotonic())
            slow = Slow.from_dict(message["slow"])
            if self._is_new(slow) and self._is_first:
                self._tell(f"lockstep guard: {slow.line()}")
            return
        found = RenderedDiagnosis(diagnosis=Diagnosis.from_dict(message["diagnosis"]), text=message["text"])
        if found.diagnosis.certain:
            self._ending.set()
            self._end(found)
        elif self._is_first:
            self._report(found)

    def _end(self, found: RenderedDiagnosis) -> None:
        self.stopping = time.monotonic()
        write_down(self._directory, found)
        if not self._is_first:  # one box for the whole job, on the first node's screen
            where = f"In full on the screen of node 0, and in {self._directory.diagnosis_text}."
            text = f"{found.diagnosis.headline} {where}"
            found = RenderedDiagnosis(diagnosis=found.diagnosis, text=text, brief=True)
        self._stop(self._placed(found))

    def _report(self, found: RenderedDiagnosis) -> None:
        write_down(self._directory, found)
        self._tell(self._placed(found).screen())

    def _placed(self, found: RenderedDiagnosis) -> RenderedDiagnosis:
        """The same, with where its files are on this node."""
        return replace(found, logs=f"{shorten(str(self._directory.path))} (diagnosis.json, logs/)")

    @property
    def _is_first(self) -> bool:
        return self._elsewhere is None or self._elsewhere.node == 0

    def poll(self) -> RenderedDiagnosis | None:
        """One look: a certain finding that a second look has confirmed, or None; what is not certain is told."""
        merged = self._merged()
        if not any(_suspicious(box) for box in merged) and not _differ(merged):
            self._before, self._told = None, 0.0
            self._check_stragglers(merged)
            self._check_skipped_backwards(merged)
            return None
        everybody = self._everybody(merged)
        if everybody is None:
            return None
        found = diagnose(
            everybody,
            blocked_for=BLOCKED,
            stall=self._stall,
            lost=self._silent(),
            node=self._nodes.get(self._elsewhere.node) if self._elsewhere is not None else None,
            restarts=self._restarts(),
        )
        before, self._before = self._before, found
        if found is None:
            return None
        if found.certain:
            # Boxes are read one after the other; what a second look sees again was no accident of that.
            if before is not None and before.certain and _same(before, found):
                return RenderedDiagnosis(diagnosis=understand(found), text=explain(found))
            return None
        if found.seconds >= max(self._stall, 2 * self._told):
            self._told = found.seconds
            shown = RenderedDiagnosis(diagnosis=understand(found), text=explain(found))
            cut_off = self._elsewhere is not None and 0 in self._elsewhere.silent
            if self._elsewhere is None or self._is_first or cut_off:
                self._report(shown)
            else:
                self._elsewhere.publish(shown.to_dict())
        return None

    def _silent(self) -> list[Node]:
        """Nodes that did not answer twice in a row, where their names are known: one answer may come too late."""
        before, self._unanswered = self._unanswered, set(self._elsewhere.silent if self._elsewhere is not None else ())
        return [self._nodes[number] for number in sorted(before & self._unanswered) if number in self._nodes]

    def check_after_crash(self) -> RenderedDiagnosis | None:
        """After a rank has crashed: whether the ranks meant different things by one collective."""
        merged = self._merged()
        everybody = merged if self._elsewhere is None else self._elsewhere.collect(merged) or merged
        found = diagnose(everybody, blocked_for=0.0)
        if found is None or not found.kind.startswith("different"):
            return None
        shown = RenderedDiagnosis(diagnosis=understand(found), text=explain(found))
        write_down(self._directory, shown)
        if self._elsewhere is not None:
            self._elsewhere.publish(shown.to_dict())
        return shown

    def _everybody(self, mine: list[Snapshot]) -> list[Snapshot] | None:
        """The boxes of all machines; None while another machine's watcher looks at them, or it is too soon again."""
        if self._elsewhere is None:
            return mine
        now = time.monotonic()
        if now < self._ask_after:
            return None
        # The longer it takes, the less often: what may still end can take hours.
        self._ask_after = now + min(0.1 * max((_wait(box) for box in mine), default=0.0), _SELDOM)
        return self._elsewhere.collect(mine)

    def _merged(self) -> list[Snapshot]:
        """The boxes of this machine's ranks, with what their reporters say."""
        return [stack_note.merged(box, stack_note.place(self._directory.boxes, box.rank)) for box in self.boxes()]

    def _answer(self, about: str) -> list[Snapshot]:
        """For another machine's watcher: one question about who is slow is enough for the job."""
        if about == _PACE:
            self._questions.put_off(time.monotonic())
        return self._merged()

    def _check_stragglers(self, boxes: Sequence[Snapshot]) -> None:
        """Name a rank that the others wait for in every step, once, and on the first machine's screen."""
        slow = find_slow(boxes)
        now = time.monotonic()
        if slow is None and self._elsewhere is not None and self._questions.due(all_wait(boxes), now):
            self._questions.put_off(now)
            slow = find_slow(self._elsewhere.collect(boxes, about=_PACE) or ())
        if slow is None or not self._is_new(slow):
            return
        if self._elsewhere is None or self._is_first or not self._elsewhere.publish({"slow": slow.to_dict()}):
            self._tell(f"lockstep guard: {slow.line()}")

    def _check_skipped_backwards(self, boxes: Sequence[Snapshot]) -> None:
        """Warn of a rank that leaves backwards out, once: the others will wait for it at the end."""
        job = JobSnapshot(boxes=list(boxes), blocked_for=BLOCKED, stall=self._stall)
        found = warn_of_skip(job.here, job.histories) if boxes and not job.reforming else None
        if found is not None and found[0] not in self._skipping:
            self._skipping.add(found[0])
            self._tell(f"lockstep guard: {found[1]}")

    def _is_new(self, slow: Slow) -> bool:
        with self._naming:  # found and heard of at once
            new = (slow.ranks, slow.phase) not in self._slow
            self._slow.add((slow.ranks, slow.phase))
        return new

    def boxes(self) -> list[Snapshot]:
        """The boxes of this machine's ranks."""
        found = [box for box in read.read_all(self._directory.boxes) if self._mine(box)]
        self._check_removed_boxes({box.rank: box.pid for box in found})
        return together(found)

    def _check_removed_boxes(self, found: dict[int, int]) -> None:
        """Report once that boxes of processes that live are gone: whoever waits for a finding waits in vain."""
        seen, self._seen = self._seen, found
        removed = [rank for rank, pid in seen.items() if rank not in found and processes.started(pid)]
        if removed and not self._removed:
            self._removed = True
            self._tell(
                f"lockstep guard: the black box of {name_ranks(removed)} was removed from {self._directory.boxes}. The "
                "job continues, but the guard does not see the rank any more: that it falls out of step is not found, "
                "nor what it was doing if it is killed."
            )


def together(boxes: Sequence[Snapshot]) -> list[Snapshot]:
    """Those of the latest session, and those of processes that are gone for good.

    A process can leave the job and join again; until it has, its old box says nothing about the new session.
    """
    latest = max((_session(box) for box in boxes if box.alive), default=None)
    if latest is None:
        return list(boxes)
    names = {box.attempt for box in boxes if box.alive and _session(box) == latest}
    return [box for box in boxes if box.attempt in names or not box.alive]


def _session(box: Snapshot) -> int:
    number = box.attempt.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def _suspicious(box: Snapshot) -> bool:
    """Whether a rank waits, in a collective of ours or of torch's."""
    return _wait(box) >= BLOCKED


def _wait(box: Snapshot) -> float:
    waits = box.op or box.raw
    return box.now - waits.since if waits is not None else 0.0


def _differ(boxes: Sequence[Snapshot]) -> bool:
    """Whether two ranks have entered one collective with different arguments, and went on."""
    seen: dict[tuple[int, int], tuple[str, str]] = {}
    for box in boxes:
        for op in box.history:
            if op.refused:
                continue  # it raised there, and no data was used
            meant = seen.setdefault((box.generation, op.seq), (op.name, op.signature))
            if meant[0] != op.name or (meant[1] and op.signature and meant[1] != op.signature):
                return True
    return False


def _same(one: Diagnosis, other: Diagnosis) -> bool:
    def at(diagnosis: Diagnosis) -> tuple[object, ...]:
        places = (*diagnosis.waiting, *diagnosis.missing)
        return diagnosis.kind, tuple((place.ranks, place.site) for place in places)

    return at(one) == at(other)


def write_down(directory: RunDirectory, found: RenderedDiagnosis) -> None:
    """Keep a finding in the run directory, for people and for programs."""
    said = {**found.diagnosis.to_dict(), "time": time.time()}
    for path, text in ((directory.diagnosis, json.dumps(said, indent=1)), (directory.diagnosis_text, found.text)):
        with suppress(OSError):
            files.replace(path, f"{text}\n".encode(errors="backslashreplace"))


def is_stopped(directory: RunDirectory, since: float) -> bool:
    """Whether the guard has stopped the job, after ``since``: a run directory can be used twice."""
    try:
        if directory.diagnosis.stat().st_mtime < since:
            return False
        said = read_json(directory.diagnosis)
        return bool(said.get("certain")) and said.get("time", 0.0) >= since
    except (OSError, ValueError, AttributeError, TypeError):
        return False
