"""What a rank does so that others see where it is: its box, its reporter, and a watcher where no launcher has one."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from lockstep.blackbox import layout, processes
from lockstep.blackbox.box import open_box
from lockstep.blackbox.peers import Peers, box_path
from lockstep.blackbox.read import read_box, read_header
from lockstep.blackbox.snapshot import Snapshot
from lockstep.blackbox.step_clock import StepClock
from lockstep.config import env
from lockstep.config.stall import read_stall_seconds
from lockstep.guard import dead_peers, stack_note
from lockstep.guard.mismatch import entered, mismatch
from lockstep.guard.rank_location import RANGES
from lockstep.guard.reporter import STOPPED, Reporter
from lockstep.guard.sigterm import SigtermReport
from lockstep.guard.watcher import WATCHED, RenderedDiagnosis, Watcher, is_stopped
from lockstep.host import memory_fence
from lockstep.job_store.signed_store import SignedStore, from_text
from lockstep.process_group.group import Group
from lockstep.process_group.monitor import Monitor
from lockstep.rundir import error_file, files
from lockstep.rundir.crash_report import Advice
from lockstep.rundir.format_ranks import name_ranks
from lockstep.rundir.layout import RunDirectory
from lockstep.terminal import show
from lockstep.terminal.rank_failure import of_advice
from lockstep.topology.standard_streams import print_error
from lockstep.topology.topology import Topology

_NO_FENCE = (
    "lockstep guard: collectives are not compared between the ranks of this node before they run: this processor may "
    "reorder what ranks write and read, and nothing here orders it. Install libatomic (libatomic1), or let the "
    "container call membarrier. Ranks out of step are found a moment later, when they wait."
)
_PRINTING = 5.0
"""Seconds in which a watcher has printed what it found, unless nobody reads it."""
REMOTE = "standing/{rank}"
"""Where in the job's store a rank says that it stands still: generation, collective, and in words."""


