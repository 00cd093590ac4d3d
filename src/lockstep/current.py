"""The one process-wide slot: which job this process is in.

Rooms are handed what they need. Only the free functions that the guides call without an accelerator
(``gather(tensor)``, ``PartialState()``, ``get_logger``) look here.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config import env, resolve
from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.errors import ConfigError, LockstepError
from lockstep.process_group import child_process, gloo_threads
from lockstep.process_group.excepthook import PeerNotifier
from lockstep.process_group.group import Group
from lockstep.rundir import constants, layout
from lockstep.rundir.error_file import ErrorFile
from lockstep.rundir.layout import RunDirectory
from lockstep.topology import environments, standard_streams
from lockstep.topology.kernel import old_kernel_warning
from lockstep.topology.topology import Topology, discover

if TYPE_CHECKING:
    from lockstep.guard.rank import RankGuard
    from lockstep.training.state import TrainingState


@dataclass
class Session:
    """This process's part in a job."""

    topology: Topology
    """Who this process is."""
    group: Group
    """How it talks to the others."""
    init: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    """What the process group was made with."""
    directory: RunDirectory | None = None
    """The folder of this run; None when the process is alone and nobody gave it one."""
    mixed_precision: str | None = None
    """The precision that the first Accelerator of the process settled; None before."""
    training: TrainingState | None = None
    """That of the newest Accelerator, for what is called without one."""


class _ProcessState:
    def __init__(self) -> None:
        self.session: Session | None = None
        self.joined = 0
        """How often this process has joined a job: each time has its own place in the store."""
        self.stores: dict[str, Any] = {}
        """The store of the last job, by its address."""
        self.peer_notifier = PeerNotifier()
        self.error_file = ErrorFile()
        self.guard: RankGuard | None = None
        self.away = False
        """Whether the session is that of a rank which has started this process."""


_slot = _ProcessState()


def peek() -> Session | None:
    """The session, when there is one; never starts one."""
    return _slot.session


def placement() -> Topology | environments.Placement:
    """This process's place, also before it has joined the job."""
    session = _slot.session
    if session is not None:
        return session.topology
    try:
        return environments.find(env.snapshot())
    except LockstepError:
        # Joining the job raises this where it matters; a line too many is better than a script that dies of logging.
        return environments.Placement(launcher="none", reason="the environment is contradictory")


def require(
    *,
    cpu: bool | None = None,
    init: InitProcessGroupKwargs | None = None,
    debug: bool | None = None,
    check: Callable[[Topology], None] | None = None,
    project_dir: str | None = None,
) -> Session:
    """Called on: all ranks. The session; the first call of the process detects where it runs and joins the job.

    ``cpu=False`` says nothing, as in Accelerate: scripts pass on the default of their own flag. ``check`` may refuse
    the place that was found before the process group is made. ``project_dir`` is where the run directory goes when no
    launcher has made one.
    """
    environ = env.snapshot()
    session = _slot.session
    if session is not None:
        _check_same(session, cpu, init)
        if check is not None:
            check(session.topology)
        if debug is not None:
            session.group.debug = debug
        return session
    standard_streams.reserve()
    cpu = resolve.resolve("cpu", cpu or None, False, environ, env.parse_flag).value
    device = resolve.resolve("device", None, None, environ, resolve.as_text).value
    init = init or InitProcessGroupKwargs()
    topology = discover(environ, cpu=cpu, device=device, backend=init.backend)
    if check is not None:
        check(topology)
    warning = old_kernel_warning()
    if warning is not None and topology.is_local_main:
        warnings.warn(warning, stacklevel=3)
    why = (
        child_process.started_by_a_rank(topology, environ.get(child_process.VARIABLE))
        if topology.world_size > 1
        else ""
    )
    if why:
        _slot.away = True
        _slot.session = Session(topology=topology, group=cast(Group, child_process.DetachedProcessGroup(topology, why)))
        return _slot.session
    if topology.device.type != "cpu":
        import torch

        torch.accelerator.set_device_index(topology.device.index or 0)
    group = Group.connect(
        topology,
        init_method=init.init_method,
        timeout=init.timeout,
        debug=bool(debug),
        session=_slot.joined,
        stores=_slot.stores,
        notify_peers=_slot.peer_notifier.install,
    )
    _slot.joined += 1
    directory = _directory(topology, group, environ.get(constants.VARIABLE), project_dir)
    _slot.session = Session(topology=topology, group=group, init=init, directory=directory)
    if directory is not None and topology.world_size > 1:
        from lockstep.guard.rank import RankGuard  # the guard: a process that is alone does without

        _slot.guard = RankGuard(topology, group, directory, _slot.joined)
    if topology.world_size > 1:
        env.publish(child_process.announce(topology))
    _slot.error_file.install(topology.rank)
    return _slot.session


