"""Training on several processes from a notebook: `notebook_launcher`, and `debug_launcher` for tests.

Both call a function on every rank and return what it returned there, in rank order. When a rank fails they raise
`RankFailed`, whose text is the story: the first failure in full, the others in a line each.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.config import env
from lockstep.config.choices import PrecisionType
from lockstep.errors import ConfigError, RankFailed, UsageError, first_line
from lockstep.host import hardware, network
from lockstep.job_store import signed_store
from lockstep.launch.fork_pool import Ended, Forks
from lockstep.launch.fork_worker import RankEnvironment, RankFunction
from lockstep.launch.notebook_store import (
    FAREWELL,
    LOOPBACK,
    Nodes,
    NotebookStore,
    RemoteFailure,
    port_error,
    rendezvous,
)
from lockstep.rundir import crash_report


class _Default(str):
    """A default that can be told from the same text given by the user."""


_PORT = _Default("29500")
_PRECISION = _Default("no")
_BACKENDS = ("static", "c10d")
_IN_A_RANK = ("LOCKSTEP_LAUNCH", "TORCHELASTIC_RUN_ID")


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = _PRECISION,
    use_port: str | int = _PORT,
    master_addr: str = LOOPBACK,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on several processes and return what each returned, in rank order.

    The processes are forked, so functions and data of cells are there. One process is this one. With several machines,
    run the same call on each, with its own ``node_rank``; each returns the values of its own ranks.

    Args:
        function: What to run. It makes its own `Accelerator`.
        args: Its arguments.
        num_processes: Processes on this machine: by default one for each accelerator, else one.
        mixed_precision: "no", "fp16" or "bf16": what `Accelerator()` takes when it is not told otherwise.
        use_port: Where the processes meet. When the default is taken, the next free one is used.
        master_addr: The address of machine 0.
        node_rank: The number of this machine.
        num_nodes: How many machines.
        rdzv_backend: "static": machines have the numbers they are given; "c10d": they agree on them by themselves.
        rdzv_endpoint: ``host:port`` to meet at, instead of ``master_addr`` and ``use_port``.
        rdzv_conf: Settings of torch's rendezvous; for "static" there is one, "timeout": seconds to wait for machines.
        rdzv_id: The name of the job: machines with another one are refused.
        max_restarts: How often to start again after a failure.
        monitor_interval: Seconds between looks at the processes.
        log_line_prefix_template: Put before each line of output; may hold ``${rank}`` and ``${local_rank}``.

    Raises:
        RankFailed: The function failed on a rank. (On one process the exception is the function's own.)
        UsageError: This process is not in a state to fork from; the text says what to do.
        ConfigError: Arguments that cannot be honoured, all of them.
    """
    __tracebackhide__ = True
    ask = _Ask(
        function=function,
        args=args,
        num_processes=num_processes,
        mixed_precision=mixed_precision,
        use_port=use_port,
        master_addr=master_addr,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_conf=dict(rdzv_conf or {}),
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        prefix=log_line_prefix_template,
    )
    ask = _checked(ask)
    if ask.num_processes == 1 and ask.num_nodes == 1:
        return [_run_here(ask)]
    outcome = _run_forked(ask)
    if isinstance(outcome, RankFailed):
        raise outcome  # here, so that a notebook shows no frame of ours but this one
    return outcome


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> list[Any]:
    """Call ``function(*args)`` on several CPU processes of this machine, for tests; what each returned, in rank order.

    Raises:
        RankFailed: The function failed on a rank.
        UsageError: This process is not in a state to fork from; the text says what to do.
        ConfigError: Arguments that cannot be honoured, all of them.
    """
    __tracebackhide__ = True
    ask = _Ask(function=function, args=args, num_processes=num_processes, use_port=_Default("0"), cpu=True)
    outcome = _run_forked(_checked(ask))
    if isinstance(outcome, RankFailed):
        raise outcome
    return outcome


