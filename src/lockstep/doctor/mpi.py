"""Whether mpirun can start a job on the nodes of a host file: each step it takes, tried for each of them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.doctor import ssh
from lockstep.doctor.finding import Finding, exit_code
from lockstep.errors import ConfigError
from lockstep.host import interfaces
from lockstep.host.network import knock
from lockstep.launch import mpi
from lockstep.launch.mpi import Dialect, MpiHost

MPIRUN = 60.0
"""Seconds for mpirun to start one process on each node."""
_AT_ONCE = 16
Log = Callable[[str], None]


def examine(
    hostfile: str,
    environ: Mapping[str, str],
    *,
    all_pairs: bool = False,
    program: str | None = None,
    log: Log = lambda text: None,
) -> list[Finding]:
    """All findings, machine by machine, then mpirun itself. Raises where the host file cannot be read at all."""
    hosts = mpi.read_hostfile(hostfile)
    findings = []
    here, dialect, own_version = _own_mpirun(environ)
    findings.append(here)
    client = program or (dialect.ssh(environ) if dialect is not None else "ssh")
    if dialect is not None:
        findings.append(_syntax(hostfile, hosts, dialect))
    others = [host for host in hosts if not is_here(host.name)]
    log(f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, {len(others)} of them by {client}")
    mpirun = mpi.find_mpirun(environ)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda host: _host(client, host, mpirun, own_version), hosts)
        for host, found in zip(hosts, answers, strict=True):
            findings += found
            log(f"{host.name}: {'failed' if exit_code(found) else 'ok'}")
    reached = [host for host in others if not exit_code([f for f in findings if f.data.get("host") == host.name])]
    if all_pairs:
        findings += _pairs(client, hosts, reached, log)
    if dialect is not None and mpirun is not None:
        if len(reached) == len(others):
            log("mpirun … hostname")
            findings.append(_try_out(mpirun, dialect, hostfile, hosts, environ))
        else:
            findings.append(_not_tried(mpirun, dialect, hostfile, hosts))
    return findings


def _own_mpirun(environ: Mapping[str, str]) -> tuple[Finding, Dialect | None, str]:
    mpirun = mpi.find_mpirun(environ)
    if mpirun is None:
        missing = Finding(
            check="mpirun",
            status="error",
            what="neither mpirun nor mpiexec is on PATH",
            why="it starts the processes on the other nodes",
            fix="apt install openmpi-bin (or mpich), or load the module your cluster has for it",
        )
        return missing, None, ""
    try:
        version = version_line(mpi.version(mpirun))
        dialect = mpi.recognise(mpi.version(mpirun))
    except ConfigError as error:
        return Finding(check="mpirun", status="error", what=str(error)), None, ""
    what = f"{dialect.name}: {version} ({mpirun})"
    return (
        Finding(check="mpirun", status="ok", what=what, data={"mpi": dialect.name, "version": version}),
        dialect,
        version,
    )


def _syntax(hostfile: str, hosts: Sequence[MpiHost], dialect: Dialect) -> Finding:
    """Whether this mpirun reads the file as it is; `lockstep launch` reads both forms itself."""
    lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    foreign = [f"line {number}, {line.strip()!r}" for number, line in enumerate(lines, 1) if not dialect.reads(line)]
    summary = f"{hostfile} names {len(hosts)}: {_some([host.name for host in hosts])}"
    if not foreign:
        return Finding(check="host file", status="ok", what=summary, data={"hosts": [host.name for host in hosts]})
    lines_with_slots = [dialect.line(host) for host in hosts if host.slots is not None]
    return Finding(
        check="host file",
        status="warning",
        what=f"{summary}; {dialect.name} does not read {'; '.join(foreign[:3])}",
        why="`lockstep launch --mpirun_hostfile` reads it, but mpirun by itself takes it wrongly",
        fix=f"for {dialect.name} write: {'; '.join(lines_with_slots[:3])}",
        data={"hosts": [host.name for host in hosts], "foreign": foreign},
    )


def is_here(name: str) -> bool:
    """Whether mpirun takes this host for the machine it runs on, and needs no ssh."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    own = {address for each in interfaces.read() for address in each.addresses}
    return name in own