def _leave_to_parent() -> None:
    """In a child made by fork: the job stays its parent's, whatever the child calls, and however it ends."""
    session = _slot.session
    if session is None or _slot.away or session.topology.world_size == 1:
        return
    _slot.away = True
    _slot.guard, guard = None, _slot.guard
    _slot.error_file.forget()
    _slot.peer_notifier.uninstall()
    child_process.become(session.group, session.topology, os.getppid(), _slot.stores, guard)


def _let_workers_rest() -> None:
    """Before a fork: a child deadlocks if one of gloo's threads asks for the GIL meanwhile."""
    session = _slot.session
    if session is not None and not _slot.away and session.topology.world_size > 1:
        gloo_threads.rest_before_fork(unnamed="gloo" in (session.group.backend or ""))


os.register_at_fork(before=_let_workers_rest, after_in_child=_leave_to_parent)


def _directory(topology: Topology, group: Group, asked: str | None, project_dir: str | None) -> RunDirectory | None:
    """Called on: all ranks. The launcher's run directory; without one, local rank 0 makes it for its machine."""
    if asked and topology.launcher == "lockstep launch":
        return RunDirectory(path=Path(asked))
    if topology.world_size == 1:
        return RunDirectory(path=layout.make(asked, project_dir).path) if asked else None
    key = f"run_directory/{topology.node_rank}"
    if topology.is_local_main:
        made = layout.make(asked, project_dir)
        if made.note is not None:
            warnings.warn(made.note, stacklevel=4)
        group.store.set(key, os.fsencode(made.path.absolute()))
    return RunDirectory(path=group.store.get(key, _read_path))


def _read_path(data: bytes) -> Path:
    path = Path(os.fsdecode(data))
    if not path.is_absolute():
        raise ValueError(path)
    return path


def _check_same(session: Session, cpu: bool | None, init: InitProcessGroupKwargs | None) -> None:
    if cpu and session.topology.device.type != "cpu":
        raise ConfigError(
            f"cpu=True: this process already uses {session.topology.device}. The device is settled by the first "
            "Accelerator or PartialState of the process; pass cpu=True there."
        )
    for name, asked in ({} if init is None else init.to_kwargs()).items():
        in_force = session.group.timeout if name == "timeout" else getattr(session.init, name)
        if asked != in_force:
            raise ConfigError(
                f"InitProcessGroupKwargs.{name}={asked}: the process group exists already, with {in_force}. "
                "Pass it to the first Accelerator or PartialState of the process."
            )


def reset() -> None:
    """Leave the job and forget it, so that the next Accelerator starts anew."""
    session, _slot.session = _slot.session, None
    if _slot.away:
        return
    exited = _slot.error_file.uninstall()
    env.withdraw(child_process.VARIABLE)
    guard, _slot.guard = _slot.guard, None
    _slot.peer_notifier.report_exit(
        session.directory.path if session is not None and session.directory else None, exited
    )
    if guard is not None:
        guard.close(failed=_slot.peer_notifier.message, note=_slot.peer_notifier.note)
    _slot.peer_notifier.uninstall()
    if session is not None:
        session.group.close()
        if session.directory is not None and session.topology.is_local_main:
            layout.sign_out(session.directory)


atexit.register(reset)
