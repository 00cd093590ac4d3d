"""Two "machines" on this one, or three: namespaces with an own network, host name and hosts file each, and cables.

Nothing of it is visible outside: the cable (a veth pair) is made inside the namespaces, so the same names and addresses
can be in use by several test runs at once, and all of it is gone with the last process in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACE = "eth0"

# In the new namespaces: the name, and files that only they see. No name server can be reached from there, so none is to
# be asked. The shell then waits until its input is closed, which happens at the latest when the test run dies.
_SET_UP = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/nsswitch.conf && ip link set lo up &&
echo ready && exec cat
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of the two: run commands on it as on any machine."""

    name: str
    """Its host name, which both machines resolve."""
    address: str
    """The address of its end of the cable."""
    holder: int
    """The process that keeps the namespaces."""
    hosts: Path
    """Its hosts file; written to in place it changes at once."""
    scratch: Path
    """A folder for what programs leave about."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs another one here, and becomes it: signals and exit codes are the other's."""
        return ["nsenter", f"--target={self.holder}", "--net", "--uts", "--mount", f"--wd={os.getcwd()}", "--", *argv]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment without what a launcher sets, and with ``extra``."""
        kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        # Open MPI keeps a folder named after the host in /tmp for ever.
        return {**kept, "OMP_NUM_THREADS": "1", "OMPI_MCA_orte_tmpdir_base": str(self.scratch), **(extra or {})}

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command here; its pid is the command's own."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen(self.command(argv), env=self.environment(env), text=True, **options)

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end; when it takes too long, everything it started here is ended."""
        before = set(self.processes())
        process = self.popen(argv, env=env, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end(set(self.processes()) - before)
            out, err = process.communicate()
            pytest.fail(f"{argv} on {self.name} took more than {timeout} s\n{out}\n{err}", pytrace=False)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def processes(self) -> list[int]:
        """Every process that runs here, the holder left out."""
        mine = _network(self.holder)
        return [
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
            if pid != self.holder and _network(pid) == mine
        ]

    def end(self, pids: set[int] | None = None, grace: float = 5.0) -> list[int]:
        """End processes that run here (all of them, unless told which); those that had to be ended."""
        ended = sorted(set(self.processes()) & pids if pids is not None else self.processes())
        deadline = time.monotonic() + grace
        while left := [pid for pid in self.processes() if pids is None or pid in pids]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if time.monotonic() < deadline - grace + 1 else signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return ended

    @contextlib.contextmanager
    def named_loopback(self) -> Iterator[None]:
        """For the length of a block this machine takes its own name for 127.0.1.1, as Debian sets machines up."""
        before = self.hosts.read_text()
        _write_in_place(self.hosts, before.replace(f"{self.address} {self.name}", f"127.0.1.1 {self.name}"))
        try:
            yield
        finally:
            _write_in_place(self.hosts, before)


def _write_in_place(path: Path, text: str) -> None:
    # Not replaced by a rename: the bind mount holds on to the file that was there.
    with path.open("w") as file:
        file.write(text)


def _network(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, node0 and node1, until the block ends; skips where this user cannot make any."""
    for tool in ("unshare", "nsenter", "ip", "mount", "hostname"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (scripts/apt.sh installs it)")
    addresses = {"node0": "10.211.0.1", "node1": "10.211.0.2"}
    with contextlib.ExitStack() as stack:
        machines = [stack.enter_context(_machine(name, addresses, folder)) for name in addresses]
        inside = ["nsenter", f"--target={machines[0].holder}", "--net", "ip"]
        cable = ["link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(machines[1].holder)]
        _must([*inside, *cable])
        for machine in machines:
            inside = ["nsenter", f"--target={machine.holder}", "--net", "ip"]
            _must([*inside, "address", "add", f"{machine.address}/24", "dev", INTERFACE])
            _must([*inside, "link", "set", INTERFACE, "up"])
        yield machines[0], machines[1]


@contextlib.contextmanager
def three_machines(folder: Path, delayed: float) -> Iterator[tuple[Machine, Machine, Machine]]:
    """Three machines with a cable between each two; that between node0 and node1 delays what it carries.

    Each has one address, on all of its cables; the cable to node N is ``ethN`` on both others.
    """
    for tool in ("unshare", "nsenter", "ip", "mount", "hostname", "tc"):
        if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.skip(f"{tool} is not installed (scripts/apt.sh installs it)")
    addresses = {f"node{number}": f"10.212.0.{number + 1}" for number in range(3)}
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(_machine(name, addresses, folder)) for name in addresses]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            stack.enter_context(
                _cable(made[one], f"eth{other}", made[other], f"eth{one}", delayed if other == 1 else 0)
            )
            for machine, peer, name in ((made[one], made[other], f"eth{other}"), (made[other], made[one], f"eth{one}")):
                inside = ["nsenter", f"--target={machine.holder}", "--net", "ip"]
                _must([*inside, "address", "add", f"{machine.address}/32", "dev", name])
                _must([*inside, "link", "set", name, "up"])
                _must([*inside, "route", "add", f"{peer.address}/32", "dev", name, "src", machine.address])
        yield made[0], made[1], made[2]


@contextlib.contextmanager
def _cable(one: Machine, name: str, other: Machine, other_name: str, delay: float) -> Iterator[None]:
    """A cable between two machines; with a delay where one is asked for, by the kernel if it knows how."""
    add = ["link", "add", name, "type", "veth", "peer", "name", other_name, "netns", str(other.holder)]
    inside = ["nsenter", f"--target={one.holder}", "--net"]
    _must([*inside, "ip", *add])
    if delay == 0 or all(_netem(machine, cable, delay) for machine, cable in ((one, name), (other, other_name))):
        yield
        return
    _must([*inside, "ip", "link", "delete", name])
    ends = [str(one.holder), name, str(other.holder), other_name]
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("delay_line.py")), *ends, str(delay)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as line:
        assert line.stdin is not None
        assert line.stdout is not None
        assert line.stderr is not None
        if line.stdout.readline() != "ready\n":
            pytest.skip(f"a cable with a delay cannot be made here: {line.stderr.read().strip()}")
        try:
            yield
        finally:
            line.stdin.close()
            line.wait(timeout=10)


def _netem(machine: Machine, name: str, delay: float) -> bool:
    argv = ["nsenter", f"--target={machine.holder}", "--net", "tc", "qdisc", "add", "dev", name, "root", "netem"]
    argv += ["delay", f"{delay * 1000:g}ms"]
    return subprocess.run(argv, capture_output=True, check=False, timeout=20).returncode == 0


@contextlib.contextmanager
def _machine(name: str, addresses: Mapping[str, str], folder: Path) -> Iterator[Machine]:
    scratch = folder / name
    scratch.mkdir()
    hosts = folder / f"{name}.hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{where} {who}\n" for who, where in addresses.items()))
    switch = folder / "nsswitch.conf"
    switch.write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    unshare = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", _SET_UP, "sh"]
    with subprocess.Popen(
        [*unshare, name, str(hosts), str(switch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            why = holder.stderr.read().strip()
            pytest.skip(f"namespaces cannot be made here: {why}")
        machine = Machine(name=name, address=addresses[name], holder=holder.pid, hosts=hosts, scratch=scratch)
        try:
            yield machine
        finally:
            machine.end()
            holder.stdin.close()
            holder.wait(timeout=10)


def _must(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0:
        pytest.skip(f"a network between namespaces cannot be made here: {' '.join(argv)}: {done.stderr.strip()}")
