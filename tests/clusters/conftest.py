"""Real equipment, shared by all tests of the run and gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters import machines, slurm_cluster, ssh, training


@pytest.fixture(scope="session")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[machines.Machine, machines.Machine]]:
    """Two machines with a network of their own between them."""
    with machines.two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Slurm]:
    """A SLURM cluster on two machines of its own, so that nobody else ends its daemons."""
    with (
        machines.two_machines(tmp_path_factory.mktemp("nodes")) as both,
        slurm_cluster.cluster(both, tmp_path_factory.mktemp("slurm")) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def ssh_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh.Ssh]:
    """Keys for ssh, and a client that uses them."""
    with ssh.keys(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(scope="session")
def sshd(ssh_keys: ssh.Ssh) -> Iterator[ssh.Ssh]:
    """An ssh server on this machine, at `ssh.LOOPBACK`."""
    with ssh_keys.serve(ssh.LOOPBACK):
        yield ssh_keys


@pytest.fixture(scope="session")
def ssh_machines(
    ssh_keys: ssh.Ssh, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[machines.Machine, machines.Machine]]:
    """Two machines that can be reached by ssh."""
    with (
        machines.two_machines(tmp_path_factory.mktemp("reachable")) as (first, second),
        ssh_keys.serve(first.address, first),
        ssh_keys.serve(second.address, second),
    ):
        yield first, second


@pytest.fixture
def job(tmp_path: Path) -> training.Training:
    """A training script, and what its ranks will say."""
    return training.in_folder(tmp_path)


@pytest.fixture(scope="session")
def three_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[machines.Machine, ...]]:
    """Three machines, each two with a cable; 5 ms long is the one between the first two."""
    with machines.three_machines(tmp_path_factory.mktemp("three"), delayed=0.005) as all_three:
        yield all_three
