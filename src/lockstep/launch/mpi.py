"""Starting a job by mpirun: which MPI it belongs to, the hosts it is given, and the command in that MPI's dialect.

MPI is used only to start processes on other machines and to number them. The hosts of the file go on the command
line, because no two dialects read the same file: ``node1 slots=2`` is Open MPI's, ``node1:2`` that of the others.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.config.host_name import ALLOWED, is_host
from lockstep.config.limited_file import read_limited
from lockstep.errors import ConfigError
from lockstep.job_store.signed_store import VARIABLE

_VERSION_SECONDS = 20.0
_PROGRAMS = ("mpirun", "mpiexec")

# Below the ports Linux gives to outgoing connections, so that a passing connection does not occupy one.
_PORTS = range(20000, 30000)

# Open MPI hands over nothing but what it is told to. A job whose ranks obey NCCL_DEBUG, or find a module by
# PYTHONPATH, only on the machine where it was started would be two jobs in one.
_INHERITED = (
    *("ACCELERATE_", "LOCKSTEP_", "TORCH", "PYTORCH_", "PYTHON", "OMP_", "MKL_", "KMP_", "ONEDNN_", "GLOO_", "NCCL_"),
    *(
        "CUDA_",
        "HIP_",
        "ROCR_",
        "HF_",
        "HUGGINGFACE_",
        "TOKENIZERS_",
        "WANDB_",
        "MLFLOW_",
        "RES_OPTIONS",
        "XDG_CACHE_HOME",
    ),
)

_LARGEST = 4 << 20
"""Bytes of a host file; 65,536 names have less."""
_LINE_FORMS = "a host's name or address, perhaps with its number of processes: node1, node1 slots=2 or node1:2"


@dataclass(frozen=True, kw_only=True)
class MpiHost:
    """One machine of a host file."""

    name: str
    """Its name or address."""
    slots: int | None = None
    """How many processes it may be given; None when the file does not say."""


@dataclass(frozen=True, kw_only=True)
class MpiJob:
    """What mpirun is to start, whatever its dialect."""

    hosts: Sequence[str]
    per_machine: int
    """Processes on each of them."""
    env: Mapping[str, str]
    """Variables that every process gets."""
    inherited: Sequence[str]
    """Variables that every process gets as they are set here; left to mpirun by name, since values may be secret."""
    as_root: bool
    """Whether the superuser starts it."""

    @property
    def num_processes(self) -> int:
        """Processes on all machines together."""
        return len(self.hosts) * self.per_machine


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One MPI's way of being called. This one is Hydra's, which MPICH and its descendants share."""

    name: str
    """What the MPI is called."""
    marks: tuple[str, ...]
    """Words, in lower case, by which the text of ``mpirun --version`` shows it."""
    environ: tuple[tuple[str, str], ...] = ()
    """Variables that mpirun itself is to be given."""

    def options(self, job: MpiJob) -> list[str]:
        """The options between ``mpirun`` and the command to run."""
        # Hydra hands over the whole environment by itself, so what is inherited need not be named.
        options = ["-hosts", ",".join(job.hosts), "-n", str(job.num_processes), "-ppn", str(job.per_machine)]
        for name, value in job.env.items():
            options += ["-genv", name, value]
        return options

    def one_each(self, hostfile: str, machines: int, *, as_root: bool) -> list[str]:
        """The options that run a command once on every machine of a host file, which is in this dialect."""
        return ["-f", hostfile, "-n", str(machines), "-ppn", "1"]

    def line(self, host: MpiHost) -> str:
        """A host as it stands in a host file."""
        name = f"[{host.name}]" if ":" in host.name else host.name
        return name if host.slots is None else f"{name}:{host.slots}"

    def reads(self, line: str) -> bool:
        """Whether it understands a line of a host file, once read by `read_hostfile`."""
        return "=" not in line.partition("#")[0]

    def ssh(self, environ: Mapping[str, str]) -> str:
        """The program by which it reaches other machines."""
        return environ.get("HYDRA_LAUNCHER_EXEC") or environ.get("I_MPI_HYDRA_BOOTSTRAP_EXEC") or "ssh"


