"""Bad numbers on one of several ranks: who is named, and that all ranks do the same."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, NumericsError, PeerFailure
from lockstep.debug_utils import DebugUnderflowOverflow, detect_overflow
from lockstep.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BAD = 5
"""The sample that is zero: of the third round of batches of one, rank 1's."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(1, 4), nn.Identity(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x) / (x != 0)))


def samples() -> DataLoader[Any]:
    values = torch.arange(1.0, 13.0).view(-1, 1)
    values[BAD] = 0.0
    return DataLoader(values, batch_size=1)  # type: ignore[arg-type]


def train(policy: str, how: str = "", **options: Any) -> dict[str, Any]:
    accelerator = Accelerator(nan_policy=policy, **options)
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), samples())
    skipped: list[bool] = []
    error = ""
    try:
        for turn, x in enumerate(loader):
            if how == "infinite loss":
                x = x.abs() + 1
            loss = model(x).square().mean()
            if how == "infinite loss" and turn == 2 and accelerator.process_index == 1:
                loss = loss + math.inf  # of which the gradient knows nothing
            accelerator.backward(loss)
            if how == "clip":
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    except (NumericsError, PeerFailure) as caught:
        error = f"{type(caught).__name__}: {caught}"
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    folder = accelerator._session.directory.numerics
    reports = {path.name: path.read_text() for path in sorted(folder.glob("rank_*.txt"))}
    return {"skipped": skipped, "error": error, "weights": weights.tolist(), "reports": reports}


@pytest.mark.parametrize("how", ["", "clip", "infinite loss"])
def test_an_update_is_dropped_on_all_ranks_together(how: str) -> None:
    outcomes = run_ranks(train, 2, "skip", how, on_failure="collect")
    assert [outcome.error_text for outcome in outcomes] == ["", ""]
    first, second = (outcome.value for outcome in outcomes)
    assert first["skipped"] == second["skipped"] == [False, False, True, False, False, False]
    assert first["weights"] == second["weights"]
    assert all(map(math.isfinite, first["weights"]))
    told = [text for outcome in outcomes for text in outcome.output.split("WARNING ") if "nan_policy='skip'" in text]
    assert len(told) == 1  # one report for the job
    assert "the update is dropped on all ranks" in told[0]
    assert f"rank 1: the loss is {'inf' if how == 'infinite loss' else 'nan'}, sample 5" in told[0]
    assert ("in input[0] of middle (Identity)" in told[0]) == (how != "infinite loss")
    assert "rank 0:" not in told[0]


def test_all_ranks_stop_at_the_same_update_with_the_same_report() -> None:
    first, second = run_ranks(train, 2, "stop")
    assert first["skipped"] == second["skipped"] == [False, False]
    assert first["error"] == second["error"]
    assert first["error"].startswith("NumericsError: nan_policy='stop': the gradient of update 3 is nan.\n")
    assert "rank 1: the loss is nan, sample 5" in first["error"]
    assert "in input[0] of middle (Identity)" in first["error"]


def test_a_warning_comes_from_the_rank_that_saw_it_first() -> None:
    outcomes = run_ranks(train, 2, "warn", on_failure="collect")
    assert [outcome.error_text for outcome in outcomes] == ["", ""]
    told = [outcome.output.count("lockstep.numerics: ") for outcome in outcomes]
    assert told == [0, 1]
    assert "Update 3, rank 1: the loss is nan, sample 5." in outcomes[1].output
    assert "Update 3, rank 1: the loss is nan" in outcomes[1].value["reports"]["rank_1.txt"]  # kept with the run


def one_after_the_other() -> list[str]:
    """What two accelerators of one job say of their bad losses, the first of rank 0's batch, the second of rank 1's."""
    told = []
    for rank in (0, 1):
        accelerator = Accelerator(nan_policy="stop")
        net = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loss = model(torch.ones(1, 1)).sum()
        accelerator.backward(loss * math.inf if accelerator.process_index == rank else loss)
        try:
            optimizer.step()
        except NumericsError as caught:
            told.append(str(caught))
    return told


def test_a_second_accelerator_does_not_repeat_what_the_first_has_found() -> None:
    for first, second in run_ranks(one_after_the_other, 2):
        assert "rank 0: the loss is" in first
        assert "rank 1: the loss is" in second
        assert "rank 0: the loss is" not in second


