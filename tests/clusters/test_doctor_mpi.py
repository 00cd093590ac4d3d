"""``lockstep doctor mpi`` with a real ssh server, with and without a key, and the real Open MPI and MPICH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clusters.machines import Machine
from tests.clusters.ssh import LOOPBACK, Ssh
from tests.clusters.test_mpi import both, environment, hosts, mpirun, open_mpi, run

__all__ = ["mpirun"]  # the fixture


def doctor(hostfile: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "doctor", "mpi", "--json", "--hostfile", str(hostfile), *options]


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def intruder(ssh_keys: Ssh, folder: Path) -> Path:
    """A client like the other, with a key that the server does not know."""
    key = folder / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=20)
    text = (ssh_keys.folder / "config").read_text()
    (folder / "config").write_text(text.replace(f"{ssh_keys.folder}/user_key", str(key)))
    client = folder / "ssh"
    client.write_text(f'#!/bin/sh\nexec ssh -F {folder}/config "$@"\n')
    client.chmod(0o755)
    return client


@both
def test_with_a_key_all_is_well(mpirun: Path, sshd: Ssh, tmp_path: Path) -> None:
    env = environment(mpirun, sshd.for_mpi)
    done = run(doctor(hosts(tmp_path, f"# both are here\nlocalhost\n{LOOPBACK}\n")), env, tmp_path)
    found = findings(done)
    assert done.returncode == 0, done.stdout
    assert found[f"{LOOPBACK}: ssh"]["status"] == "ok"
    assert found[f"{LOOPBACK}: port {sshd.port}"]["status"] == "ok"
    assert found[f"{LOOPBACK}: mpirun"]["what"].startswith("the same: ")
    tried = found["mpirun hostname"]
    assert tried["status"] == "ok"
    assert len(tried["data"]["printed"]) == 2
    guide = "-n 2 -ppn 1 hostname" if "openmpi" not in (mpirun / "mpirun").read_text() else "--map-by ppr:1:node"
    assert guide in tried["data"]["command"]


@open_mpi
def test_without_a_key_the_line_to_type_is_given(mpirun: Path, sshd: Ssh, tmp_path: Path) -> None:
    client = intruder(sshd, tmp_path)
    command = doctor(hosts(tmp_path, f"{LOOPBACK} slots=2\n"), "--ssh", str(client))
    done = run(command, environment(mpirun), tmp_path)
    assert done.returncode == 1
    refused = findings(done)[f"{LOOPBACK}: ssh"]
    assert refused["status"] == "error"
    assert "Permission denied" in refused["what"]
    assert f"ssh-copy-id -p {sshd.port} " in refused["fix"]
    assert findings(done)["mpirun hostname"]["status"] == "skipped"


@open_mpi
def test_two_machines_from_each_to_each(
    mpirun: Path, ssh_machines: tuple[Machine, Machine], ssh_keys: Ssh, tmp_path: Path
) -> None:
    env = {**ssh_keys.for_mpi, "PATH": f"{mpirun}:{os.environ['PATH']}"}
    here, there = ssh_machines
    command = doctor(hosts(tmp_path, "node0 slots=1\nnode1 slots=1\n"), "--all-pairs")
    done = here.run(command, env=env)
    found = findings(done)
    assert done.returncode == 0, done.stdout
    assert found["node0"]["what"] == "is this machine: mpirun needs no ssh for it"
    assert found["node1: ssh"]["status"] == "ok"
    assert found["all pairs"]["status"] == "ok"
    assert sorted(found["mpirun hostname"]["data"]["printed"]) == ["node0", "node1"]
    # Now node1 has a name for node0 that leads nowhere: only the way back fails, and it says where to mend it.
    before = there.hosts.read_text()
    try:
        with there.hosts.open("w") as file:
            file.write(before.replace(f"{here.address} node0", ""))
        done = here.run(command, env=env)
    finally:
        with there.hosts.open("w") as file:
            file.write(before)
    found = findings(done)
    assert done.returncode == 1
    assert found["node1 to node0"]["status"] == "error"
    assert found["node1 to node0"]["fix"].startswith("on node1: ")
