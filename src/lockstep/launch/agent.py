"""Several processes on this machine, under torch's elastic agent: ranks, meeting other machines, restarts, signals.

What is added to torch's agent: each rank's output goes through ours, the guard's verdict ends it, no process is left
behind, and the second signal kills at once. How machines meet is in `rendezvous`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from lockstep.blackbox.snapshot import Snapshot
from lockstep.config import env
from lockstep.config.stall import read_stall_seconds
from lockstep.errors import TopologyError
from lockstep.guard.node_exchange import Node
from lockstep.guard.watcher import WATCHED, RenderedDiagnosis, Watcher
from lockstep.job_store.signed_store import SignedStore, read_secret
from lockstep.launch import failure_report, leftovers, rendezvous
from lockstep.launch.failure_report import Exit
from lockstep.launch.output import Output
from lockstep.launch.plan import LaunchPlan
from lockstep.rundir import constants
from lockstep.rundir.layout import RunDirectory
from lockstep.torch_internals.elastic import ElasticAgent

_OBEDIENCE = 2.0
"""Seconds in which ranks that the guard has stopped end by themselves, before they are killed."""
_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""What a terminal sends, and whoever starts a job in the background may have it ignore."""
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
"""How torch ends a process whose collective got other data than it asked for."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the processes of this machine ended."""

    exits: tuple[Exit, ...] = ()
    """Each rank; empty when all went well."""
    signal: int | None = None
    """The signal that ended the launcher."""
    verdict: str = ""
    """The guard's box, where it stopped the job."""
    saved: bool = False
    """Whether the ranks were told to go, and have saved their state."""
    lost: tuple[Node, ...] = ()
    """Nodes that did not answer when the ranks here had failed."""


