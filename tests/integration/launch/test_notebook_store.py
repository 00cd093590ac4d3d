"""Machines of a notebook's job that wait for each other: one says for whom, and gives up in the end."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.errors import ConfigError, TopologyError
from lockstep.launch import notebook_store
from lockstep.launch.notebook_store import Nodes, NotebookStore
from tests.ranks import free_port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(notebook_store, "SILENCE", 0.1)
    return free_port()


def machine(rank: int, port: int, patience: float, secret: str = "") -> NotebookStore:
    return NotebookStore(
        Nodes(number=2, rank=rank, processes=1, address="127.0.0.1", port=port, fixed_port=True, patience=patience),
        secret,
    )


def test_a_machine_that_is_early_says_for_whom_it_waits(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = machine(0, port, 20.0), machine(1, port, 20.0)
    thread = threading.Thread(target=second.begin, args=(0,))
    thread.start()
    time.sleep(1.0)
    first.begin(0)
    thread.join(20)
    assert not thread.is_alive()
    said = capsys.readouterr().err
    assert said.count("waiting for machine 0") == 1
    assert f"notebook_launcher: waiting for machine 0 at 127.0.0.1:{port} (connection refused) …" in said
    second.close(patience=0)
    first.close(patience=0)


def test_a_machine_that_nobody_answers_gives_up(port: int) -> None:
    with pytest.raises(TopologyError, match=r"could not reach machine 0 .* within 0.5 s \(connection refused\)"):
        machine(1, port, 0.5).begin(0)


def test_machine_0_names_the_one_that_has_not_come(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TopologyError, match=r"Machine 1 of 2 has not come within 0.7 s"):
        machine(0, port, 0.7).begin(0)
    assert "notebook_launcher: waiting for machine 1 of 2 …" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "words"), [("", "this one has no "), ("other", "this one has another ")])
def test_machines_with_different_secrets_are_told_so(port: int, own: str, words: str) -> None:
    first, second = machine(0, port, 2.5, "secret"), machine(1, port, 20.0, own)
    failures: list[BaseException] = []

    def begin() -> None:
        try:
            first.begin(0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    with pytest.raises(ConfigError, match=f"{words}LOCKSTEP_JOB_SECRET.*the same value on every node"):
        second.begin(0)
    thread.join(20)
    assert "has not come" in str(failures[0])
    second.close(patience=0)
    first.close(patience=0)