class RankGuard(Monitor):
    """This rank's part in the guard."""

    def __init__(self, topology: Topology, group: Group, directory: RunDirectory, session: int) -> None:
        super().__init__()
        self._group, self._topology = group, topology
        self._began = time.time()
        boxes = directory.boxes
        job = f"{_name(group)}.{session}"
        first = topology.rank - topology.local_rank
        self.box = open_box(
            box_path(boxes, topology.rank),
            rank=topology.rank,
            world_size=topology.world_size,
            local_rank=topology.local_rank,
            node=topology.node_rank,
            host=os.uname().nodename,
            pid=os.getpid(),
            attempt=job,
            device=str(topology.device),
        )
        if self.box.reason:
            self._report_no_box(self.box.reason)
        self.boxes = boxes
        self.clock = StepClock()
        group.monitor = self
        fence = memory_fence.make()
        if fence is not None:
            ranks = range(first, first + topology.local_world_size)
            self.box.compare_with(Peers(boxes, topology.rank, ranks, fence), self._refuse)
        elif topology.is_local_main:
            print_error(_NO_FENCE)
        watched = WATCHED in env.snapshot()
        self._had_faulthandler = faulthandler.is_enabled()
        self._stacks = None if watched else _write_stacks_on_signal(directory, topology.rank)
        in_main = threading.current_thread() is threading.main_thread()
        self._sigterm = SigtermReport(self._report_dead) if in_main and not watched else None
        self._directory, self._job = directory, job
        self._before_me = [] if watched else [box_path(boxes, rank) for rank in range(first, topology.rank)]
        self._watcher: Watcher | None = None
        self._posted: tuple[int, int, int] | None = None
        self._store: SignedStore | None = None
        if topology.is_local_main and not watched:
            self._begin_to_watch()
        self._reporter = Reporter(
            self.box,
            stack_note.place(boxes, topology.rank),
            self._is_stopped,
            self.clock,
            self._take_over,
            self._post if topology.num_nodes > 1 else lambda _: None,
            self._before_stop,
        )

    def find_dead(self) -> list[Snapshot]:
        """The boxes of ranks of this node that have died."""
        return dead_peers.find_dead(self.boxes, self._group.rank)

    def find_left(self) -> list[Snapshot]:
        """The boxes of ranks of this node that came to the end of the script, and not to this rank's collective."""
        return dead_peers.find_left(self.boxes, self._group.rank)

    def advise_on_dead(self, dead: Sequence[Snapshot]) -> Advice:
        """Who died, what each was doing, what to do."""
        return dead_peers.advise_on_dead(dead, self.boxes)

    def advise_on_left(self, left: Sequence[Snapshot], doing: str = "") -> Advice:
        """Who came to the end of the script, the likely cause, and what to do."""
        return dead_peers.advise_on_left(left, doing)

    def _report_no_box(self, reason: str) -> None:
        """Once on each node: ranks that share a run directory mostly share what is wrong with it."""
        topology = self._topology
        with suppress(RuntimeError):
            if self._group.store.claim(f"no_box/{topology.node_rank}", str(topology.rank), int) != topology.rank:
                return
        print_error(
            f"lockstep guard: rank {topology.rank} has no black box: {reason}. The job continues, but the rank's "
            "collectives are not compared with those of others, that it falls out of step is not found, nor what it "
            "was doing if it is killed. Make room there, or set LOCKSTEP_RUN_DIR to a folder on another disk."
        )

    def _is_stopped(self) -> bool:
        """Whether the guard has stopped the job, and this process is to end. Its own watcher prints why before."""
        prints = self._watcher.stopping if self._watcher is not None else None
        if prints is not None and time.monotonic() - prints < _PRINTING:
            return False
        return is_stopped(self._directory, self._began)

    def _refuse(self, name: str, number: int, other: int) -> None:
        """Another rank means a different collective by this number: raise before data moves."""
        group = self._group
        assert self.boxes is not None
        if group.debug and "backward" not in (name, entered(self.boxes, other, number)):
            return  # there all ranks compare with all, and all of them raise; but nothing precedes a backward
        error = mismatch(self.boxes, group.rank, number, other)
        self.box.leave(number, refused=True)
        raise error

    def _report_dead(self, ends: bool) -> None:
        """This rank is asked to end. If a rank of the node has died, the lowest one that lives reports it."""
        group, boxes = self._group, self._directory.boxes
        dead = self.find_dead()
        silent = {box.rank for box in dead}
        before_me = range(group.rank - self._topology.local_rank, group.rank)
        lower = filter(None, (read_box(box_path(boxes, rank)) for rank in before_me if rank not in silent))
        if dead and all(box.closed in ("failed", "finished") for box in lower if box.attempt == self._job):
            title = f"lockstep guard: {name_ranks(silent, RANGES)} died"
            # Not through sys.stderr, whose lock the main thread may hold.
            print_error(show.render(of_advice(title, self.advise_on_dead(dead))))
        if ends:
            self.box.close(layout.ASKED_TO_END)  # ranks that are asked next do not take this one for dead

    def _before_stop(self) -> None:
        """The guard stops the job: its finding is what ends this rank, for torchrun's summary and for the others."""
        self.box.close(layout.STOPPED)
        with suppress(OSError):
            error_file.write("stopped by the lockstep guard", self._directory.diagnosis_text.read_text().rstrip())

    def _begin_to_watch(self) -> None:
        self._watcher = _watcher(self._topology, self._directory, self._job, self._before_stop)
        if self._topology.num_nodes > 1:
            self._watcher.join(lambda: _connect(self._group), self._topology.node_rank, self._topology.num_nodes)

    def _take_over(self) -> None:
        """The lowest rank of the machine watches; when it has died, the next one does."""
        while self._before_me:
            lowest = read_header(self._before_me[0])
            # One that has not come yet will come, and one of an earlier job says nothing.
            if (
                lowest is None
                or lowest.attempt != self._job
                or processes.find_process(lowest.pid, lowest.started).alive
            ):
                return
            del self._before_me[0]
            if not self._before_me:
                self._begin_to_watch()

    def _post(self, mark: tuple[int, int, int], words: str = "waits in another collective") -> None:
        """For ranks of other nodes, which do not see this one's box: where it stands still."""
        generation, entered, left = mark
        if mark == self._posted or entered == left or self._group.store_lost:
            return
        self._posted = mark
        with suppress(RuntimeError):
            if self._store is None:
                self._store = self._group.store.clone()
            self._store.set(REMOTE.format(rank=self._topology.rank), f"{generation} {entered} {words}")

    def close(self, failed: str = "", note: str = "") -> None:
        """The rank leaves the job: in good order, of which ``note`` says more, or with this exception."""
        if self._watcher is not None:
            self._watcher.close()
        self._reporter.stop()
        if self._topology.num_nodes > 1:
            self._post((self._group.generation, -1, 0), "has failed" if failed else "has finished")
        if self._sigterm is not None and threading.current_thread() is threading.main_thread():
            self._sigterm.close()
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR2)
            if not self._had_faulthandler:
                faulthandler.disable()
            self._stacks.close()
        self.box.close("failed" if failed else "finished", failed or note)
        self.clock = None


def _write_stacks_on_signal(directory: RunDirectory, rank: int) -> TextIO | None:
    """What the launcher's shim does for its ranks: SIGUSR2 writes the stacks of all threads, even out of C++."""
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return None  # the script's own
    try:
        files.make_folder(directory.stacks)
        file = open(directory.stack(rank), "w", opener=files.private)  # noqa: SIM115  # stays open
    except OSError:
        return None
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file)
    return file


def _restarts() -> bool:
    """Whether torchrun starts the ranks again when one has failed."""
    environ = env.snapshot()
    count, most = (environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count.isdecimal() and most.isdecimal() and int(count) < int(most)


def _name(group: Group) -> str:
    """Called on: all ranks. A name that no other job has: two may be given one run directory."""
    if group.rank == 0:
        group.store.set("job", uuid.uuid4().hex)
    name: str = group.store.get("job", from_text)
    return name


def _connect(group: Group) -> SignedStore:
    """A connection of its own to the store that all ranks share, and a corner of it for the guard."""
    return group.store.clone().under("guard")


def _watcher(topology: Topology, directory: RunDirectory, job: str, before_stop: Callable[[], None]) -> Watcher:
    """For a job that another launcher started: local rank 0 watches over the ranks of its machine."""

    def stop(found: RenderedDiagnosis) -> None:
        print_error(found.screen())
        before_stop()
        os._exit(STOPPED)  # the others see what was written down, and follow

    def mine(box: Snapshot) -> bool:
        return box.node == topology.node_rank and box.attempt == job

    stall = read_stall_seconds(env.snapshot())
    watcher = Watcher(directory, tell=print_error, stop=stop, stall=stall, mine=mine, restarts=_restarts)
    watcher.start()
    return watcher
