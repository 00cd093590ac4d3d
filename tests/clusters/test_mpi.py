"""Jobs started by mpirun: Open MPI and MPICH, on this machine, over ssh to itself, and on two machines."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clusters.machines import LAUNCHED, Machine
from tests.clusters.ssh import LOOPBACK, Ssh
from tests.clusters.training import Training
from tests.ranks import free_port, in_soak

HERE = socket.gethostname()


@pytest.fixture
def mpirun(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder in which mpirun is the one of an MPI, whichever the system prefers."""
    found = shutil.which(f"mpirun.{request.param}")
    if found is None:
        pytest.skip(f"mpirun.{request.param} is not installed (scripts/apt.sh installs it)")
    folder = tmp_path / "bin"
    folder.mkdir()
    # Not a link: MPICH looks for its other programs beside the name it is called by.
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    return folder


open_mpi = pytest.mark.parametrize("mpirun", ["openmpi"], indirect=True)
mpich = pytest.mark.parametrize("mpirun", ["mpich"], indirect=True)
both = pytest.mark.parametrize("mpirun", ["openmpi", *in_soak("mpich")], indirect=True)


def environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    path = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "OMPI_MCA_orte_tmpdir_base": str(folder),
        "LOCKSTEP_RUN_DIR": f"{folder}/run",
    }
    # Where no name server answers, torch's question for the name behind each address would take 5 s.
    return {**kept, "OMP_NUM_THREADS": "1", **path, **(extra or {})}


def run(argv: list[str], env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def launch(hostfile: Path, machines: int, processes: int, job: Training, *args: str) -> list[str]:
    command = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--mpirun_hostfile", str(hostfile)]
    command += ["--num_machines", str(machines), "--num_processes", str(processes)]
    return [*command, str(job.script), str(job.folder), *args]


def hosts(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


@mpich  # Open MPI's turn: tests/distributed/test_launchers.py
def test_plain_mpirun_is_recognised(mpirun: Path, job: Training, tmp_path: Path) -> None:
    argv = [str(mpirun / "mpirun"), "-n", "2", sys.executable, str(job.script), str(job.folder)]
    # Torch's default port may be in use by a test beside this one.
    done = run(argv, environment(mpirun, {"MASTER_PORT": str(free_port())}), tmp_path)
    assert done.returncode == 0, done.stderr
    said = job.check(HERE, HERE, launcher="mpi")
    assert [one["local_rank"] for one in said] == [0, 1]


@both
def test_launch_over_ssh(mpirun: Path, job: Training, sshd: Ssh, tmp_path: Path) -> None:
    command = launch(hosts(tmp_path, f"localhost slots=1\n{LOOPBACK} slots=1\n"), 2, 2, job)
    done = run(command, environment(mpirun, {**sshd.for_mpi, "LOCKSTEP_NOTED": "a b;c"}), tmp_path)
    assert done.returncode == 0, done.stderr
    said = job.check(HERE, HERE, launcher="mpi")
    # Two machines, as far as MPI can see; and both were handed what was set where the job was started.
    assert [(one["local_rank"], one["node"]) for one in said] == [(0, 0), (0, 1)]
    assert [one["setting"] for one in said] == ["a b;c", "a b;c"]


@open_mpi
def test_launch_on_two_machines(
    mpirun: Path, job: Training, ssh_machines: tuple[Machine, Machine], ssh_keys: Ssh, tmp_path: Path
) -> None:
    command = launch(hosts(tmp_path, "node0\nnode1\n"), 2, 4, job)
    env = {**ssh_keys.for_mpi, "PATH": f"{mpirun}:{os.environ['PATH']}", "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    done = ssh_machines[0].run(["env", f"--chdir={tmp_path}", *command], env=env)
    assert done.returncode == 0, done.stderr
    said = job.check("node0", "node0", "node1", "node1", launcher="mpi")
    assert [one["node"] for one in said] == [0, 0, 1, 1]


@both
def test_a_job_on_this_machine_that_fails_passes_the_code_on(mpirun: Path, job: Training, tmp_path: Path) -> None:
    # A form of MPICH's, read for Open MPI as well.
    done = run(launch(hosts(tmp_path, "# me\nlocalhost:2\n"), 1, 2, job, "fail"), environment(mpirun), tmp_path)
    assert done.returncode == 5, done.stderr
    said = job.check(HERE, HERE, launcher="mpi")
    assert [one["local_rank"] for one in said] == [0, 1]
    assert "Rank 1" in done.stderr


@open_mpi
def test_what_cannot_work_ends_before_mpirun(mpirun: Path, job: Training, tmp_path: Path) -> None:
    done = run(launch(hosts(tmp_path, "localhost slots=1\n"), 2, 4, job), environment(mpirun), tmp_path)
    assert done.returncode == 2
    assert "names 1: localhost" in done.stderr
    assert "fewer slots: localhost 1" in done.stderr
    assert job.said() == []