class _OpenMpi(Dialect):
    def one_each(self, hostfile: str, machines: int, *, as_root: bool) -> list[str]:
        return ["--hostfile", hostfile, "--map-by", "ppr:1:node", *(["--allow-run-as-root"] if as_root else [])]

    def line(self, host: MpiHost) -> str:
        return host.name if host.slots is None else f"{host.name} slots={host.slots}"

    def reads(self, line: str) -> bool:
        return (line.partition("#")[0].split() or [""])[0].count(":") != 1

    def ssh(self, environ: Mapping[str, str]) -> str:
        told = environ.get("OMPI_MCA_plm_rsh_agent") or environ.get("PRTE_MCA_plm_ssh_agent") or "ssh"
        return told.split(":")[0].strip()

    def options(self, job: MpiJob) -> list[str]:
        options = ["--host", ",".join(f"{host}:{job.per_machine}" for host in job.hosts)]
        options += ["-n", str(job.num_processes), "--map-by", f"ppr:{job.per_machine}:node"]
        # It would tie each process, with all its threads and loader workers, to one core.
        options += ["--bind-to", "none"]
        if job.as_root:
            options.append("--allow-run-as-root")
        for name, value in job.env.items():
            options += ["-x", f"{name}={value}"]
        for name in job.inherited:
            options += ["-x", name]
        return options


