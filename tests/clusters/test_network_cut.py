"""A network that fails between two nodes, for a while or for good, in both directions or in one: the pair is named."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters.machines import Machine
from tests.clusters.test_launch_machines import Machines, finish, launch
from tests.clusters.test_node_lost import await_text, cut_off

SCRIPT = Path(__file__).with_name("cut.py")
NAMED = 45.0
"""Seconds within which both ends are named."""
PAIR = r"no connection between node \d \(host node\d, 10.211.0.\d\) and node \d \(host node\d, 10.211.0.\d\)"
pytestmark = pytest.mark.soak


def start(machines: Machines, port: int, steps: int, timeout: float) -> list[subprocess.Popen[str]]:
    started = [
        launch(machine, number, SCRIPT, str(steps), str(timeout), main=machines[0], port=port)
        for number, machine in enumerate(machines)
    ]
    for machine in machines:
        await_text(machine.scratch / f"run-{port}" / "logs", "rank_*.out", "under way")
    return started


def end(machines: Machines, started: Sequence[subprocess.Popen[str]]) -> None:
    for machine in machines:
        machine.end()
    for process in started:
        process.communicate()


def test_a_network_that_comes_back_changes_nothing(two_machines: Machines) -> None:
    """Of 100 steps each takes 0.1 times the average of 1, 2, 3 and 4, which is 2.5, from every weight."""
    started = start(two_machines, 29751, 100, 120.0)
    try:
        with cut_off(two_machines[1]):
            time.sleep(20)
        ended = finish(started, two_machines, 150.0)
    finally:
        end(two_machines, started)
    for code, out, err in ended:
        assert code == 0, err
        assert out.count("weights [-24.0, -24.0, -24.0]") == 2, out


@contextmanager
def deaf(machine: Machine, peer: Machine) -> Iterator[None]:
    """Nothing of what the peer sends arrives; what is sent to it does."""
    nft = ["nsenter", f"--target={machine.holder}", "--net", "nft"]
    rule = f"table ip cut {{ chain input {{ type filter hook input priority 0; ip saddr {peer.address} drop; }}; }}"
    done = subprocess.run([*nft, rule], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        pytest.skip(f"packets cannot be dropped here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run([*nft, "delete", "table", "ip", "cut"], check=True, timeout=20)


@pytest.mark.parametrize("ways", ["both", "to node 1", "to node 0"])
def test_a_network_that_stays_away_is_named(two_machines: Machines, ways: str) -> None:
    port = 29755 + ["both", "to node 1", "to node 0"].index(ways)
    first, second = two_machines
    started = start(two_machines, port, 10_000, 600.0)
    cut = {"both": cut_off(second), "to node 1": deaf(second, first), "to node 0": deaf(first, second)}[ways]
    try:
        with cut:
            since = time.monotonic()
            said = ""
            while not re.search(PAIR, said) and time.monotonic() - since < 3 * NAMED:
                texts = [machine.scratch / f"run-{port}" / "diagnosis.txt" for machine in two_machines]
                said = " ".join(" ".join(path.read_text().split()) for path in texts if path.exists())
                time.sleep(0.2)
            took = time.monotonic() - since
            assert re.search(PAIR, said), f"{ways}, after {took:.0f} s: {said}"
            assert all(process.poll() is None for process in started)  # it may come back
    finally:
        end(two_machines, started)


def test_a_network_that_stays_away_ends_the_job_at_its_timeout(two_machines: Machines) -> None:
    started = start(two_machines, 29759, 10_000, 20.0)
    try:
        with cut_off(two_machines[1]):
            ended = finish(started, two_machines, 20.0 + 3 * NAMED)
    finally:
        end(two_machines, started)
    for code, _, err in ended:
        assert code not in (0, None), err