def test_the_detector_ends_the_job_with_one_report() -> None:
    outcomes = run_ranks(train, 2, "warn", debug="underflow_overflow", on_failure="collect")
    assert [outcome.error_text for outcome in outcomes] == ["", ""]
    first, second = (outcome.value for outcome in outcomes)
    assert "NumericsError: DebugUnderflowOverflow: inf/nan detected during batch_number=2" in second["error"]
    assert "PeerFailure: Rank 1 failed: NumericsError: inf in input[0] of middle" in first["error"]
    assert first["skipped"] == second["skipped"] == [False, False]
    assert [outcome.output.count("Detected inf/nan") for outcome in outcomes] == [0, 1]
    assert "batch_number=2\nin rank 1, sample 5\nLast " in outcomes[1].output
    assert "                  middle Identity" in outcomes[1].output  # the user's names, not those of DDP


def wrapped() -> list[Any]:
    """A detector of the user's own around a model that is in DDP already."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), samples())
    names: list[Any] = []

    class Sink:
        def add(self, frame: Any) -> None:
            names.append((frame.batch, frame.phase, frame.module))

        def close(self) -> None:
            names.append("closed")

    with DebugUnderflowOverflow(model, record=Sink()) as detector:
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x.abs() + 1).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert detector.batch_number == 6
    return names


def test_a_model_in_ddp_is_looked_through_and_micro_batches_count() -> None:
    for names in run_ranks(wrapped, 2):
        assert names[-1] == "closed"
        forward = [(batch, module) for batch, phase, module in names[:-1] if phase == "forward"]
        assert forward == [(batch, module) for batch in range(6) for module in ("first", "middle", "last", "")]
        backward = {(batch, module) for batch, phase, module in names[:-1] if phase == "backward"}
        assert backward == {(batch, module) for batch in range(6) for module in ("first", "middle", "last")}


def by_hand(when: str, folder: str) -> str:
    """A detector that the script makes itself, without a word about ranks; what it raises on the last rank."""
    net = Net()
    options: dict[str, Any] = {"trace_batch_nums": [0]} if when == "traced" else {"record": folder}
    detector = DebugUnderflowOverflow(net, **options) if when == "before" else None
    accelerator = Accelerator()
    detector = detector or DebugUnderflowOverflow(net, **options)
    x = torch.tensor([[1.0 - accelerator.process_index]])
    try:
        detect_overflow(1 / x, "the inverse")
        net(x)
    except NumericsError as caught:
        return str(caught)
    finally:
        detector.remove()
    return ""


@pytest.mark.parametrize("when", ["before", "after", "traced"])
def test_a_detector_made_by_hand_names_its_rank(when: str, tmp_path: Path) -> None:
    first, second = run_ranks(by_hand, 2, when, str(tmp_path), on_failure="collect")
    assert (first.error_text, second.error_text) == ("", "")
    assert "rank 1: the inverse has infs" in second.output
    if when == "traced":
        assert "rank 1\n                  *** Starting batch number=0 ***" in second.output
        return
    assert "Detected inf/nan during batch_number=0\nin rank 1\nLast " in second.output
    assert re.search(
        r"batch_number=0 on rank 1 \(.*\n?.*printed above, and kept in \S+/numerics/rank_1.txt", second.value
    )
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"rank_0", "rank_1"}  # a trace for each


def test_a_job_is_debugged_without_a_change_to_its_script() -> None:
    """By the launcher's flag alone; each rank gets its own exit, and the job tells the report once."""
    job = subprocess.run(
        [
            *(sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2"),
            *("--debug=underflow_overflow", str(ROOT / "examples" / "overflow.py")),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    told = job.stdout + job.stderr
    assert job.returncode != 0
    assert told.count("Detected inf/nan during batch_number=13") == 1, told
    assert "block.scale Growing" in told
    assert "NumericsError" in told
    summary = " ".join(told.partition("lockstep launch: the job failed")[2].split())
    kept = re.search(r"batch_number=13 on rank [01] .* kept in (\S+),", summary)  # the summary cites the report
    assert kept, told
    assert "block.scale Growing" in Path(kept[1]).read_text()
