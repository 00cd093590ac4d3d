"""A node that is lost as a whole is named, and not a rank of another node that only lost its connections."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters.machines import INTERFACE, Machine
from tests.clusters.test_launch_machines import Machines, finish, launch

SCRIPT = Path(__file__).with_name("steps.py")
LIMIT = 90.0


@contextmanager
def running(machines: Machines, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    """A training on both nodes, once it is under way on both."""
    started = [launch(machine, number, SCRIPT, main=machines[0], port=port) for number, machine in enumerate(machines)]
    try:
        for machine in machines:
            await_text(machine.scratch / f"run-{port}" / "logs", "rank_*.out", "under way")
        yield started
    finally:
        for machine in machines:
            machine.end()
        for process in started:
            process.communicate()


def await_text(folder: Path, pattern: str, text: str) -> str:
    """Wait until a file says this; what it says in all."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        for path in folder.glob(pattern):
            if text in (said := path.read_text()):
                return said
        time.sleep(0.1)
    pytest.fail(f"no file {pattern} in {folder} says {text!r}", pytrace=False)


def kill(machine: Machine) -> None:
    """End everything on a node at once."""
    for pid in machine.processes():
        os.kill(pid, signal.SIGKILL)


# Node 0 hosts the store.
@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_node_whose_processes_are_all_killed(two_machines: Machines, number: int) -> None:
    with running(two_machines, 29731 + number) as started:
        kill(two_machines[number])
        ((code, _, err),) = finish([started[1 - number]], two_machines)
    lost, ranks = two_machines[number].name, "2-3" if number else "0-1"
    assert code not in (0, None), err
    assert f"Node {number} (host {lost}, ranks {ranks}) is lost: its launcher does not answer" in err, err
    assert not re.search(r"Ranks? [-\d, ]+ (raised|was killed|exited)", err), err
    if number:
        assert re.search(r"is lost: .* lost the connection to it, at \S*steps.py:\d+ in", " ".join(err.split())), err


@contextmanager
def cut_off(machine: Machine) -> Iterator[None]:
    """The network of a node is down for the length of a block."""
    link = ["nsenter", f"--target={machine.holder}", "--net", "ip", "link", "set", INTERFACE]
    subprocess.run([*link, "down"], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run([*link, "up"], check=True, timeout=20)


# No connection breaks, so each side reports it, and goes on waiting: the network may come back.
@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_node_that_is_cut_off(two_machines: Machines, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STALL_SECONDS", "4")
    port, other = 29735 + number, two_machines[1 - number]
    with running(two_machines, port) as started, cut_off(two_machines[number]):
        said = await_text(other.scratch / f"run-{port}", "diagnosis.txt", f"with node {number}")
        assert started[1 - number].poll() is None
    lost, ranks = two_machines[number].name, "2-3" if number else "0-1"
    words = " ".join(said.split())
    assert f"ranks {ranks} are lost with node {number} (host {lost}), which does not answer" in words, said
    assert "it has failed, or the network to it has" in words, said


def test_a_node_whose_launcher_ends_in_good_order_is_not_lost(two_machines: Machines, tmp_path: Path) -> None:
    script = tmp_path / "raise.py"
    script.write_text(
        "from lockstep import Accelerator\naccelerator = Accelerator(cpu=True)\naccelerator.wait_for_everyone()\n"
        "assert accelerator.process_index, 'the first rank'\naccelerator.wait_for_everyone()\n"
    )
    started = [
        launch(machine, number, script, main=two_machines[0], port=29739) for number, machine in enumerate(two_machines)
    ]
    (code_0, _, err_0), (code_1, _, err_1) = finish(started, two_machines)
    assert code_0
    assert code_1
    assert "Rank 0 on node 0 (node0)" in err_0, err_0
    assert "is lost" not in err_0 + err_1, err_0 + err_1
