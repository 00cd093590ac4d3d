"""The record of a run: its line, what changed since the run before, and the file that keeps it."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lockstep import Accelerator, ProjectConfiguration, set_seed
from lockstep.optim import run_summary_file
from lockstep.optim.run_summary import RunSummary, compare, record_of, restored


def record(per_process: int | None = 16, processes: int = 2, accumulation: int = 2, **changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "learning_rate": 0.001,
        "seed": 42,
        "precision": "no",
        "lockstep": "1",
        "torch": "2",
        "time": "2026-01-01T00:00:00+00:00",
    }
    return RunSummary(per_process=per_process, processes=processes, accumulation=accumulation, **{**values, **changes})


# ---------------------------------------------------------------- the line


@pytest.mark.parametrize(
    ("given_record", "line"),
    [
        (
            record(),
            "effective batch 64 (16 per process x 2 processes x 2 accumulation), learning rate 0.001, seed 42, "
            "precision no",
        ),
        (
            record(5, 1, 1, seed=None, precision="bf16", learning_rate=0.1, other_rates=1),
            "effective batch 5 (5 per process x 1 process x 1 accumulation), learning rate 0.1 (and 1 other group), "
            "no seed set, precision bf16",
        ),
        (
            record(None, learning_rate=None, other_rates=2),
            "effective batch unknown: the loader does not say its batch size (2 processes x 2 accumulation), "
            "learning rate unknown (and 2 other groups), seed 42, precision no",
        ),
    ],
)
def test_the_line(given_record: RunSummary, line: str) -> None:
    assert given_record.line() == line


def test_a_record_of_groups_with_different_rates() -> None:
    groups = [{"lr": torch.tensor(0.5)}, {"lr": 0.5}, {"lr": 0.25}]
    made = record_of(total_batch=8, processes=2, accumulation=3, groups=groups, seed=None, precision="no")
    assert (made.per_process, made.effective_batch) == (4, 24)
    assert (made.learning_rate, made.other_rates) == (0.5, 1)
    assert made.torch == torch.__version__
    bare = record_of(total_batch=None, processes=2, accumulation=3, groups=[{}], seed=None, precision="no")
    assert (bare.per_process, bare.effective_batch, bare.learning_rate) == (None, None, None)


# ---------------------------------------------------------------- what changed


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        # The accumulation stays where it can.
        (
            record(16, 2, 2),
            record(16, 4, 2),
            [
                "of 64 (16 x 2 processes x 2)",
                "128 (16 x 4 processes x 2)",
                "8 samples per process on the present 4",
                "with the present gradient_accumulation_steps=2",
                "from 0.001 to 0.002 (it is 0.001)",
            ],
        ),
        # It does not divide: another accumulation, the batch as it is.
        (record(16, 1, 2), record(16, 1, 3), ["16 samples per process", "and gradient_accumulation_steps=2"]),
        # Nor does that: both change, and the batch gets no larger.
        (record(32, 2, 1), record(5, 2, 3), ["4 samples per process", "and gradient_accumulation_steps=8"]),
        (record(64, 1, 1), record(16, 3, 1), ["64 cannot be had on 3 processes in whole numbers", "to 0.00075"]),
        (record(1, 2, 1), record(1, 4, 1), ["2 cannot be had on 4 processes in whole numbers"]),
        (record(16), record(32, learning_rate=0.002), ["to 0.002, as it is already"]),
        (record(16, learning_rate=None), record(32), ["see whether the learning rate fits"]),
    ],
)
def test_another_effective_batch(before: RunSummary, now: RunSummary, words: list[str]) -> None:
    text = compare(before, now)
    assert text is not None
    assert [word for word in words if word not in text] == []
    assert "\n" not in text


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (record(16, 2, 2), record(64, 1, 1, learning_rate=1.0, seed=None, precision="bf16")),
        (record(None), record()),
        (record(), record(None)),
    ],
)
def test_nothing_to_say(before: RunSummary, now: RunSummary) -> None:
    assert compare(before, now) is None


small = st.integers(1, 40)
records = st.builds(
    record,
    st.none() | small,
    small,
    small,
    learning_rate=st.none() | st.floats(1e-8, 1e3),
    seed=st.none() | st.integers(0, 2**32 - 1),
    other_rates=st.integers(0, 3),
)


@given(effective_batch=st.integers(1, 5000), now=records)
def test_what_is_advised_gives_the_batch_back(effective_batch: int, now: RunSummary) -> None:
    found = restored(effective_batch, now)
    if found is None:
        assert effective_batch % now.processes != 0
        return
    batch, accumulation = found
    assert batch >= 1
    assert accumulation >= 1
    assert batch * now.processes * accumulation == effective_batch
    share = effective_batch // now.processes
    if share % now.accumulation == 0:
        assert accumulation == now.accumulation
    elif now.per_process is not None:
        assert batch <= now.per_process
        assert batch == now.per_process or share % now.per_process != 0


@given(before=records, now=records)
def test_a_difference_names_both_batches_and_one_whole_line(before: RunSummary, now: RunSummary) -> None:
    text = compare(before, now)
    old, new = before.effective_batch, now.effective_batch
    assert (text is None) == (old is None or new is None or old == new)
    if text is None or old is None or new is None:
        return
    assert "\n" not in text
    assert f"effective batch of {old} " in text
    assert f"this one has {new} " in text
    advised = re.search(r"use (\d+) samples? per process .* gradient_accumulation_steps=(\d+);", text)
    assert (advised is None) == (old % now.processes != 0)
    if advised is not None:
        assert int(advised[1]) * now.processes * int(advised[2]) == old


@given(kept=records)
def test_a_record_survives_json(kept: RunSummary) -> None:
    values = json.loads(json.dumps(kept.to_dict()))
    assert values["effective_batch"] == kept.effective_batch
    assert RunSummary.from_dict(values) == kept


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([1], "list"),
        ({}, "processes"),
        ({**record().to_dict(), "processes": 0}, "processes is 0"),
        ({**record().to_dict(), "per_process": "16"}, "per_process is '16'"),
        ({**record().to_dict(), "accumulation": True}, "accumulation is True"),
        ({**record().to_dict(), "accumulation": None}, "accumulation is None"),
        ({**record().to_dict(), "learning_rate": "high"}, "learning_rate is 'high'"),
    ],
)
def test_what_is_no_record(values: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RunSummary.from_dict(values)


# ---------------------------------------------------------------- the file


def test_the_file_is_made_with_its_folder_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "project"
    assert run_summary_file.write_summary(str(folder), record(16)) == []
    assert run_summary_file.write_summary(str(folder), record(8, accumulation=4)) == []
    (warning,) = run_summary_file.write_summary(str(folder), record(32))
    assert "effective batch of 64" in warning
    assert [path.name for path in folder.iterdir()] == ["lockstep_run.json"]
    assert json.loads((folder / "lockstep_run.json").read_text()) == record(32).to_dict()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"processes": 2}', "\x00"])
def test_a_file_that_is_no_record_is_told_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lockstep_run.json"
    path.write_text(text)
    (warning,) = run_summary_file.write_summary(str(tmp_path), record())
    assert f"{path} cannot be read" in warning
    assert run_summary_file.write_summary(str(tmp_path), replace(record(), time="later")) == []


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    *_, warning = run_summary_file.write_summary(str(tmp_path / "file"), record())
    assert "cannot be written" in warning


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_summary_file.write_summary(str(tmp_path), record(16))

    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    said = run_summary_file.write_summary(str(tmp_path), record(32))
    assert "disk full" in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["lockstep_run.json"]
    assert json.loads((tmp_path / "lockstep_run.json").read_text())["per_process"] == 16


# ---------------------------------------------------------------- the accelerator


@pytest.fixture
def heard(alone: None, caplog: pytest.LogCaptureFixture) -> Any:
    """The lines of the run's logger, whose level is nobody's before and after."""
    logger = logging.getLogger("lockstep.run")
    logger.setLevel(logging.NOTSET)
    yield lambda: [entry.getMessage() for entry in caplog.records if entry.name == "lockstep.run"]
    logger.setLevel(logging.NOTSET)


def train(accelerator: Accelerator, loader: Any = None, epochs: int = 1) -> None:
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.zeros(16, 1))
    loader = DataLoader(data, batch_size=4) if loader is None else loader
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    for _ in range(epochs):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()


def test_one_line_at_the_first_update(heard: Any) -> None:
    set_seed(7)
    train(Accelerator(cpu=True, gradient_accumulation_steps=2), epochs=2)
    assert heard() == [
        "effective batch 8 (4 per process x 1 process x 2 accumulation), learning rate 0.5, seed 7, precision no"
    ]


def test_an_unseeded_run_says_so(heard: Any) -> None:
    before = torch.get_rng_state()
    try:
        torch.manual_seed(2**63 + 5)  # as torch starts
        train(Accelerator(cpu=True))
    finally:
        torch.manual_seed(0)
        torch.set_rng_state(before)
    assert "no seed set" in heard()[0]


def test_a_loader_whose_batches_vary(heard: Any) -> None:
    class Varying(BatchSampler):
        def __init__(self) -> None:
            pass

        def __iter__(self) -> Any:
            yield from ([0], [1, 2])

        def __len__(self) -> int:
            return 2

    data = TensorDataset(torch.zeros(16, 1))
    train(Accelerator(cpu=True), DataLoader(data, batch_sampler=Varying()))
    assert "effective batch unknown" in heard()[0]


def test_without_a_prepared_loader_there_is_no_line(heard: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.zeros(1, 1)).mean())
    optimizer.step()
    assert heard() == []


def test_two_optimizers_make_one_line_and_freed_memory_another(heard: Any) -> None:
    accelerator = Accelerator(cpu=True)
    train(accelerator)
    train(accelerator)
    assert len(heard()) == 1
    accelerator.free_memory()
    train(accelerator, DataLoader(TensorDataset(torch.zeros(4, 1)), sampler=SequentialSampler(range(4)), batch_size=2))
    assert [line.split(" (")[0] for line in heard()] == ["effective batch 4", "effective batch 2"]


@pytest.mark.parametrize(
    ("name", "level", "lines"),
    [("lockstep.run", "ERROR", 0), ("lockstep", "WARNING", 0), ("lockstep", "INFO", 1), ("", "ERROR", 0)],
)
def test_who_has_set_a_level_is_heeded(heard: Any, name: str, level: str, lines: int) -> None:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        train(Accelerator(cpu=True))
    finally:
        logger.setLevel(before)
    assert len(heard()) == lines


def test_the_level_of_the_environment_is_heeded(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_LOG_LEVEL", "WARNING")
    train(Accelerator(cpu=True))
    assert heard() == []


def test_the_project_directory_remembers(heard: Any, tmp_path: Path) -> None:
    train(Accelerator(cpu=True, project_dir=tmp_path))
    kept = json.loads((tmp_path / "lockstep_run.json").read_text())
    assert (kept["effective_batch"], kept["per_process"], kept["learning_rate"]) == (4, 4, 0.5)
    assert len(heard()) == 1
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(project_dir=str(tmp_path)), gradient_accumulation_steps=2
    )
    train(accelerator)
    warning = heard()[-1]
    assert "effective batch of 4 (4 x 1 process x 1), this one has 8 (4 x 1 process x 2)" in warning
    assert "2 samples per process on the present 1 process" in warning
    assert "from 0.5 to 1 (it is 0.5)" in warning
    assert json.loads((tmp_path / "lockstep_run.json").read_text())["effective_batch"] == 8
    assert accelerator._state.run_summary is not None
    assert accelerator._state.run_summary.effective_batch == 8