# ---------------------------------------------------------------- what was asked for


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """The arguments of a call; after `_checked`, with what was left open filled in."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    num_processes: int | None
    mixed_precision: str = _PRECISION
    use_port: str | int = _PORT
    master_addr: str = LOOPBACK
    node_rank: int = 0
    num_nodes: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] = field(default_factory=dict)
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    prefix: str | None = None
    cpu: bool = False
    """Whether the ranks compute on the CPU."""


def _checked(ask: _Ask) -> _Ask:
    """The call with everything settled; one error for all that is wrong with it."""
    environ = env.snapshot()
    said = env.lookup("cpu", environ)
    if said is not None and not ask.cpu:
        ask = replace(ask, cpu=env.parse_flag(said[1], said[0]))
    devices, kind = (0, "none") if ask.cpu else hardware.accelerators(environ)
    count = ask.num_processes if ask.num_processes is not None else max(1, devices)
    settled = replace(ask, num_processes=count, cpu=devices == 0)
    wrong = [*_wrong_call(settled), *_wrong_count(settled, devices, kind), *_wrong_nodes(settled)]
    if not wrong:
        wrong += _wrong_port(settled)
    alone = settled.num_processes == 1 and settled.num_nodes == 1
    misplaced = list(_misplaced(environ, alone=alone, kind=kind, devices=devices))
    if wrong:
        raise ConfigError.of([*wrong, *misplaced])
    if len(misplaced) == 1:
        raise UsageError(misplaced[0])
    if misplaced:
        raise UsageError("\n".join(f"  {number}. {text}" for number, text in enumerate(misplaced, 1)))
    return settled


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_call(ask: _Ask) -> Iterator[str]:
    if not callable(ask.function):
        yield (
            f"function={ask.function!r} cannot be called. Give the function itself, and its arguments as args: "
            "notebook_launcher(train, args=(1e-3,))."
        )
    if not isinstance(ask.args, (tuple, list)):
        yield f"args={ask.args!r} is no tuple. For one argument write args=({ask.args!r},)."
    try:
        PrecisionType.parse(ask.mixed_precision, "mixed_precision")
    except ConfigError as error:
        yield str(error)
    if not _is_number(ask.max_restarts) or ask.max_restarts < 0:
        yield f"max_restarts={ask.max_restarts!r} is not a number of restarts. Give 0 or more."
    interval = ask.monitor_interval
    if not isinstance(interval, (int, float)) or isinstance(interval, bool) or not interval > 0:
        yield f"monitor_interval={interval!r} is not a time. Give seconds, more than 0."


def _wrong_count(ask: _Ask, devices: int, kind: str) -> Iterator[str]:
    count: Any = ask.num_processes
    if not _is_number(count) or count < 1:
        yield f"num_processes={count!r} is not a number of processes. Give 1 or more, or leave it out."
    elif devices and count > devices:
        yield (
            f"num_processes={count}: this machine has {devices} {kind} device{'s' if devices > 1 else ''}. Give "
            f"at most {devices}, or set LOCKSTEP_USE_CPU=1 to train on the CPU."
        )


def _wrong_nodes(ask: _Ask) -> Iterator[str]:
    nodes: Any = ask.num_nodes
    if not _is_number(nodes) or nodes < 1:
        yield f"num_nodes={nodes!r} is not a number of machines. Give 1 or more."
    elif not _is_number(ask.node_rank) or not 0 <= ask.node_rank < nodes:
        yield f"node_rank={ask.node_rank!r}: with num_nodes={nodes} it is one of 0 to {nodes - 1}."
    if ask.rdzv_backend not in _BACKENDS:
        yield f"rdzv_backend={ask.rdzv_backend!r} is not known here. Allowed: {', '.join(map(repr, _BACKENDS))}."
    if ask.rdzv_backend == "static":
        for name in sorted(set(ask.rdzv_conf) - {"timeout"}):
            yield f"rdzv_conf: {name!r} means nothing to rdzv_backend='static'. Allowed: 'timeout'."
    if _port_of(ask) is None:
        yield f"use_port={ask.use_port!r} is not a port. Give a number from 1 to 65535."
    elif nodes != 1 and _port_of(ask) == 0:
        yield "use_port=0: several machines have to know the port before. Give a number from 1 to 65535."


def _port_of(ask: _Ask) -> int | None:
    _, _, text = ask.rdzv_endpoint.rpartition(":")
    try:
        port = int(text if ":" in ask.rdzv_endpoint else ask.use_port)
    except (TypeError, ValueError):
        return None
    return port if 0 <= port < 65536 else None


def _is_fixed(ask: _Ask) -> bool:
    """Whether another port would not do."""
    return ask.num_nodes > 1 or bool(ask.rdzv_endpoint) or not isinstance(ask.use_port, _Default)


def _wrong_port(ask: _Ask) -> Iterator[str]:
    port = _port_of(ask)
    forks = ask.num_nodes > 1 or ask.num_processes != 1
    hosts = ask.node_rank == 0 and ask.rdzv_backend == "static"
    if forks and hosts and port and _is_fixed(ask) and not hardware.is_free(port):
        yield str(port_error(port))


def _misplaced(environ: Mapping[str, str], *, alone: bool, kind: str, devices: int) -> Iterator[str]:
    """What about this process makes it unfit to fork ranks from."""
    ranked = "RANK" in environ and "WORLD_SIZE" in environ and "LOCAL_RANK" in environ
    if ranked or any(name in environ for name in _IN_A_RANK):
        yield (
            f"This process is itself rank {environ.get('RANK', '?')} of a job, and cannot start another inside it. "
            "Call the launcher from a notebook or a plain Python process."
        )
        return
    if alone:
        return
    current = sys.modules.get("lockstep.current")
    distributed = sys.modules.get("torch.distributed")
    if current is not None and current.peek() is not None:
        yield (
            "An Accelerator (or PartialState) was made in this process already; the processes forked from it would all "
            "believe to be that one. Restart the kernel, and make the Accelerator inside the function."
        )
    elif distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield (
            "torch.distributed is initialised in this process already. Restart the kernel, and leave "
            "init_process_group to the Accelerator that is made inside the function."
        )
    if devices and _is_initialized(kind):
        yield (
            f"{kind.upper()} is in use in this process already, and cannot be used by processes forked from it. "
            "Restart the kernel, and make models, tensors on the device and the Accelerator inside the function."
        )


def _is_initialized(kind: str) -> bool:
    import torch

    ask = getattr(getattr(torch, kind, None), "is_initialized", None)
    return ask is not None and bool(ask())


# ---------------------------------------------------------------- running it


def _settings(ask: _Ask) -> dict[str, str | None]:
    """What `Accelerator()` is to find in the environment. A default does not override what is set there."""
    settings: dict[str, str | None] = {}
    if not isinstance(ask.mixed_precision, _Default) or env.lookup("mixed_precision", env.snapshot()) is None:
        precision = PrecisionType.parse(ask.mixed_precision, "mixed_precision")
        settings[env.VARIABLES["mixed_precision"][0]] = str(precision)
    return settings


def _run_here(ask: _Ask) -> Any:
    """One process needs no other. An Accelerator that the function makes does not outlive the call."""
    __tracebackhide__ = True
    before = _session()
    for restarts_left in range(ask.max_restarts, -1, -1):
        try:
            with env.patched(_settings(ask)):
                return ask.function(*ask.args)
        except Exception as error:
            if not restarts_left:
                raise
            _log_restart(f"{type(error).__name__}: {error}", ask.max_restarts - restarts_left + 1, ask.max_restarts)
        finally:
            if before is None and _session() is not None:
                sys.modules["lockstep.current"].reset()
    raise AssertionError("the last time returns or raises")


def _session() -> Any:
    current = sys.modules.get("lockstep.current")
    return None if current is None else current.peek()


def _log_restart(why: str, number: int, most: int) -> None:
    print(f"{why}\nStarting again: restart {number} of {most}.", file=sys.stderr, flush=True)


def _run_forked(ask: _Ask) -> list[Any] | RankFailed:
    __tracebackhide__ = True
    import torch  # noqa: F401  # once here, not once in every rank

    secret = signed_store.read_secret(env.snapshot()) or (secrets.token_hex(32) if ask.num_nodes == 1 else "")
    with _meeting(ask, secret) as meeting:
        for attempt in range(ask.max_restarts + 1):
            meeting.begin(attempt)
            call = RankFunction(function=ask.function, args=tuple(ask.args), threads=_threads(ask), kept=meeting.store)
            places = [_place(ask, meeting, local, attempt, secret) for local in range(ask.num_processes or 1)]
            ended = Forks(call, places, interval=ask.monitor_interval, prefix=ask.prefix).run(meeting.news)
            del call  # with the store in it, which is to go before the next one
            outcome = _outcome(ended, meeting)
            if not isinstance(outcome, RankFailed) or attempt == ask.max_restarts:
                return outcome
            _log_restart(first_line(outcome), attempt + 1, ask.max_restarts)
    raise AssertionError("the last attempt returns")


@contextmanager
def _meeting(ask: _Ask, secret: str) -> Iterator[NotebookStore]:
    conf = dict(ask.rdzv_conf)
    nodes = Nodes(
        number=ask.num_nodes,
        rank=ask.node_rank,
        processes=ask.num_processes or 1,
        address=ask.rdzv_endpoint.rpartition(":")[0].strip("[]") or ask.master_addr,
        port=_port_of(ask) or 0,
        fixed_port=_is_fixed(ask),
        run_id=ask.rdzv_id,
        patience=float(conf.get("timeout", Nodes.patience)),
    )
    leave = None
    if ask.rdzv_backend != "static":
        endpoint = ask.rdzv_endpoint or f"{ask.master_addr}:{nodes.port}"
        rank, address, port, leave = rendezvous(ask.rdzv_backend, endpoint, ask.rdzv_id, conf, ask.num_nodes, secret)
        nodes = replace(nodes, rank=rank, address=address, port=port, hosted=True)
    meeting = NotebookStore(nodes, secret)
    together = False
    try:
        yield meeting
        together = True
    finally:
        if leave is not None:
            leave()
        meeting.close(patience=FAREWELL if together else 0.0)


def _threads(ask: _Ask) -> int:
    """CPU threads for each rank, so that they do not fight for the cores."""
    text = env.snapshot().get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return max(1, hardware.usable_cores() // (ask.num_processes or 1))


def _place(ask: _Ask, meeting: NotebookStore, local_rank: int, attempt: int, secret: str) -> RankEnvironment:
    nodes = meeting.nodes
    rank = nodes.rank * nodes.processes + local_rank
    variables: dict[str, str | None] = {
        **_settings(ask),
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes.number * nodes.processes),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(nodes.processes),
        "GROUP_RANK": str(nodes.rank),
        "GROUP_WORLD_SIZE": str(nodes.number),
        "MASTER_ADDR": nodes.address,
        "MASTER_PORT": str(meeting.port),
        "LOCKSTEP_LAUNCH": "1",
        "LOCKSTEP_ATTEMPT": str(attempt),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(_threads(ask)),
    }
    if secret:
        variables[signed_store.VARIABLE] = secret
    if ask.cpu:
        variables[env.VARIABLES["cpu"][0]] = "1"
    if "GLOO_SOCKET_IFNAME" not in env.snapshot():
        variables["GLOO_SOCKET_IFNAME"] = network.route_to(nodes.address, meeting.port)[1]
    return RankEnvironment(rank=rank, local_rank=local_rank, variables=variables)


def _outcome(ended: Sequence[Ended], meeting: NotebookStore) -> list[Any] | RankFailed:
    """The values of this machine's ranks, or the job's first failure."""
    failed = {end.rank: end for end in ended if not end.returned}
    first = crash_report.first_failure(
        [end.words for end in ended if end.words is not None],
        {end.rank: 0 if end.returned else 1 if end.exit_code is None else end.exit_code or 1 for end in ended},
        [end.rank for end in ended if end.stopped],
    )
    if first is None:
        if meeting.all_done():
            return [end.value for end in ended]
        return _failure(meeting.elsewhere(), ended, meeting)
    if failed[first].stopped and meeting.news():
        return _failure(meeting.elsewhere(), ended, meeting)
    end = failed[first]
    here = RemoteFailure(
        node=meeting.nodes.rank,
        rank=first,
        line=end.in_words(),
        text="" if end.words is None else end.words.traceback,
    )
    follows = end.words is not None and end.words.follows
    return _failure(meeting.report_failure(here, follows=follows), ended, meeting)


def _failure(first: RemoteFailure, ended: Sequence[Ended], meeting: NotebookStore) -> RankFailed:
    """The first failure in full, the other ranks of this machine in a line each."""
    nodes = meeting.nodes
    where = f" (machine {first.node})" if nodes.number > 1 else ""
    lines = [f"rank {first.rank} of {nodes.number * nodes.processes}{where} failed: {first.line}"]
    if "\n  " in first.text:  # where it was; the line itself stands there already
        lines += ["", first.text.rstrip()]
    lines += _hint(first.text)
    others = [end for end in ended if end.rank != first.rank]
    if others:
        lines += ["", "The other ranks here:" if nodes.number > 1 else "The other ranks:"]
        lines += [f"  rank {end.rank}: {end.in_words()}" for end in others]
    mine = next((end for end in ended if end.rank == first.rank), None)
    return RankFailed(
        "\n".join(lines),
        rank=first.rank,
        kind=mine.words.kind if mine is not None and mine.words is not None else None,
        traceback=first.text,
        exit_code=None if mine is None else mine.exit_code,
    )


def _hint(text: str) -> list[str]:
    """What to do about errors whose cause lies in this process, not in the function."""
    if "in forked subprocess" in text or "autograd's threading in combination with fork" in text:
        return [
            "",
            "Something in this process had used the device before the ranks were forked. Restart the kernel, and make "
            "models, run backward and import libraries that use the device inside the function.",
        ]
    return []