class Streams(LogsSpecs):
    """Gives each rank the two ends that ``Output`` has opened for it."""

    def __init__(self, output: Output, logs: Path) -> None:
        super().__init__(log_dir=str(logs))
        self._output = output
        self._logs = logs
        self._starts = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called at each start of the ranks; the files of a restart lie in a folder of their own."""
        folder = self._logs / f"attempt_{self._starts}" if self._starts else self._logs
        self._starts += 1
        ends = {local: self._output.open(int(names["RANK"]), folder) for local, names in envs.items()}
        for names in envs.values():  # torch gives these to the ranks
            names[constants.LOG_FILE] = str(folder / f"rank_{names['RANK']}.err")
        return LogsDest(
            stdouts={local: f"/dev/fd/{end['out']}" for local, end in ends.items()},
            stderrs={local: f"/dev/fd/{end['err']}" for local, end in ends.items()},
            error_files={local: str(self._logs / f"rank_{names['RANK']}.error") for local, names in envs.items()},
        )

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self._logs)


class Agent(ElasticAgent):
    """Torch's agent for the ranks of one machine."""

    def __init__(
        self, spec: WorkerSpec, logs: Streams, output: Output, grace: float, tell: Callable[[str], None]
    ) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=300)
        self._output = output
        self._ignored = [number for number in _TERMINAL if signal.getsignal(number) is signal.SIG_IGN]
        self._grace = grace
        self._tell = tell
        self.on_failure: Callable[[tuple[Exit, ...]], str] | None = None
        """Called with the exits of an attempt that failed; the line that is shown when it is tried again."""
        self.on_start: Callable[[WorkerGroup], None] | None = None
        """Called each time the ranks have been started."""
        self.exits: tuple[Exit, ...] = ()
        self.verdict: RenderedDiagnosis | None = None
        """What the guard found, once it has stopped the job."""
        self._judged = 0.0
        self._word = threading.Event()

    def judge(self, found: RenderedDiagnosis) -> None:
        """Called by the guard's thread. The job is over; the main thread sees to it."""
        self.verdict, self._judged = found, time.monotonic()
        self._word.set()

    def await_verdict(self) -> None:
        """After a failure: another machine may have found out by now why. Ranks that lost their peers do not know."""
        if self.verdict is None:
            self._word.wait(_OBEDIENCE)

    def after_start(self, worker_group: WorkerGroup) -> None:
        """Called each time the ranks have been started."""
        for number in self._ignored:  # as nohup wants it; torch 2.9 handles them all the same
            signal.signal(number, signal.SIG_IGN)
        self._output.started()
        if self.on_start is not None:
            self.on_start(worker_group)
        self.close_streams()
        for handler in self.handlers.values():
            # Torch would signal those, too, that clean up after the others.
            group = handler.proc.pid
            handler.close = lambda death_sig=None, group=group: leftovers.signal_group(
                group, death_sig or signal.SIGTERM
            )
        self.limit_close(self._grace)

    def monitor(self, worker_group: WorkerGroup) -> RunResult:
        """Called again and again: see how the ranks are."""
        if self.verdict is not None and time.monotonic() - self._judged > _OBEDIENCE:
            self._kill_all()
        before = {local: handler.proc.poll() for local, handler in self.handlers.items()}
        result = super().monitor(worker_group)
        if result.is_failed():
            self.exits = self._read_exits(worker_group, before)
            self._sweep()
            if self.verdict is not None or self.saved:
                self.restarts_left = 0  # starting it again would only bring it back there, or was not meant
            if self.restarts_left and self.on_failure is not None:
                left = self.restarts_left - 1
                self._tell(f"{self.on_failure(self.exits)} Starting again ({left} restarts left).")
        return result

    @property
    def saved(self) -> bool:
        """Whether all ranks of this machine have ended, none in another way than by saving first when told to go."""
        codes = [handler.proc.poll() for handler in self.handlers.values()]
        return constants.SAVED in codes and set(codes) <= {constants.SAVED, 0}

    def pass_on(self, number: int) -> None:
        """Send a signal to every rank of this machine."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _read_exits(self, worker_group: WorkerGroup, before: dict[int, int | None]) -> tuple[Exit, ...]:
        exits = []
        for worker in worker_group.workers:
            process = self.handlers[worker.local_rank].proc
            code = process.poll()
            # Those that were running when the first failure was seen, and ended by the signal it was answered with.
            by_us = before[worker.local_rank] is None and code in (-signal.SIGTERM, -signal.SIGKILL, None)
            ended = code if code is not None else -signal.SIGKILL
            exits.append(Exit(rank=worker.global_rank, code=ended, pid=process.pid, by_us=by_us))
        if all(ended.by_us or not ended.code for ended in exits):  # killed between our look and torch's
            exits = [Exit(rank=ended.rank, code=ended.code, pid=ended.pid) for ended in exits]
        return tuple(exits)

    def pids(self) -> frozenset[int]:
        """The processes of this attempt."""
        return frozenset(handler.proc.pid for handler in self.handlers.values())

    def _kill_all(self) -> None:
        leftovers.end_groups(self.pids())

    def excuse(self) -> None:
        """Tell agents that wait for this one at the end of the job not to, if any are there."""
        with contextlib.suppress(RuntimeError):
            super().excuse()

    def _sweep(self) -> None:
        """End what ranks that are gone have left running: each has a process group of its own."""
        handlers = self.handlers.values()
        leftovers.end_groups(handler.proc.pid for handler in handlers if handler.proc.poll() is not None)

    def end_workers(self, death_sig: signal.Signals) -> None:
        """End the ranks; a second signal kills them."""

        def kill(*_: Any) -> None:
            self._tell("second signal: killing the processes.")
            self._kill_all()

        with _handled({signal.SIGINT: kill, signal.SIGTERM: kill}):
            super().end_workers(death_sig)
        self._sweep()


def run(
    plan: LaunchPlan,
    logs: Path,
    output: Output,
    tell: Callable[[str], None],
    show: Callable[[str], None],
    on_failure: Callable[[tuple[Exit, ...]], str],
) -> Ending:
    """Start the ranks of this node and stay until they have ended. ``show`` prints a text of the guard's as it is."""
    quiet_torch()
    meeting = rendezvous.open_rendezvous(plan, tell)
    spec = WorkerSpec(
        role=plan.value("role", "default"),
        local_world_size=plan.per_machine,
        entrypoint=plan.argv[0],
        # Torch takes these for templates, in which "$$" is a "$".
        args=tuple(word.replace("$", "$$") for word in plan.argv[1:]),
        rdzv_handler=meeting,
        max_restarts=plan.value("max_restarts", 0),
        monitor_interval=plan.value("monitor_interval", 0.1),
        local_addr=plan.address,
        numa_options=_numa() if plan.value("enable_cpu_affinity", False) else None,
    )
    agent = Agent(spec, Streams(output, logs), output, plan.value("grace", 30.0), tell)
    agent.on_failure = on_failure
    watcher = _watcher(agent, show, plan, meeting)
    env.publish({WATCHED: "1"})
    closing = True
    lost: list[Node] = []
    passing = {signal.SIGUSR1: lambda number, _: agent.pass_on(number)}
    try:
        with _handled(passing):
            result = agent.run()
        if result is not None and result.is_failed():
            if agent.verdict is None and any(ended.code in _CRASHES and not ended.by_us for ended in agent.exits):
                agent.verdict = watcher.check_after_crash()
            if plan.machines > 1:
                agent.await_verdict()
                if agent.verdict is None:
                    lost = watcher.find_lost()
                if agent.node_rank == 0:
                    watcher.announce_end()
            meeting.call_store(agent.excuse, None)
    except SignalException as error:
        closing = False  # torch's own rule: a machine that is told to go leaves the job open for others
        return Ending(signal=int(error.sigval), saved=agent.saved)
    except RendezvousTimeoutError as error:
        raise TopologyError(
            f"Of {plan.machines} machines not all came to {plan.endpoint} in time. Start the same command on each, "
            "with its own --machine_rank; `--rdzv_conf join_timeout=SECONDS` waits longer."
        ) from error
    except RendezvousConnectionError as error:
        # Machine 0 hosts the meeting. When it has ended because of a verdict, we have heard of that.
        result = None
        if agent.verdict is None:
            if not agent.pids():
                raise rendezvous.unreachable(plan) from error
            raise _store_lost(plan, watcher.find_lost()) from error
    finally:
        watcher.close()
        agent._sweep()
        if closing:
            meeting.shutdown()
    verdict = agent.verdict.screen() if agent.verdict is not None else ""
    saved = not verdict and agent.saved
    failed = (result is None or result.is_failed()) and not saved
    return Ending(exits=agent.exits if failed else (), verdict=verdict, saved=saved, lost=tuple(lost))


