"""An ssh server of our own, with its own keys, on a port anybody may open: for the launchers that reach out by ssh."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters.machines import Machine
from tests.ranks import free_port

START_SECONDS = 10.0
PRIVILEGE_SEPARATION = Path("/run/sshd")  # sshd, run by root, insists on it

LOOPBACK = "127.0.0.2"
"""This machine under an address that no MPI takes for its own, so that it really goes through ssh."""

_SERVER = """
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
AcceptEnv *
"""
_CLIENT = """
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  BatchMode yes
  LogLevel ERROR
"""


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """Keys, a configuration, and a client that uses them."""

    folder: Path
    port: int

    @property
    def client(self) -> Path:
        """A program to be called in the place of ssh."""
        return self.folder / "ssh"

    @property
    def for_mpi(self) -> dict[str, str]:
        """What tells Open MPI, and MPICH and its relatives, to use the client."""
        return {
            "OMPI_MCA_plm_rsh_agent": str(self.client),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(self.client),
        }

    @contextlib.contextmanager
    def serve(self, address: str, machine: Machine | None = None) -> Iterator[None]:
        """A server at an address, here or on one of the test's machines, until the block ends."""
        configuration = self.folder / f"sshd_{address}"
        configuration.write_text(_SERVER.format(address=address, port=self.port, folder=self.folder))
        sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin") or ""
        argv = ["setpriv", "--pdeathsig", "KILL", sshd, "-D", "-e", "-f", str(configuration)]
        log = self.folder / f"sshd_{address}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                argv if machine is None else machine.command(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while "Server listening" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"sshd did not start: {log.read_text()}", pytrace=False)
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            process.wait(timeout=10)


@contextlib.contextmanager
def keys(folder: Path) -> Iterator[Ssh]:
    """Keys and configurations; skips where ssh or its server is not installed."""
    for tool in ("ssh", "ssh-keygen", "sshd"):
        if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.skip(f"{tool} is not installed (scripts/apt.sh installs it)")
    if os.geteuid() != 0:
        pytest.skip("sshd lets only root start sessions for others, and this test run is not root's")
    for name in ("host_key", "user_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True, timeout=20)
    ssh = Ssh(folder=folder, port=free_port())
    (folder / "config").write_text(_CLIENT.format(port=ssh.port, folder=folder))
    ssh.client.write_text(f'#!/bin/sh\nexec ssh -F {folder}/config "$@"\n')
    ssh.client.chmod(ssh.client.stat().st_mode | stat.S_IXUSR)
    made = not PRIVILEGE_SEPARATION.exists()
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    try:
        yield ssh
    finally:
        if made:
            with contextlib.suppress(OSError):
                PRIVILEGE_SEPARATION.rmdir()
