"""Errors of reading data: a worker of torch's loader that dies while it hands a batch over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.data import read_errors


@pytest.fixture
def batches() -> Iterator[Any]:
    found = iter(DataLoader(TensorDataset(torch.zeros(8)), num_workers=1))
    next(found)
    yield found
    del found


@pytest.mark.parametrize("kind", [ConnectionRefusedError, ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_that_was_killed_is_named(
    batches: Any, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_errors, "_ENDS", 0.05)
    (worker,) = batches._workers
    error = kind("the connection broke")
    assert read_errors.of_lost_worker(error, batches) is error  # it lives: the error is the data set's own
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert str(read_errors.of_lost_worker(error, batches)).startswith(
        f"DataLoader worker (pid {worker.pid}) was killed by SIGKILL while it handed over a batch."
    )


def test_a_worker_whose_connection_breaks_before_it_has_ended_is_named(batches: Any) -> None:
    (worker,) = batches._workers
    killing = threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL))
    killing.start()
    named = read_errors.of_lost_worker(ConnectionResetError("reset by peer"), batches)
    killing.join()
    assert f"DataLoader worker (pid {worker.pid})" in str(named)


def test_other_errors_stay_as_they_are(batches: Any) -> None:
    (worker,) = batches._workers
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    for error in (ValueError("broken"), FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.")):
        assert read_errors.of_lost_worker(error, batches) is error
    assert read_errors.of_lost_worker(ConnectionError("a store of the data set's"), None).args == (
        "a store of the data set's",
    )
