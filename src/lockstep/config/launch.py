"""The options of ``lockstep launch``: one field each, from which its flags are made.

A field's metadata says which group of the help it stands in, what it means, and by which other names it can be set. A
value of None means that nobody said anything; the plan then chooses, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.config import env
from lockstep.config.recording import parse_recording
from lockstep.config.resolve import Resolved
from lockstep.errors import ConfigError

GROUPS = {
    "hardware": "Hardware",
    "resources": "Processes and resources",
    "precision": "Precision and compilation",
    "debug": "Debugging",
    "network": "Nodes and rendezvous",
    "output": "Output",
    "paradigm": "Not supported yet; each is refused with the reason",
}
"""Group of flags -> its heading in the help."""

RELATED = {"multi_gpu": ("hardware", "resources", "network"), "cpu": ("hardware", "resources", "network")}
"""A flag that, given with ``-h``, shows more groups than its own."""

PRECISIONS = ("no", "fp16", "bf16", "fp8")
"""What Accelerate knows; fp8 is refused with the reason, and not offered."""


def _option(group: str, text: str, *, kind: type = str, metavar: str | None = None, **more: Any) -> Any:
    return field(default=None, metadata={"group": group, "help": text, "kind": kind, "metavar": metavar, **more})


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Everything ``lockstep launch`` can be told, by flag, variable or file."""

    cpu: bool | None = _option("hardware", "train on the CPU, even if there are accelerators", kind=bool, setting="cpu")
    multi_gpu: bool | None = _option(
        "hardware", "use the accelerators of this node; an error if there are none", kind=bool
    )
    gpu_ids: str | None = _option("hardware", "accelerators to use, by index: 0,2 (or all)", metavar="IDS")

    num_processes: int | None = _option(
        "resources",
        "total number of processes on all nodes; default: one per accelerator, else one",
        kind=int,
        metavar="N",
    )
    num_machines: int | None = _option("resources", "number of nodes; default: 1", kind=int, metavar="N")
    num_cpu_threads_per_process: int | None = _option(
        "resources", "CPU threads per process; default: the cores are divided evenly", kind=int, metavar="N"
    )
    enable_cpu_affinity: bool | None = _option(
        "resources", "bind each process to the cores near its accelerator", kind=bool
    )

    mixed_precision: str | None = _option(
        "precision", "mixed precision mode", choices=PRECISIONS, offered=PRECISIONS[:3], setting="mixed_precision"
    )
    gradient_accumulation_steps: int | None = _option(
        "precision", "micro-batches per optimizer update", kind=int, metavar="N", setting="gradient_accumulation_steps"
    )
    dynamo_backend: str | None = _option(
        "precision",
        "backend of torch.compile, such as inductor; default: models are not compiled",
        metavar="NAME",
        setting="dynamo_backend",
    )
    dynamo_mode: str | None = _option(
        "precision",
        "mode of torch.compile",
        choices=("default", "reduce-overhead", "max-autotune"),
        setting="dynamo_mode",
    )
    dynamo_use_fullgraph: bool | None = _option(
        "precision", "raise an error on a graph break", kind=bool, setting="dynamo_use_fullgraph"
    )
    dynamo_use_dynamic: bool | None = _option(
        "precision", "compile for dynamic shapes", kind=bool, setting="dynamo_use_dynamic"
    )
    dynamo_use_regional_compilation: bool | None = _option(
        "precision", "compile repeated blocks only, once", kind=bool, setting="dynamo_use_regional_compilation"
    )

    debug: str | None = _option(
        "debug",
        "check every collective across ranks before it runs; =underflow_overflow finds the first NaN or inf",
        metavar="TOOL",
        setting="debug",
    )
    numerics_record: str | None = _option(
        "debug",
        "record statistics of every module call in this folder; append @every=10 or @149,150 to select batches",
        metavar="DIR",
        setting="numerics_record",
    )

    machine_rank: int | None = _option("network", "rank of this node, from 0", kind=int, metavar="N")
    main_process_ip: str | None = _option("network", "address of node 0", metavar="ADDRESS")
    main_process_port: int | None = _option(
        "network", "port of the rendezvous on node 0; default: 29500", kind=int, metavar="PORT"
    )
    rdzv_backend: str | None = _option(
        "network", "rendezvous backend (c10d, etcd-v2, …; static means c10d)", metavar="NAME"
    )
    rdzv_endpoint: str | None = _option(
        "network", "rendezvous endpoint, instead of --main_process_ip and --main_process_port", metavar="HOST:PORT"
    )
    rdzv_conf: str | None = _option(
        "network", "additional rendezvous configuration: key=value,key=value", metavar="KEY=VALUE,..."
    )
    rdzv_id: str | None = _option("network", "rendezvous id: a name of the job, the same on all nodes", metavar="NAME")
    same_network: bool | None = _option("network", "accepted for compatibility; has no effect", kind=bool)
    mpirun_hostfile: str | None = _option(
        "network", "start the processes with mpirun, on the hosts of this file", metavar="FILE"
    )
    max_restarts: int | None = _option(
        "network", "number of times a failed job is restarted; default: 0", kind=int, metavar="N"
    )
    monitor_interval: float | None = _option(
        "network", "interval at which the processes are polled", kind=float, metavar="SECONDS"
    )
    grace: float | None = _option(
        "network",
        "time between asking processes to stop and killing them",
        kind=float,
        metavar="SECONDS",
    )
    role: str | None = _option("network", "role of the processes in torch's own logs", metavar="NAME")

    tee: str | None = _option(
        "output",
        "streams whose lines are prefixed with their rank: 0 none, 1 stdout, 2 stderr, 3 both",
        choices=("0", "1", "2", "3"),
        short="-t",
    )
    log_dir: str | None = _option("output", "folder for each rank's output; default: the run directory", metavar="DIR")
    quiet: bool | None = _option(
        "output", "print a line that several ranks print only once; no notes of the launcher", kind=bool, short="-q"
    )
    project_dir: str | None = _option(
        "output", "folder that holds .lockstep/runs; default: the working directory", metavar="DIR"
    )

    def __post_init__(self) -> None:
        problems = [*_wrong_numbers(self), *_wrong_choices(self), *_wrong_recording(self)]
        if problems:
            raise ConfigError.of(problems)


