"""Ranks of two machines that fall out of step: no machine sees it alone, and one box names both."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.machines import Machine
from tests.clusters.test_launch_machines import Machines, finish, launch

SCRIPT = Path(__file__).parent / "apart.py"
SLOW = Path(__file__).parents[1] / "faults" / "slow.py"
LINES = {
    line.rpartition("# mark: ")[2].strip(): number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# mark: " in line
}
STOPPED = 86


def at(mark: str) -> str:
    return f"apart.py:{LINES[mark]}"


SCENARIOS = [
    ("shapes", ["different shapes", "Processes 0-1: [2], float32", "Processes 2-3: [3], float32", at("shapes")]),
    ("raw", ["ranks 0-1 wait in torch's all_reduce #2", at("all_reduce"), at("barrier"), "ranks 2-3"]),
    ("dtypes", ["different dtypes", "float64", at("dtypes")]),
    ("under main", ["ranks 0-1 wait in gather #2", at("gather"), "ranks 2-3 wait in wait_for_everyone", at("end")]),
]
LONG = [pytest.param(*one, marks=pytest.mark.soak) if one[0] != "raw" else one for one in SCENARIOS]


@pytest.mark.parametrize(("scenario", "parts"), LONG)
def test_machines_that_differ_are_stopped_and_told(two_machines: Machines, scenario: str, parts: list[str]) -> None:
    started = [
        launch(machine, number, SCRIPT, scenario, main=two_machines[0], port=29711)
        for number, machine in enumerate(two_machines)
    ]
    (code_0, out_0, err_0), (code_1, _, err_1) = finish(started, two_machines)
    assert (code_0, code_1) == (STOPPED, STOPPED), f"{out_0}\n{err_0}\n{err_1}"
    told = " ".join(err_0.split())
    for part in parts:
        assert part in told, f"{part!r} is not in\n{err_0}"
    assert "lockstep guard" not in err_1, err_1  # one box for the job
    assert "In full on the screen of node 0" in err_1, err_1
    for machine in two_machines:
        kept = json.loads((machine.scratch / "run-29711" / "diagnosis.json").read_text())
        assert kept["certain"], kept


def torchrun(machine: Machine, number: int, scenario: str, main: Machine) -> list[str]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    argv += ["--node-rank", str(number), "--master-addr", main.address, "--master-port", "29712"]
    return [*argv, "--local-addr", machine.address, str(SCRIPT), scenario]


@pytest.mark.soak
def test_under_torchrun_the_first_ranks_of_the_machines_talk(two_machines: Machines) -> None:
    started = [
        machine.popen(
            torchrun(machine, number, "raw", two_machines[0]),
            env={"LOCKSTEP_RUN_DIR": str(machine.scratch / "run-torchrun"), "GLOO_SOCKET_IFNAME": "eth0"},
        )
        for number, machine in enumerate(two_machines)
    ]
    (code_0, out_0, err_0), (code_1, _, _) = finish(started, two_machines)
    assert code_0, out_0
    assert code_1
    told = " ".join(err_0.split())
    for part in dict(SCENARIOS)["raw"]:
        assert part in told, f"{part!r} is not in\n{err_0}"


@pytest.mark.soak
def test_a_machine_that_sleeps_is_told_on_the_first_screen(
    two_machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_STALL_SECONDS", "3")
    folder = two_machines[0].scratch / "run-29713"
    started = [
        launch(machine, number, SCRIPT, "sleeps", main=two_machines[0], port=29713)
        for number, machine in enumerate(two_machines)
    ]
    deadline = time.monotonic() + 60
    while not (folder / "diagnosis.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    told = " ".join((folder / "diagnosis.txt").read_text().split())
    assert all(process.poll() is None for process in started)
    for process in started:
        process.terminate()
    finish(started, two_machines)
    for part in ("ranks 2-3 are in time.sleep", at("sleeps"), "ranks 0-1 wait in wait_for_everyone"):
        assert part in told, told


def test_a_slow_rank_of_another_machine_is_named_on_the_first_screen(two_machines: Machines) -> None:
    flags = ["--num_processes", "2"]  # one each: neither machine has anybody to compare it with
    started = [
        launch(machine, number, SLOW, "backward", "5", main=two_machines[0], port=29714, flags=flags)
        for number, machine in enumerate(two_machines)
    ]
    (code_0, out_0, err_0), (code_1, _, err_1) = finish(started, two_machines)
    assert (code_0, code_1) == (0, 0), f"{out_0}\n{err_0}\n{err_1}"
    told = " ".join(err_0.split())
    assert "Rank 1 (node1, cpu) is slower than the other ranks" in told, err_0
    assert "most of it in backward (+5" in told, err_0
    assert (err_0 + err_1).count("slower than") == 1, err_0 + err_1
