"""The batch-size search and the out-of-memory report on a training made by hand: no accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.current import Session
from lockstep.memory.batch_size import Search, SearchOptions
from lockstep.memory.oom_report import report
from lockstep.training.state import TrainingState
from tests.unit.training.states import make_state, train


def session_of(state: TrainingState) -> Session:
    return Session(topology=state.topology, group=state.group, training=state)


def options(**changes: Any) -> SearchOptions:
    usual: dict[str, Any] = {"start": 16, "reduce": None, "keep_effective": False, "binary": False, "margin": 0.0}
    return SearchOptions(**{**usual, **changes})


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def test_what_a_failed_attempt_prepared_is_forgotten() -> None:
    outside = nn.Linear(2, 1)
    state = make_state(outside)
    tried = []

    def attempt(size: int) -> int:
        tried.append(size)
        state.models.append(nn.Linear(2, 1))
        if size > 4:
            raise out_of_memory()
        return size

    assert Search(attempt, options(), session_of(state)).run() == 4
    assert tried == [16, 8, 4]
    assert state.models[0] is outside
    assert len(state.models) == 2


def test_a_smaller_batch_accumulates_more() -> None:
    state = make_state(steps=3)

    def attempt(size: int) -> int:
        if size > 4:
            raise out_of_memory()
        return state.accumulation.num_steps

    assert Search(attempt, options(keep_effective=True), session_of(state)).run() == 12


def test_a_trial_ends_after_two_updates() -> None:
    state = make_state(nn.Linear(2, 1))
    updates: dict[int, int] = {}

    def attempt(size: int) -> int:
        before = state.updates
        try:
            for _ in range(5):
                if size > 9:
                    raise out_of_memory()
                train(state, torch.ones(size, 2))
        finally:
            updates[size] = state.updates - before
        return size

    assert Search(attempt, options(binary=True), session_of(state)).run() == 9
    assert updates == {16: 0, 8: 2, 12: 0, 10: 0, 9: 5}
    assert state.on_update is None


def test_the_report_names_what_is_large() -> None:
    state = make_state(nn.Linear(512, 512))
    train(state, torch.ones(4, 512))
    text = str(report(out_of_memory(), session_of(state)))
    assert "Out of memory on rank 0 (cpu)" in text or "Out of memory on rank 0 (host)" in text
    assert "Linear (weights 1.0 MiB" in text
    assert "tried to allocate 1.0 GiB" in text