_LOWEST = {
    "num_processes": 1,
    "num_machines": 1,
    "num_cpu_threads_per_process": 1,
    "gradient_accumulation_steps": 1,
    "machine_rank": 0,
    "max_restarts": 0,
    "main_process_port": 0,
    "grace": 0,
}


def _wrong_numbers(config: LaunchConfig) -> list[str]:
    problems = []
    for name, lowest in _LOWEST.items():
        value = getattr(config, name)
        if value is not None and value < lowest:
            problems.append(f"--{name} {value} must be {lowest} or more.")
    if config.main_process_port is not None and config.main_process_port > 65535:
        problems.append(f"--main_process_port {config.main_process_port} must be at most 65535.")
    if config.monitor_interval is not None and config.monitor_interval <= 0:
        problems.append(f"--monitor_interval {config.monitor_interval} must be above 0.")
    return problems


def _wrong_choices(config: LaunchConfig) -> list[str]:
    problems = []
    for option in fields(config):
        allowed = option.metadata.get("choices")
        value = getattr(config, option.name)
        if allowed is not None and value is not None and value not in allowed:
            problems.append(f"--{option.name} {value} is unknown. Allowed: {', '.join(allowed)}.")
    return problems


def _wrong_recording(config: LaunchConfig) -> Sequence[str]:
    try:
        parse_recording(config.numerics_record or "", "--numerics_record")
    except ConfigError as error:
        return error.problems or (str(error),)
    return ()


def resolve_launch(
    flags: Mapping[str, Any], environ: Mapping[str, str], from_file: Mapping[str, Any], file_name: str
) -> dict[str, Resolved[Any]]:
    """Every option's value and where it came from: flag, environment, file, default."""
    found: dict[str, Resolved[Any]] = {}
    for option in fields(LaunchConfig):
        name, setting = option.name, option.metadata.get("setting")
        seen = env.lookup(setting, environ) if setting is not None else None
        if flags.get(name) is not None:
            found[name] = Resolved(flags[name], f"flag --{name}")
        elif seen is not None:
            found[name] = Resolved(_read(option.metadata["kind"], *reversed(seen)), f"environment ({seen[0]})")
        elif from_file.get(name) is not None:
            found[name] = Resolved(from_file[name], f"file ({file_name})")
        else:
            found[name] = Resolved(None, "default")
    _settle_opposites(found)
    return found


def _settle_opposites(found: dict[str, Resolved[Any]]) -> None:
    """A flag for the CPU overrules a file for accelerators, and the other way round, as flags do."""
    strength = ("default", "file", "environment", "flag")
    cpu, gpu = found["cpu"], found["multi_gpu"]
    if cpu.value and gpu.value:
        ranks = [strength.index(one.source.split()[0]) for one in (cpu, gpu)]
        if ranks[0] != ranks[1]:
            weaker, other = ("multi_gpu", cpu) if ranks[0] > ranks[1] else ("cpu", gpu)
            found[weaker] = Resolved(None, f"default (overruled by {other.source})")


def _read(kind: type, text: str, name: str) -> Any:
    if kind is bool:
        return env.parse_flag(text, name)
    return env.parse_int(text, name) if kind is int else text