def _watcher(
    agent: Agent, show: Callable[[str], None], plan: LaunchPlan, meeting: rendezvous.NodeRendezvous
) -> Watcher:
    """The guard over the ranks of this machine."""
    environ = env.snapshot()

    def mine(box: Snapshot) -> bool:
        # A run directory can be shared by machines, and hold the boxes of an earlier attempt.
        return box.pid in agent.pids()

    watcher = Watcher(
        RunDirectory(path=Path(environ[constants.VARIABLE])),
        tell=show,
        stop=agent.judge,
        stall=read_stall_seconds(environ),
        mine=mine,
        restarts=lambda: agent.restarts_left > 0,
    )

    def meet(group: WorkerGroup) -> None:
        attempt = env.snapshot().get("LOCKSTEP_ATTEMPT", "")
        store = agent.job_store
        watcher.join(
            lambda: SignedStore(store.clone(), read_secret(env.snapshot()), f"lockstep/guard/{attempt}"),
            group.group_rank or 0,
            group.group_world_size or 1,
            meeting.nodes,
            lambda: rendezvous.obstacle_to(plan),
        )

    if plan.machines > 1:
        agent.on_start = meet
    watcher.start()
    return watcher


def quiet_torch() -> None:
    """Torch's agent logs what we say ourselves, in our own words."""
    import logging

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _numa() -> Any:
    """Torch's own way to keep a process on the cores that are near its accelerator. Untested: it needs one."""
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode.NODE)


def _store_lost(plan: LaunchPlan, lost: Sequence[Node]) -> TopologyError:
    if lost:
        seen = f"its launcher does not answer at {plan.endpoint}, and the processes here were ended"
        return TopologyError(failure_report.lost_text(lost, seen))
    return TopologyError(
        f"The meeting point {plan.endpoint} has gone: the launcher on machine 0 has ended, and the processes here were "
        "ended too. Its last lines say why."
    )


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
