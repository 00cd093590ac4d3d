"""``lockstep env``: what a bug report needs to say about a node and its settings, each value with its reason.

Every part is looked up by itself, under a time limit: one that fails or gives no answer says so in its own line, and
the rest is still printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.rundir.printable import printable

if TYPE_CHECKING:
    from lockstep.config.file import ConfigFile

PATIENCE = 20.0
"""Seconds that one part may take: a broken driver, or a name server that is away, can keep it waiting forever."""

_PREFIXES = (
    *("LOCKSTEP_", "ACCELERATE_", "NCCL_", "TORCH_NCCL_", "RCCL_", "GLOO_", "MASTER_", "TORCH_DISTRIBUTED_"),
    *("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PALS_", "FSDP_", "OMP_", "MKL_NUM_"),
)
_NAMES = """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE
    CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_ALLOC_CONF CUBLAS_WORKSPACE_CONFIG ONEDNN_MAX_CPU_ISA TORCH_CPP_LOG_LEVEL RES_OPTIONS HF_HOME
    XDG_CACHE_HOME SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES
    SLURM_JOB_NUM_NODES SLURM_JOB_NODELIST SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE
"""
"""Variables that matter besides those with a prefix; of SLURM's many, the ones that place a process."""

_DEFAULTS = {
    "cpu": "no",
    "device": "found by itself",
    "mixed_precision": "no",
    "gradient_accumulation_steps": "1",
    "reproducible": "no",
    "save_on_signal": "no",
    "debug": "no",
    "numerics_record": "no",
    "nan_policy": "warn",
    "stall_seconds": "30",
    "replica_check_steps": "500",
    "log_level": "as the script sets it",
    "dynamo_backend": "no",
}
"""What holds where nothing is set; settings that are not here are left to torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="configuration file, instead of the default one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found out. A bad setting is part of the report; a file that was named and cannot be read is 2."""
    report = collect(arguments.config_file)
    if arguments.json:
        plain = {part: {name: fact.plain() for name, fact in facts.items()} for part, facts in report.items()}
        print(json.dumps(plain, indent=2))
    else:
        print(printable("\n".join(render(report))))
    unread = report["settings"].get("configuration file")
    if arguments.config_file is not None and unread is not None and unread.error is not None:
        print(f"lockstep env: {unread.error}", file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line of the report."""

    value: Any = None
    """What was found, as JSON can say it."""
    text: str | None = None
    """The same for people, where it reads differently."""
    reason: str | None = None
    """Why, or where it came from."""
    error: str | None = None
    """Why it could not be found out."""

    def plain(self) -> Any:
        """For JSON: the bare value, with what goes with it where there is something."""
        if self.error is not None:
            return {"value": self.value, "error": self.error}
        return self.value if self.reason is None else {"value": self.value, "reason": self.reason}

    def __str__(self) -> str:
        value = self.text if self.text is not None else "none" if self.value is None else str(self.value)
        if self.error is not None:
            return f"ERROR: {self.error}" if self.value is None else f"{value}  ERROR: {self.error}"
        return value if self.reason is None else f"{value} ({self.reason})"


Facts = dict[str, Fact]


def collect(config_file: str | None = None) -> dict[str, Facts]:
    """The report: part -> name -> what was found, in an order that does not change."""
    from lockstep.config import env

    environ = env.snapshot()
    parts: dict[str, Callable[[], Iterator[tuple[str, Fact]]]] = {
        "versions": _versions,
        "machine": _machine,
        "devices": _devices,
        "process": lambda: _process(environ),
        "network": lambda: _network(environ, config_file),
        "settings": lambda: _settings(environ, config_file),
        "variables": lambda: _variables(environ),
    }
    return {name: _whole(name, part) for name, part in parts.items()}


def render(report: Mapping[str, Facts]) -> Iterator[str]:
    """The report as lines of aligned text."""
    width = max(len(name) for facts in report.values() for name in facts)
    for part, facts in report.items():
        yield part
        for name, fact in facts.items():
            first, *rest = str(fact).splitlines() or [""]
            yield f"  {name:<{width}}  {first}".rstrip()
            yield from (f"  {'':<{width}}  {line}".rstrip() for line in rest)
        if not facts:
            yield "  none"


# --- finding out without failing or waiting forever ------------------------------------------------------------------


def _whole(name: str, part: Callable[[], Iterator[tuple[str, Fact]]]) -> Facts:
    """The facts of a part; those found before a failure are kept, and the failure is one more."""
    found: Facts = {}

    def read() -> None:
        for key, fact in part():
            found[key] = fact

    problem = _within(PATIENCE, read)
    # A copy: the thread of a part that was given up may still add to its own.
    facts = dict(found)
    if isinstance(problem, Exception):
        facts[name] = Fact(error=_words(problem))
    return facts


def _within(seconds: float, read: Callable[[], Any]) -> Any:
    """What ``read`` gives, or the exception it raises, or one that says it did not come back."""
    import threading

    answers: list[Any] = []

    def work() -> None:
        try:
            answers.append(read())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, name="lockstep-env", daemon=True)  # one that hangs must not hold the end up
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else TimeoutError(f"no answer within {seconds:g} s")


def _attempt(read: Callable[[], Any]) -> Fact:
    """One fact, or why there is none."""
    try:
        value = read()
    except Exception as error:
        return Fact(error=_words(error))
    return value if isinstance(value, Fact) else Fact(value=value)


def _words(error: BaseException) -> str:
    from lockstep.errors import LockstepError

    text = str(error).strip()
    return text if text and isinstance(error, (LockstepError, TimeoutError)) else f"{type(error).__name__}: {text}"


# --- the parts -------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[tuple[str, Fact]]:
    from importlib import metadata

    from lockstep import __version__

    yield "lockstep", Fact(value=__version__)
    for name in ("torch", "numpy"):
        # From the installed packages' own records: a package that cannot be imported still has a version.
        yield name, _attempt(lambda name=name: metadata.version(name))  # type: ignore[misc]
    yield "python", Fact(value=platform.python_version(), reason=platform.python_implementation())
    yield "platform", Fact(value=platform.platform())
    yield from _engines()


def _engines() -> Iterator[tuple[str, Fact]]:
    """What torch was built with, and the driver it meets."""
    import torch

    yield "cuda", Fact(value=torch.version.cuda)
    yield "rocm", Fact(value=torch.version.hip)
    if torch.version.cuda is not None:
        yield "cudnn", _attempt(torch.backends.cudnn.version)
    if torch.version.cuda is not None or torch.version.hip is not None:
        yield "nccl", _attempt(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        yield "nvidia driver", _attempt(lambda: driver.read_text(encoding="utf-8").splitlines()[0].strip())


def _machine() -> Iterator[tuple[str, Fact]]:
    import psutil

    from lockstep.host import cgroups

    yield "kernel", Fact(value=f"{platform.system()} {platform.release()}")
    warning = _attempt(_kernel_warning)
    if warning.value is not None or warning.error is not None:
        yield "kernel warning", warning
    yield "cpu cores", _attempt(_cores)
    memory = psutil.virtual_memory()
    yield "memory", _size(memory.total)
    yield "memory available", _size(memory.available)
    limit = cgroups.memory()
    capped = limit is not None and limit < memory.total
    yield "memory limit", _size(limit, "control group") if capped else Fact(reason="no control group sets one")
    yield "shared memory", _attempt(_shared_memory)


def _kernel_warning() -> str | None:
    from lockstep.topology.kernel import old_kernel_warning

    return old_kernel_warning()


def _cores() -> Fact:
    from lockstep.host import cgroups

    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    share = cgroups.cores()
    usable = allowed if share is None else min(allowed, max(1, int(share)))
    reasons = [f"{present} present"]
    if allowed < present:
        reasons.append(f"this process is tied to {allowed}")
    if share is not None and share < allowed:
        reasons.append(f"the control group allows the time of {share:g}")
    return Fact(value=usable, text=f"{usable} usable", reason=", ".join(reasons))


def _shared_memory() -> Fact:
    import shutil

    place = "/dev/shm"
    if not os.path.isdir(place):
        return Fact(reason=f"no {place}")
    usage = shutil.disk_usage(place)
    return Fact(
        value=usage.free,
        text=f"{_gib(usage.free)} free of {_gib(usage.total)}",
        reason=f"{place}, used by loader workers",
    )


def _devices() -> Iterator[tuple[str, Fact]]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield "accelerators", Fact(value=0, text="none")
        return
    count = torch.accelerator.device_count()
    yield "accelerators", Fact(value=count, text=f"{count} of type {accelerator.type}")
    module = torch.get_device_module(accelerator)
    for index in range(count):
        yield f"{accelerator.type}:{index}", _attempt(lambda index=index: _device(module, index))  # type: ignore[misc]


def _device(module: Any, index: int) -> Fact:
    name = module.get_device_name(index) if hasattr(module, "get_device_name") else "unnamed"
    total = None
    if hasattr(module, "get_device_properties"):
        total = getattr(module.get_device_properties(index), "total_memory", None)
    value = {"name": name, "memory": total}
    return Fact(value=value, text=name if total is None else f"{name}, {_gib(total)}")


def _process(environ: Mapping[str, str]) -> Iterator[tuple[str, Fact]]:
    from lockstep.config import env, resolve
    from lockstep.topology import environments

    place = environments.find(environ)
    yield "started by", Fact(value=place.launcher, reason=place.reason)
    yield "processes", Fact(value=place.world_size)
    yield "rank", Fact(value=place.rank)
    yield "machines", Fact(value=place.num_nodes)
    from lockstep.topology.topology import discover  # only now: it needs torch, and what is above does not

    cpu = resolve.resolve("cpu", None, False, environ, env.parse_flag).value
    fixed = resolve.resolve("device", None, None, environ, resolve.as_text).value
    topology = discover(environ, cpu=cpu, device=fixed)
    yield "device", Fact(value=str(topology.device), reason=topology.device_reason)
    yield "backend", Fact(value=topology.backend)
    from lockstep.strategies.choose import kind_for

    kind = kind_for(topology)
    yield "strategy", Fact(value=kind.__name__, reason=kind.reason(topology))


def _network(environ: Mapping[str, str], config_file: str | None) -> Iterator[tuple[str, Fact]]:
    import psutil

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    for name in sorted({*addresses, *states}):
        up = name in states and states[name].isup
        numbers = _numbers(addresses.get(name, []))
        words = ["up" if up else "down", *numbers]
        yield name, Fact(value={"up": up, "addresses": numbers}, text=", ".join(words))
    yield "host name", _host_name()
    yield "route to the main address", _route(environ, config_file)


def _numbers(found: list[Any]) -> list[str]:
    """An interface's IP addresses; hardware addresses are nobody's business."""
    import socket

    return [item.address for item in found if item.family in (socket.AF_INET, socket.AF_INET6)]


_QUICK = 5.0
"""Seconds for a question to the name server."""


def _host_name() -> Fact:
    import socket

    name = socket.gethostname()
    found = _within(_QUICK, lambda: socket.gethostbyname(name))
    if isinstance(found, Exception):
        return Fact(value=name, reason=f"has no address: {_words(found)}")
    # Processes that meet under such a name on several nodes each wait for themselves.
    loop = ", itself only: other nodes cannot use this name" if found.startswith("127.") else ""
    return Fact(value=name, reason=f"resolves to {found}{loop}")


def _route(environ: Mapping[str, str], config_file: str | None) -> Fact:
    """The interface through which packets to the main address leave."""
    from lockstep.host.network import route_to

    found = _main_address(environ, config_file)
    if found is None:
        return Fact(reason="no main address is set")
    address, source = found
    route = _within(_QUICK, lambda: route_to(address, 0))
    if isinstance(route, Exception):
        return Fact(error=f"{_words(route)} It comes from {source}.")
    own, interface = route
    reason = f"from {own} to {address}, which comes from {source}"
    return Fact(value=interface, text=interface or "no interface that is known", reason=reason)


def _main_address(environ: Mapping[str, str], config_file: str | None) -> tuple[str, str] | None:
    from lockstep.topology import environments

    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"], "MASTER_ADDR"
    try:
        place = environments.find(environ)
        if place.main_address:
            return place.main_address, place.launcher
        path, file = _file(environ, config_file)
    except Exception:  # said where it belongs: with the process, and with the settings
        return None
    address = None if file is None else file.values.get("main_process_ip")
    return None if not address else (str(address), str(path))


def _settings(environ: Mapping[str, str], config_file: str | None) -> Iterator[tuple[str, Fact]]:
    """Every setting and who decided it; then what else the file says."""
    from lockstep.config import env

    values: Mapping[str, Any] = {}
    path: Path | None = None
    try:
        path, file = _file(environ, config_file)
    except Exception as error:
        yield "configuration file", Fact(error=_words(error))
    else:
        yield "configuration file", _file_line(path, file, given=config_file is not None)
        if file is not None:
            values = file.values
            yield from _remarks(file)
    for setting in env.VARIABLES:
        yield setting, _attempt(lambda setting=setting: _setting(setting, environ, values, path))  # type: ignore[misc]
    for name in sorted(set(values) - set(env.VARIABLES)):
        if values[name] is not None:
            yield name, Fact(value=_shown(name, _yes_or_no(values[name])), reason=f"file {path}")


def _setting(setting: str, environ: Mapping[str, str], values: Mapping[str, Any], path: Path | None) -> Fact:
    from lockstep.config import env

    found = env.lookup(setting, environ)
    if found is not None:
        variable, text = found
        try:
            _check(setting, text, variable)
        except Exception as error:
            return Fact(value=_shown(variable, text), error=_words(error))
        return Fact(value=_shown(variable, text), reason=f"environment {variable}")
    if values.get(setting) is not None:
        return Fact(value=_shown(setting, _yes_or_no(values[setting])), reason=f"file {path}")
    return Fact(value=_DEFAULTS.get(setting, "as torch has it"), reason="default")


def _check(setting: str, text: str, variable: str) -> None:
    """Raise as the job would when it reads this text."""
    from lockstep.config import env, settings
    from lockstep.config.choices import DynamoBackend, NanPolicy
    from lockstep.config.recording import parse_recording

    readers: dict[str, Callable[[str, str], Any]] = {
        "mixed_precision": settings.read_precision,
        "gradient_accumulation_steps": env.parse_int,
        "numerics_record": parse_recording,
        "nan_policy": NanPolicy.parse,
        "stall_seconds": env.parse_int,
        "replica_check_steps": env.parse_int,
        "debug": lambda text, variable: settings.read_debug(None, {variable: text}),
        "dynamo_backend": DynamoBackend.parse,
        **dict.fromkeys(("device", "log_level", "dynamo_mode"), lambda text, _: text),
    }
    readers.get(setting, env.parse_flag)(text, variable)


def _file(environ: Mapping[str, str], config_file: str | None) -> tuple[Path, ConfigFile | None]:
    """The configuration file that `lockstep launch` would read; None where there is none."""
    from lockstep.config import file

    path = Path(config_file) if config_file is not None else Path(file.default_path(environ))
    if config_file is None and not path.exists():
        return path, None
    return path, file.read(path)


def _file_line(path: Path, file: ConfigFile | None, *, given: bool) -> Fact:
    if file is None:
        return Fact(value=None, text="none", reason=f"{path} does not exist")
    return Fact(value=str(path), reason="--config_file" if given else "the usual place")


def _remarks(file: ConfigFile) -> Iterator[tuple[str, Fact]]:
    """What the file says that is not done."""
    if file.ignored:
        lines = [f"{key}: {why}" for key, why in sorted(file.ignored.items())]
        yield "keys without effect", Fact(value=dict(sorted(file.ignored.items())), text="\n".join(lines))
    if file.refused:
        yield "keys refused", Fact(value=list(file.refused), text="\n".join(file.refused))


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, Fact]]:
    names = _NAMES.split()
    for name in sorted(environ):
        if name in names or name.startswith(_PREFIXES):
            yield name, Fact(value=_shown(name, environ[name]))


# --- values as they may be shown -------------------------------------------------------------------------------------


def _shown(name: str, value: Any) -> Any:
    """The value, unless it looks like a secret; on one line."""
    from lockstep.doctor.redact import HIDDEN, Redactor, names_a_secret

    if names_a_secret(name):
        return HIDDEN
    if not isinstance(value, str):
        return value
    return Redactor().text(value.encode("unicode_escape").decode("ascii") if "\n" in value else value)


def _yes_or_no(value: Any) -> Any:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _size(count: int | None, reason: str | None = None) -> Fact:
    return Fact(value=count, text=None if count is None else _gib(count), reason=reason)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