def version_line(text: str) -> str:
    """The line that has the version: MPICH's first one is a heading."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"\d\.\d", line)), lines[0] if lines else "")


# --- one node -----------------------------------------------------------------------------------------------------


def _host(program: str, host: MpiHost, mpirun: str | None, own_version: str) -> list[Finding]:
    if is_here(host.name):
        what = "is this machine: mpirun needs no ssh for it"
        return [Finding(check=host.name, status="ok", what=what, data={"host": host.name})]
    return list(_steps(program, ssh.target(program, host.name), mpirun, own_version))


def _steps(program: str, to: ssh.SshTarget, mpirun: str | None, own_version: str) -> Iterator[Finding]:
    """Each stands on the one before: the first that fails is the last."""
    host, data = to.host, {"host": to.host}
    try:
        addresses = ssh.resolve(to.name)
    except OSError as error:
        yield Finding(
            check=f"{host}: name",
            status="error",
            what=f"{to.name} resolves to no address: {error.strerror}",
            why="no node can be reached by this name",
            fix=f"correct it in the host file, or add a line to /etc/hosts on every node: ADDRESS {to.name}",
            data=data,
        )
        return
    resolved = addresses[0] if len(addresses) == 1 else ", ".join(addresses)
    yield Finding(
        check=f"{host}: name", status="ok", what=f"{to.name} is {resolved}", data={**data, "addresses": addresses}
    )
    problem = knock(to.name, to.port, ssh.CONNECT)
    if problem:
        yield Finding(
            check=f"{host}: port {to.port}",
            status="error",
            what=f"{to.name} port {to.port} cannot be reached: {problem}",
            why="mpirun starts its processes by ssh",
            fix=f"see that it is on, that sshd runs there (systemctl start ssh), and that port {to.port} is open",
            data={**data, "port": to.port},
        )
        return
    yield Finding(check=f"{host}: port {to.port}", status="ok", what="answers", data={**data, "port": to.port})
    answer = ssh.remote(program, host, ["hostname"])
    if not answer.ok:
        yield Finding(
            check=f"{host}: ssh",
            status="error",
            what=f"no way in without a question: {answer.reason}",
            why="mpirun cannot answer questions for a password or a host key: the job hangs, or fails",
            fix=ssh.remedy(answer, to),
            data=data,
        )
        return
    yield Finding(
        check=f"{host}: ssh", status="ok", what=f"gets in as {to.user}, it is {answer.out.strip()}", data=data
    )
    yield from _programs(program, host, mpirun, own_version)


def _programs(program: str, host: str, mpirun: str | None, own_version: str) -> Iterator[Finding]:
    data = {"host": host}
    # By its full path first, as mpirun looks for its other half: what modules add to PATH is not there without a login.
    answer = ssh.Answer(code=127) if mpirun is None else ssh.remote(program, host, [mpirun, "--version"])
    if not answer.ok:
        answer = ssh.remote(program, host, ["mpirun", "--version"])
    version = version_line(answer.out + answer.err)
    if not answer.ok:
        yield Finding(
            check=f"{host}: mpirun",
            status="error",
            what=f"mpirun does not run there in a shell that nobody logged in to: {answer.reason}",
            why="mpirun starts its other half on each node by such a shell",
            fix="install the same MPI there, and set its PATH at the beginning of ~/.bashrc, before any `return`",
            data=data,
        )
    elif own_version and version != own_version:
        yield Finding(
            check=f"{host}: mpirun",
            status="error",
            what=f"{version}, and here it is {own_version}",
            why="halves of mpirun that differ do not understand each other",
            fix="install the same version on every node",
            data={**data, "version": version},
        )
    elif own_version:
        yield Finding(
            check=f"{host}: mpirun", status="ok", what=f"the same: {version}", data={**data, "version": version}
        )
    python = ssh.remote(program, host, [sys.executable, "-c", "import torch; print(torch.__version__)"])
    if python.ok:
        what = f"{sys.executable} is there, with torch {python.out.strip()}"
        yield Finding(check=f"{host}: python", status="ok", what=what, data=data)
    else:
        yield Finding(
            check=f"{host}: python",
            status="warning",
            what=f"{sys.executable} does not import torch there: {python.reason}",
            why="`lockstep launch` starts the ranks with the Python it runs in, by its full path",
            fix="put the environment at the same path on every node, or on a disk they share",
            data=data,
        )


# --- all of them -----------------------------------------------------------------------------------------------------


def _pairs(program: str, hosts: Sequence[MpiHost], reached: Sequence[MpiHost], log: Log) -> Iterator[Finding]:
    """From every node that can be reached to every other."""
    # A loopback name means another node on each: there is no way there from elsewhere.
    known = [to.name for to in hosts if to.name != "localhost" and not interfaces.is_loopback(to.name)]
    tries = [(by.name, to) for by in reached for to in known if by.name != to]
    log(f"{len(tries)} pairs")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda pair: ssh.onward(program, *pair), tries))
    failed = [(by, to, answer) for (by, to), answer in zip(tries, answers, strict=True) if not answer.ok]
    for by, to, answer in failed:
        yield Finding(
            check=f"{by} to {to}",
            status="error",
            what=f"ssh from {by} to {to} does not get in without a question: {answer.reason}",
            why="with many nodes mpirun passes the start on from one to the next",
            fix=ssh.remedy(answer, ssh.target(program, to), by=by),
            data={"from": by, "to": to},
        )
    if not failed and tries:
        what = f"{len(tries)} ways, from every node to every other, work without a question"
        yield Finding(check="all pairs", status="ok", what=what)
    elif not tries:
        yield Finding(check="all pairs", status="skipped", what="there are no two nodes to try it between")


def sanity_command(mpirun: str, dialect: Dialect, hostfile: str, hosts: Sequence[MpiHost]) -> list[str]:
    """The guides' check, in the dialect of the mpirun that is here."""
    return [mpirun, *dialect.one_each(hostfile, len(hosts), as_root=os.geteuid() == 0), "hostname"]


