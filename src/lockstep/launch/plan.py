"""From what was asked for to what will be started: a value that can be printed and compared before anything runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.config import env
from lockstep.config.launch import LaunchConfig
from lockstep.config.resolve import Resolved
from lockstep.errors import ConfigError
from lockstep.host import hardware as machine
from lockstep.host import network

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class LaunchTarget:
    """What every rank runs."""

    script: str
    """A file, a module's name, or a program."""
    args: tuple[str, ...] = ()
    kind: str = "script"
    """"script", "module" (``-m``) or "program" (``--no_python``)."""

    def problem(self) -> str | None:
        """Why it cannot be started, in words; None when nothing speaks against it."""
        if self.kind == "program":
            return None if shutil.which(self.script) else f"The program {self.script!r} was not found on the path."
        if self.kind == "script" and not Path(self.script).is_file():
            what = "is a folder" if Path(self.script).is_dir() else "does not exist"
            return f"The script {self.script!r} {what} (looked in {Path.cwd()})."
        return None

    def tokens(self) -> tuple[str, ...]:
        """As it stands at the end of a ``lockstep launch`` command."""
        flag = {"module": ("-m",), "program": ("--no_python",)}.get(self.kind, ())
        return (*flag, self.script, *self.args)

    def argv(self) -> tuple[str, ...]:
        """The command of one rank: the script, run by the shim that keeps its last words."""
        if self.kind == "program":
            return (self.script, *self.args)
        module = ("-m",) if self.kind == "module" else ()
        return (sys.executable, "-m", "lockstep.launch.worker", *module, self.script, *self.args)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What will be started on this node, and why."""

    kind: str
    """"alone" (one process), "agent" (several, under torch's elastic agent), "mpirun" or "srun"."""
    target: LaunchTarget
    """What every rank runs."""
    argv: tuple[str, ...]
    """The command: of each rank, or, for mpirun and srun, of the whole job."""
    env: Mapping[str, str]
    """What is added to the environment of each process."""
    processes: int = 1
    """Ranks on all nodes."""
    per_machine: int = 1
    """Ranks on this node."""
    machines: int = 1
    machine_rank: int | None = None
    """The rank of this node; None when the rendezvous assigns it."""
    endpoint: str = ""
    """The rendezvous endpoint."""
    rdzv_backend: str = "c10d"
    """The rendezvous backend."""
    address: str = LOOPBACK
    """The address of this node, as others see it."""
    options: Mapping[str, Resolved[Any]] = field(default_factory=dict)
    """Every option, with where it came from."""
    notes: tuple[str, ...] = ()
    """What was chosen by itself, one sentence each, for the user."""

    def value(self, name: str, default: Any) -> Any:
        """The option's value, or ``default`` when nobody said anything."""
        found = self.options[name].value if name in self.options else None
        return default if found is None else found

    def to_dict(self) -> dict[str, Any]:
        """For ``--dry-run --json`` and for the run directory."""
        return {
            "kind": self.kind,
            "argv": list(self.argv),
            "env": dict(self.env),
            "processes": self.processes,
            "per_machine": self.per_machine,
            "machines": self.machines,
            "machine_rank": self.machine_rank,
            "endpoint": self.endpoint,
            "rdzv_backend": self.rdzv_backend if self.kind == "agent" else "",
            "address": self.address,
            "options": {name: {"value": found.value, "source": found.source} for name, found in self.options.items()},
            "notes": list(self.notes),
        }


def make_plan(
    options: Mapping[str, Resolved[Any]],
    target: LaunchTarget,
    environ: Mapping[str, str],
    *,
    refused: Sequence[str] = (),
    given: Sequence[str] = (),
    count_accelerators: Any = machine.accelerators,
) -> LaunchPlan:
    """What these options mean on this machine; raises once for all that speaks against it.

    ``refused`` are problems that were found before, and ``given`` the flags as they were typed, which the agents that
    SLURM starts on the nodes are given again.
    """
    problems: list[str] = list(refused)
    try:
        config = LaunchConfig(**{name: found.value for name, found in options.items()})
    except ConfigError as error:
        missing = target.problem()
        raise ConfigError.of([*problems, *error.problems, *([missing] if missing else [])]) from None
    problem = target.problem()
    if problem is not None:
        problems.append(problem)
    maker = _Maker(config, options, target, environ, given, count_accelerators, problems)
    plan = maker.make()
    if problems:
        raise ConfigError.of(problems)
    assert plan is not None
    return plan


class _Maker:
    """Collects problems and notes on the way to a plan."""

    def __init__(
        self,
        config: LaunchConfig,
        options: Mapping[str, Resolved[Any]],
        target: LaunchTarget,
        environ: Mapping[str, str],
        given: Sequence[str],
        count_accelerators: Any,
        problems: list[str],
    ) -> None:
        self.config = config
        self.options = options
        self.target = target
        self.environ = environ
        self.given = given
        self.count_accelerators = count_accelerators
        self.problems = problems
        self.notes: list[str] = []
        self.allocation: Any = None

    def make(self) -> LaunchPlan | None:
        self._contradictions()
        allocation = self.allocation = self._allocation()
        if allocation is not None and allocation.agent:
            machines, machine_rank = allocation.num_nodes, allocation.node_rank
        else:
            machines = self.config.num_machines or (allocation.num_nodes if allocation is not None else 1)
            machine_rank = self.config.machine_rank
        processes, per_machine = self._count(machines)
        if self.problems:
            return None
        variables = self._variables(processes, per_machine)
        if self.config.mpirun_hostfile is not None:
            return self._mpirun(processes, per_machine, machines, variables)
        if allocation is not None and (allocation.needs_srun or (machines > 1 and not allocation.agent)):
            return self._srun(allocation, processes, per_machine, machines)
        if processes == 1 and not self.config.max_restarts and not self.config.enable_cpu_affinity:
            return self._plan("alone", variables=variables)
        return self._agent(processes, per_machine, machines, machine_rank, variables)

    def _allocation(self) -> Any:
        """The SLURM job that this command runs in, unless mpirun is to start the processes."""
        if "SLURM_JOB_ID" not in self.environ or self.config.mpirun_hostfile:
            return None
        from lockstep.launch import slurm

        return slurm.allocation(self.environ)

    def _plan(self, kind: str, *, variables: Mapping[str, str], **more: Any) -> LaunchPlan:
        return LaunchPlan(
            kind=kind,
            target=self.target,
            argv=more.pop("argv", self.target.argv()),
            env=variables,
            options=self.options,
            notes=tuple(self.notes),
            **more,
        )

    # --- what speaks against it --------------------------------------------------------------------------------

    def _contradictions(self) -> None:
        config = self.config
        machines = config.num_machines or 1
        for wrong, text in (
            (config.cpu and config.multi_gpu, "--cpu and --multi_gpu contradict each other. Give one of them."),
            (
                config.cpu and config.gpu_ids not in (None, "all"),
                f"--cpu and --gpu_ids {config.gpu_ids} contradict each other. Give one of them.",
            ),
            (
                config.mixed_precision == "fp8",
                "--mixed_precision fp8 is not supported yet. Allowed: no, fp16, bf16.",
            ),
            (
                config.main_process_ip is not None and config.rdzv_endpoint is not None,
                f"--main_process_ip {config.main_process_ip} and --rdzv_endpoint {config.rdzv_endpoint} both set "
                "the rendezvous endpoint. Give one of them.",
            ),
            (
                config.machine_rank is not None and config.machine_rank >= machines,
                f"--machine_rank {config.machine_rank}: with --num_machines {machines} node ranks are "
                f"0 to {machines - 1}.",
            ),
            (
                config.mpirun_hostfile is not None and bool(config.max_restarts),
                f"--max_restarts {config.max_restarts} is not possible with --mpirun_hostfile: mpirun ends the whole "
                "job when a process fails. Leave one of them out.",
            ),
            (
                config.mpirun_hostfile is not None and config.machine_rank not in (None, 0),
                f"--machine_rank {config.machine_rank} with --mpirun_hostfile: mpirun starts all nodes from one. "
                "Run the command on one node, without --machine_rank.",
            ),
        ):
            if wrong:
                self.problems.append(text)

    def _count(self, machines: int) -> tuple[int, int]:
        """Processes on all nodes, and on this one."""
        config = self.config
        present, name = (0, "none") if config.cpu else self.count_accelerators(self.environ)
        if config.gpu_ids not in (None, "all"):
            self._check_gpu_ids(present)
            present = min(present, len(self._gpu_ids()))
        if config.multi_gpu and not config.cpu and present == 0:
            self.problems.append(
                "--multi_gpu: torch finds no accelerator on this node. Leave it out to train on the CPU, or check "
                "the driver and the build of torch with `lockstep env`."
            )
        if config.enable_cpu_affinity and present == 0:
            self.problems.append(
                "--enable_cpu_affinity binds each process to the cores near its accelerator, but none is used. "
                "Leave it out."
            )
        asked = config.num_processes
        if asked is None:
            per_machine = max(1, present)
            why = f"one per {name}" if present else "no accelerator found, so one"
            if per_machine * machines > 1:
                self.notes.append(f"{per_machine * machines} processes ({why}).")
            return per_machine * machines, per_machine
        if asked % machines:
            self.problems.append(
                f"--num_processes {asked} is not a multiple of --num_machines {machines}: it is the "
                f"total of all nodes. Nearest: {max(1, asked // machines) * machines}."
            )
        per_machine = max(1, asked // machines)
        if present and per_machine > present and self.environ.get("LOCKSTEP_TORCH_DEVICE") != "cpu":
            self.problems.append(
                f"--num_processes {asked} asks for {per_machine} processes on this node, which has {present} "
                f"accelerators ({name}). Ask for {present * machines} at most, or add --cpu."
            )
        return asked, per_machine

    def _check_gpu_ids(self, present: int) -> None:
        asked = self._gpu_ids()
        if not asked or len(set(asked)) < len(asked):
            self.problems.append(f"--gpu_ids {self.config.gpu_ids} must name accelerators, each once: 0,2.")
        elif present == 0 and not self.config.cpu:
            self.problems.append(
                f"--gpu_ids {self.config.gpu_ids}: torch finds no accelerator on this node. Leave it out to train "
                "on the CPU, or check the driver and the build of torch with `lockstep env`."
            )

    def _gpu_ids(self) -> list[str]:
        return [part.strip() for part in str(self.config.gpu_ids).split(",") if part.strip()]

    # --- the environment of each process -----------------------------------------------------------------------

    def _variables(self, processes: int, per_machine: int) -> dict[str, str]:
        """What each rank finds in its environment, beside its rank."""
        config = self.config
        variables = {"LOCKSTEP_LAUNCH": "1", "PYTHONUNBUFFERED": "1"}
        for option in fields(LaunchConfig):
            setting = option.metadata.get("setting")
            value = getattr(config, option.name)
            if setting is None or value is None or self.options[option.name].source.startswith("environment"):
                continue  # what the environment says, the processes inherit
            text = ",".join(str(part) for part in value) if isinstance(value, (list, tuple)) else str(value)
            variables[env.VARIABLES[setting][0]] = text.lower() if isinstance(value, bool) else text
        if config.gpu_ids not in (None, "all"):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpu_ids())
        if processes > 1 or config.num_cpu_threads_per_process is not None:
            self._threads(variables, per_machine)
        return variables

    def _threads(self, variables: dict[str, str], per_machine: int) -> None:
        asked = self.config.num_cpu_threads_per_process
        if asked is not None:
            variables["OMP_NUM_THREADS"] = str(asked)
        elif "OMP_NUM_THREADS" not in self.environ:
            cores = machine.usable_cores()
            threads = max(1, cores // per_machine)
            variables["OMP_NUM_THREADS"] = str(threads)
            self.notes.append(
                f"{threads} CPU thread{'s' if threads > 1 else ''} for each of {per_machine} processes on {cores} "
                "cores; change it with --num_cpu_threads_per_process."
            )

    # --- the four ways to start --------------------------------------------------------------------------------

    def _agent(
        self, processes: int, per_machine: int, machines: int, machine_rank: int | None, variables: dict[str, str]
    ) -> LaunchPlan | None:
        config = self.config
        backend = "c10d" if config.rdzv_backend in (None, "static") else config.rdzv_backend
        address, interface = LOOPBACK, "lo"
        if machines == 1 and config.rdzv_endpoint is None:
            port = config.main_process_port or 0
            if port and not machine.is_free(port):
                self.problems.append(_taken(port))
            endpoint = f"{LOOPBACK}:{port}"
        else:
            meeting = self._rendezvous_endpoint(machines, machine_rank)
            if meeting is None:
                return None
            host, port = meeting
            endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            try:
                address, found = network.route_to(host, port)
            except ConfigError as error:
                self.problems.append(str(error))
                return None
            interface = found or ""
            if machine_rank == 0 and not machine.is_free(port, address) and backend == "c10d":
                self.problems.append(_taken(port))
        if interface and "GLOO_SOCKET_IFNAME" not in self.environ:
            variables["GLOO_SOCKET_IFNAME"] = interface
            if machines > 1:
                self.notes.append(
                    f"network interface {interface} ({address}), by the route to {endpoint}; change it with "
                    "GLOO_SOCKET_IFNAME."
                )
        return self._plan(
            "agent",
            variables=variables,
            processes=processes,
            per_machine=per_machine,
            machines=machines,
            machine_rank=machine_rank,
            endpoint=endpoint,
            rdzv_backend=backend,
            address=address,
        )

    def _rendezvous_endpoint(self, machines: int, machine_rank: int | None) -> tuple[str, int] | None:
        config = self.config
        if config.rdzv_endpoint is not None:
            host, _, port = config.rdzv_endpoint.rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
                self.problems.append(
                    f"--rdzv_endpoint {config.rdzv_endpoint} must be HOST:PORT, with a port up to 65535 and an IPv6 "
                    "address in brackets."
                )
                return None
            return host.strip("[]"), int(port)
        if config.main_process_ip is None and self.allocation is not None and self.allocation.agent:
            from lockstep.launch import slurm

            # Started by srun once per node: every agent computes the same endpoint by itself.
            return self.allocation.hosts[0], config.main_process_port or slurm.rendezvous_port(self.allocation)
        missing = []
        if config.main_process_ip is None:
            missing.append("--main_process_ip (the address of node 0)")
        if machine_rank is None:
            missing.append("--machine_rank (the rank of this node, from 0)")
        if missing:
            self.problems.append(
                f"--num_machines {machines} needs {' and '.join(missing)}; or --rdzv_endpoint HOST:PORT, the same on "
                "every node; node ranks are then assigned."
            )
            return None
        return str(config.main_process_ip), config.main_process_port or 29500

    def _mpirun(self, processes: int, per_machine: int, machines: int, variables: dict[str, str]) -> LaunchPlan | None:
        from lockstep.launch import mpi

        try:
            argv, more = mpi.mpirun_command(
                hostfile=str(self.config.mpirun_hostfile),
                num_machines=machines,
                num_processes=processes,
                main_process_ip=self.config.main_process_ip,
                main_process_port=self.config.main_process_port,
                env=variables,
                argv=list(self.target.argv()),
                environ=self.environ,
            )
        except ConfigError as error:
            self.problems.append(str(error))
            return None
        return self._plan(
            "mpirun",
            variables={**variables, **more},
            argv=tuple(argv),
            processes=processes,
            per_machine=per_machine,
            machines=machines,
        )

    def _srun(self, allocation: Any, processes: int, per_machine: int, machines: int) -> LaunchPlan:
        from lockstep.launch import slurm

        port = self.config.main_process_port or slurm.rendezvous_port(allocation)
        again = [sys.executable, "-m", "lockstep", "launch", *self.given, "--num_machines", str(machines)]
        again += ["--main_process_ip", allocation.hosts[0], "--main_process_port", str(port), *self.target.tokens()]
        argv = slurm.srun_command(
            allocation, num_processes_per_node=per_machine, port=port, argv_of_lockstep_launch=again, num_nodes=machines
        )
        self.notes.append(f"inside SLURM job {allocation.job_id}: one agent on each of {machines} nodes.")
        return self._plan(
            "srun",
            variables={},
            argv=tuple(argv),
            processes=processes,
            per_machine=per_machine,
            machines=machines,
        )


def _taken(port: int) -> str:
    free = machine.next_free(port)
    return (
        f"Port {port} is in use on this node. Free now: {free} (--main_process_port {free}); on a single node, 0 "
        "takes any free port."
    )
