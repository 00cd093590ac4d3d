"""``lockstep launch`` on two machines: numbers, the interface by the route, failures, restarts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clusters.machines import Machine
from tests.restarting import TRAIN, fates

LIMIT = 90.0
Machines = tuple[Machine, Machine]


def launch(
    machine: Machine, number: int, script: Path, *args: str, main: Machine, port: int, flags: Sequence[str] = ()
) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_machines", "2", "--num_processes", "4"]
    argv += ["--machine_rank", str(number), "--main_process_ip", main.address, "--main_process_port", str(port)]
    folder = machine.scratch / f"run-{port}"
    return machine.popen([*argv, *flags, str(script), *args], env={"LOCKSTEP_RUN_DIR": str(folder)})


def finish(
    processes: Sequence[subprocess.Popen[str]], machines: Machines, limit: float = LIMIT
) -> list[tuple[int, str, str]]:
    deadline = time.monotonic() + limit
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for machine in machines:
                machine.end()
            out, err = process.communicate()
            pytest.fail(f"took more than {limit} s\n{out}\n{err}", pytrace=False)
        ended.append((process.returncode, out, err))
    return ended


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_machines_keep_their_numbers_and_find_the_interface(
    two_machines: Machines, script: Path, tmp_path: Path
) -> None:
    first, second = two_machines
    # Machine 1 of the job is the one torch would number first, and its name leads to an address nobody reaches.
    with first.named_loopback(), second.named_loopback():
        started = [
            launch(first, 1, script, str(tmp_path / "marks"), main=second, port=29611),
            launch(second, 0, script, str(tmp_path / "marks"), main=second, port=29611),
        ]
        (code_1, out_1, err_1), (code_0, out_0, err_0) = finish(started, two_machines)
    assert (code_0, code_1) == (0, 0), err_0 + err_1
    assert sorted(out_0.splitlines()) == [f"node1:{rank}:eth0 [0, 1, 2, 3] after 0 kills" for rank in (0, 1)]
    assert sorted(out_1.splitlines()) == [f"node0:{rank}:eth0 [0, 1, 2, 3] after 0 kills" for rank in (2, 3)]
    assert "network interface eth0 (10.211.0." in err_0


def restarts(two_machines: Machines, script: Path, marks: Path, kills: int, port: int, limit: float) -> None:
    deaths = fates(kills, 4, port)
    flags = ["--max_restarts", str(kills)]
    started = [
        launch(machine, number, script, str(marks), *deaths, main=two_machines[0], port=port, flags=flags)
        for number, machine in enumerate(two_machines)
    ]
    (code_0, out_0, err_0), (code_1, out_1, err_1) = finish(started, two_machines, limit)
    assert (code_0, code_1) == (0, 0), f"{deaths}\n{out_0}\n{err_0}\n{out_1}\n{err_1}"
    assert f"[0, 1, 2, 3] after {kills} kills" in out_0
    assert f"[0, 1, 2, 3] after {kills} kills" in out_1


@pytest.mark.soak
def test_a_killed_rank_is_recovered_from_on_both_machines(two_machines: Machines, script: Path, tmp_path: Path) -> None:
    restarts(two_machines, script, tmp_path / "marks", 1, 29613, LIMIT)


@pytest.mark.parametrize(
    "kills", [pytest.param(10, marks=pytest.mark.soak), pytest.param(30, marks=pytest.mark.soak_long)]
)
def test_every_kill_is_recovered_from(two_machines: Machines, script: Path, tmp_path: Path, kills: int) -> None:
    restarts(two_machines, script, tmp_path / "marks", kills, 29617, 60.0 + 30.0 * kills)


def test_two_machines_with_one_number_are_told(two_machines: Machines, script: Path, tmp_path: Path) -> None:
    started = [
        launch(
            machine,
            1,
            script,
            str(tmp_path / "marks"),
            main=two_machines[0],
            port=29619,
            flags=["--rdzv_conf", "is_host=true"] if machine is two_machines[0] else [],
        )
        for machine in two_machines
    ]
    for code, _, err in finish(started, two_machines):
        assert code == 2
        assert "The nodes have --machine_rank 1, 1; expected 0 to 1" in err


def test_a_machine_that_nobody_answers_says_where_it_looked(
    two_machines: Machines, script: Path, tmp_path: Path
) -> None:
    started = launch(
        two_machines[1],
        1,
        script,
        str(tmp_path / "marks"),
        main=two_machines[0],
        port=29621,
        flags=["--rdzv_conf", "timeout=6,read_timeout=6"],
    )
    ((code, _, err),) = finish([started], two_machines)
    assert code == 2
    assert "could not reach the rendezvous endpoint 10.211.0.1:29621" in err
    # Before torch gives up, which by default takes a minute.
    assert "rendezvous endpoint 10.211.0.1:29621 refused the connection from 10.211.0.2 (eth0)" in err
    assert "retrying …" in err


def test_a_rank_that_leaves_on_one_machine_ends_the_job_on_both(two_machines: Machines, tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text("import os, sys\nsys.exit(5 if os.environ['RANK'] == '3' else 0)\n")
    started = [
        launch(machine, number, script, main=two_machines[0], port=29623) for number, machine in enumerate(two_machines)
    ]
    (code_0, _, _), (code_1, _, err_1) = finish(started, two_machines, 60.0)
    assert code_0 == 0  # its own ranks were done; torch's agent alone would have waited 5 minutes for the other
    assert code_1 == 5
    assert "Rank 3 on node 1 (node1)" in err_1
