from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.errors import TopologyError
from lockstep.topology.environments import variables


@pytest.mark.parametrize("text", ["0", "7", "007", " 7 "])
def test_whole_numbers(text: str) -> None:
    assert variables.number({"RANK": text}, "RANK") == int(text)


@pytest.mark.parametrize("text", ["", " ", "-1", "+1", "1.0", "1_0", "two", "٣", "²", "0x1", "9" * 5000])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        variables.number({"RANK": text}, "RANK")
    message = str(caught.value)
    assert message.startswith("RANK is '")
    assert "Allowed: a whole number, 0 or more" in message
    assert len(message) < 300


def test_bounds_are_said() -> None:
    with pytest.raises(TopologyError, match=r"MASTER_PORT is '70000'. Allowed: a whole number, from 1 to 65535"):
        variables.main_port({"MASTER_PORT": "70000"})


def test_the_first_name_that_is_set_counts() -> None:
    assert variables.number({"B": "2", "C": "3"}, "A", "B", "C") == 2
    assert variables.number({}, "A") is None
    assert variables.text({"A": " ", "B": "b"}, "A", "B") == "b"


def test_missing_names_who_sets_it() -> None:
    with pytest.raises(TopologyError, match="A or B is not set, although other variables of srun are"):
        variables.needed({}, "A", "B", by="srun")


def test_seen() -> None:
    environ = {"A": "1", "B": "2", "C": "3"}
    assert variables.seen(environ, "A", "X", "B", "C") == "A=1, B=2 and C=3"
    assert variables.seen(environ, "A") == "A=1"
    assert variables.seen(environ, "X") == ""


def test_derived_port_is_the_same_in_every_process() -> None:
    code = "from lockstep.topology.environments.variables import derived_port; print(derived_port('slurm', '12', '0'))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(there) == variables.derived_port("slurm", "12", "0")


def test_derived_ports_stay_in_their_range_and_differ() -> None:
    ports = [variables.derived_port("slurm", str(job), str(step)) for job in range(100) for step in range(3)]
    assert all(20000 <= port <= 29999 for port in ports)
    assert len(set(ports)) > 280
    assert variables.derived_port("slurm", "1", "23") != variables.derived_port("slurm", "12", "3")