OPEN_MPI = _OpenMpi(name="Open MPI", marks=("open mpi", "openrte", "open-mpi", "prrte"))
INTEL = Dialect(
    name="Intel MPI",
    marks=("intel(r) mpi",),
    # Inside a batch system's allocation it would otherwise take the number per machine from there.
    environ=(("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "0"),),
)
# Built on MPICH's launcher, it names itself only in the options it was built with; taken for MPICH it is called alike.
MVAPICH = Dialect(name="MVAPICH", marks=("mvapich",))
MPICH = Dialect(name="MPICH", marks=("hydra", "mpich"))

DIALECTS = (OPEN_MPI, INTEL, MVAPICH, MPICH)
"""In the order in which they are looked for: MPICH's marks are in its descendants' texts too."""


def recognise(text: str) -> Dialect:
    """The dialect of the mpirun that answers ``--version`` with this text."""
    lowered = text.lower()
    for dialect in DIALECTS:
        if any(mark in lowered for mark in dialect.marks):
            return dialect
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    raise ConfigError(
        f"mpirun --version answers {first[:120]!r}, and that is none of {', '.join(known.name for known in DIALECTS)}. "
        f"Put the mpirun of one of them first on PATH, or start the script with your mpirun directly: "
        f"Lockstep recognises the processes it starts."
    )


def command(dialect: Dialect, mpirun: str, job: MpiJob, argv: Sequence[str]) -> list[str]:
    """The whole call of mpirun that runs ``argv`` as every process of the job."""
    return [mpirun, *dialect.options(job), *argv]


def read_hostfile(path: str | os.PathLike[str]) -> list[MpiHost]:
    """The hosts of a file, in its order, each once; a line that cannot be read is an error with its number."""
    try:
        text = read_limited(path, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(
            f"The host file {os.fspath(path)!r} cannot be read: {why}. "
            f"Write one line for each machine into it, {_LINE_FORMS}."
        ) from None
    hosts: dict[str, MpiHost] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        try:
            host = _host(words)
        except ValueError as problem:
            problems.append(f"line {number}, {line.strip()[:80]!r}: {problem}")
            continue
        hosts[host.name] = _together(hosts.get(host.name), host)
    if problems:
        raise ConfigError(
            f"The host file {os.fspath(path)!r} cannot be read: {'; '.join(problems)}. Each line is {_LINE_FORMS}."
        )
    if not hosts:
        raise ConfigError(
            f"The host file {os.fspath(path)!r} names no host. Write one line for each machine into it, {_LINE_FORMS}."
        )
    return list(hosts.values())


def _host(words: Sequence[str]) -> MpiHost:
    name, slots = words[0], None
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", name)
    if bracketed:
        name, count = bracketed[1], bracketed[2]
        if ":" not in name:
            raise ValueError(f"{name!r} in brackets is not an IPv6 address")
    else:
        # More than one colon: an IPv6 address, which has no room for a count.
        name, count = name.split(":") if name.count(":") == 1 else (name, None)
    if not is_host(name):
        raise ValueError(f"{name!r} is not a host's name; allowed are {ALLOWED}")
    if count is not None:
        slots = _slots(count)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key.replace("-", "_") not in ("slots", "max_slots"):
            raise ValueError(f"{word!r} is not known here")
        # The most that it may ever be given is no promise, but fewer than its slots it is.
        slots = min(_slots(value), slots if slots is not None else _slots(value))
    return MpiHost(name=name, slots=slots)


def _slots(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of processes")
    return int(text)


def _together(before: MpiHost | None, host: MpiHost) -> MpiHost:
    """A host that stands on several lines may be given what they all say."""
    if before is None:
        return host
    slots = None if before.slots is None or host.slots is None else before.slots + host.slots
    return MpiHost(name=host.name, slots=slots)


def mpirun_command(
    *,
    hostfile: str | os.PathLike[str],
    num_machines: int,
    num_processes: int,
    main_process_ip: str | None,
    main_process_port: int | None,
    env: Mapping[str, str],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """The call that runs ``argv`` on the first machines of a host file, and what to add to mpirun's own environment.

    ``env`` goes to every process; ``environ`` is this process's environment. ``argv`` begins with an absolute path:
    the other machines have their own PATH.
    """
    hosts = read_hostfile(hostfile)
    problems = list(_problems(hosts, os.fspath(hostfile), num_machines, num_processes, main_process_ip))
    mpirun = find_mpirun(environ)
    if mpirun is None:
        problems.append(
            f"A host file is given ({os.fspath(hostfile)}), but neither of {' and '.join(_PROGRAMS)} is on PATH. "
            f"Install an MPI (openmpi-bin or mpich on Debian and Ubuntu, openmpi or mpich on Fedora), or load the "
            f"module your cluster has for it."
        )
    if mpirun is None or problems:
        raise ConfigError.of(problems)
    dialect = recognise(version(mpirun))
    main = main_process_ip or hosts[0].name
    given = {**env, "MASTER_ADDR": main, "MASTER_PORT": str(main_process_port or _free_port())}
    job = MpiJob(
        hosts=[host.name for host in hosts[:num_machines]],
        per_machine=num_processes // num_machines,
        env=given,
        inherited=sorted({*(name for name in environ if name.startswith(_INHERITED)), VARIABLE} - given.keys()),
        as_root=os.geteuid() == 0,
    )
    return command(dialect, mpirun, job, argv), dict(dialect.environ)


def _problems(
    hosts: Sequence[MpiHost], file: str, num_machines: int, num_processes: int, main_process_ip: str | None
) -> Iterator[str]:
    if num_machines < 1 or num_processes < 1:
        yield f"num_machines is {num_machines} and num_processes is {num_processes}; both must be at least 1."
        return
    if num_processes % num_machines:
        yield (
            f"num_processes is {num_processes} and num_machines is {num_machines}: mpirun is to start equally many on "
            f"each machine. Set num_processes to a multiple of {num_machines}."
        )
    if len(hosts) < num_machines:
        yield (
            f"num_machines is {num_machines}, but the host file {file} names {len(hosts)}: "
            f"{', '.join(host.name for host in hosts)}. Add the others, or lower num_machines."
        )
    per_machine = -(-num_processes // num_machines)
    short = [f"{host.name} {host.slots}" for host in hosts[:num_machines] if (host.slots or per_machine) < per_machine]
    if short:
        yield (
            f"num_processes is {num_processes} on {num_machines} machines, which makes {per_machine} for each, but the "
            f"host file {file} has fewer slots: {', '.join(short)}. Raise the slots there, or lower num_processes."
        )
    away = [host.name for host in hosts[:num_machines] if not _is_loopback(host.name)]
    if main_process_ip is None and _is_loopback(hosts[0].name) and away:
        yield (
            f"The first host of {file} is {hosts[0].name}, which means another machine to {', '.join(away[:3])}. "
            f"Write the name there by which the others know it, or set --main_process_ip."
        )


def _is_loopback(name: str) -> bool:
    return name == "::1" or name.startswith("127.") or name.partition(".")[0] == "localhost"


def find_mpirun(environ: Mapping[str, str]) -> str | None:
    """The mpirun that the user's PATH leads to."""
    path = environ.get("PATH", os.defpath)
    return next((found for name in _PROGRAMS if (found := shutil.which(name, path=path))), None)


def version(mpirun: str) -> str:
    """What it answers when it is asked for its version."""
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{mpirun} --version does not work ({error}), so there is no telling which MPI it is. "
            f"Try it in a terminal, and repair or reinstall that MPI."
        ) from None
    return done.stdout + done.stderr


def _free_port() -> int:
    """A port that nobody listens at on this machine, which as a rule is the main one."""
    for port in random.SystemRandom().sample(_PORTS, 50):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError("None of 50 ports from 20000 to 29999 is free on this machine. Set --main_process_port.")