def _try_out(
    mpirun: str, dialect: Dialect, hostfile: str, hosts: Sequence[MpiHost], environ: Mapping[str, str]
) -> Finding:
    lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        used = hostfile
        if not all(map(dialect.reads, lines)):
            used = str(Path(folder) / "hosts")
            Path(used).write_text("".join(f"{dialect.line(host)}\n" for host in hosts), encoding="utf-8")
        command = sanity_command(mpirun, dialect, used, hosts)
        answer = ssh.call(command, limit=MPIRUN, env={**environ, **dict(dialect.environ)})
        if (answer.code or 0) < 0:
            # MPICH 4.0 dies of SIGPIPE in about 1 of 500 calls whose program has ended before it is listened to.
            answer = ssh.call(command, limit=MPIRUN, env={**environ, **dict(dialect.environ)})
    shown = shlex.join(sanity_command(mpirun, dialect, hostfile, hosts))
    shown += f" (its lines as {dialect.name} writes them)" if used != hostfile else ""
    names = [line.strip() for line in answer.out.splitlines() if line.strip()]
    data = {"command": shown, "printed": names}
    if answer.ok and len(names) == len(hosts):
        what = f"{shown} printed {len(names)} name{'s' if len(names) > 1 else ''}: {_some(names)}"
        return Finding(check="mpirun hostname", status="ok", what=what, data=data)
    reason = f"no end within {MPIRUN:g} s" if answer.code is None else answer.reason
    if answer.ok:
        reason = f"it printed {len(names)} names for {len(hosts)} hosts"
    return Finding(
        check="mpirun hostname",
        status="error",
        what=f"{shown} fails: {reason}",
        why="this is how the job would be started",
        fix="run it in a terminal, and mend what it says; see that no firewall is between the nodes: its halves "
        "connect to each other at ports that the system picks",
        data=data,
    )


def _not_tried(mpirun: str, dialect: Dialect, hostfile: str, hosts: Sequence[MpiHost]) -> Finding:
    command = shlex.join(sanity_command(mpirun, dialect, hostfile, hosts))
    what = f"not run, since not every node can be reached; then: {command}"
    return Finding(check="mpirun hostname", status="skipped", what=what, data={"command": command})


def _some(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
