"""Valid programs on two nodes, where a rank sees the black boxes of its own node only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.test_launch_machines import Machines, finish, launch
from tests.faults.test_valid_programs import PROGRAMS

SCRIPT = Path(__file__).parents[1] / "faults" / "valid.py"
SAVES = [program for program in PROGRAMS if "saves" in program]


def check(machines: Machines, programs: list[str], port: int) -> None:
    started = [
        launch(machine, number, SCRIPT, ",".join(programs), main=machines[0], port=port)
        for number, machine in enumerate(machines)
    ]
    (code, out, err), (other, _, other_err) = finish(started, machines)
    assert (code, other) == (0, 0), err + other_err
    assert [line for line in out.splitlines() if line.startswith("done")] == [f"done: {name}" for name in programs]
    assert "lockstep guard" not in err + other_err, err


def test_the_main_process_may_save_alone(two_machines: Machines) -> None:
    check(two_machines, SAVES, 29741)


@pytest.mark.soak
def test_they_run_to_their_end(two_machines: Machines) -> None:
    check(two_machines, [program for program in PROGRAMS if program not in SAVES], 29742)
