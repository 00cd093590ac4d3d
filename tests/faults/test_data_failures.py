"""Data that cannot be read, on one rank only: all ranks stop, and each says which rank, which sample, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import Accelerator, DataLoaderConfiguration
from lockstep.testing import run_ranks
from tests.ranks import in_soak

BAD = 13


class Broken(Dataset[Tensor]):
    """One record cannot be read; only one rank gets to it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Tensor:
        if place == BAD:
            raise OSError(f"record {place} is damaged")
        return torch.full((3,), float(place))


class BrokenStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for place in range(64):
            if place == BAD:
                raise OSError(f"record {place} is damaged")
            yield torch.full((3,), float(place))


class Changing(IterableDataset[Tensor]):
    """Items that change their shape in the middle of a batch."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((3 if place < BAD else 2,), float(place)) for place in range(64))


def nothing_for_bad(items: list[Tensor]) -> Tensor | None:
    return None if any(item[0] == 14 for item in items) else torch.stack(items)


def two_shapes(items: list[Tensor]) -> Tensor:
    return torch.stack([item[: 2 if item[0] == 14 else 3] for item in items])


def make(case: str) -> DataLoader[Any]:
    if case == "workers":
        return DataLoader(Broken(), batch_size=2, num_workers=1)
    if case == "changing":
        return DataLoader(Changing(), batch_size=2)
    if case in ("stream", "dispatched stream"):
        return DataLoader(BrokenStream(), batch_size=2)
    if case in ("none", "shapes"):
        data = [torch.full((3,), float(place)) for place in range(64)]
        return DataLoader(data, batch_size=2, collate_fn=nothing_for_bad if case == "none" else two_shapes)  # type: ignore[arg-type]
    return DataLoader(Broken(), batch_size=2)


def train(case: str, dispatch: bool | None) -> dict[str, Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model = nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), make(case))
    error: Exception | None = None
    start = time.monotonic()
    try:
        for batch in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.gather_for_metrics(batch)
    except Exception as caught:
        error = caught
    notes = " ".join(getattr(error, "__notes__", ()))
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "notes": notes,
        "took": time.monotonic() - start,
    }


# With batches of 2 on 2 ranks, sample 13 is in rank 0's batch of the fourth round, and sample 14 in rank 1's.
CASES = {
    "map": (None, 0, "OSError", "sample 13", "record 13 is damaged"),
    "workers": (None, 0, "OSError", "samples 12, 13", "record 13 is damaged"),
    "none": (None, 1, "DataError", "samples 14, 15", "let collate_fn always return one"),
    "shapes": (None, 1, "RuntimeError", "samples 14, 15", "stack expects each tensor to be equal size"),
    "stream": (True, 0, "OSError", "samples 12, 13, 14, 15", "record 13 is damaged"),
    "changing": (True, 0, "RuntimeError", "samples 12, 13", "stack expects each tensor to be equal size"),
    "dispatched": (True, 0, "OSError", "sample 13", "record 13 is damaged"),
    "dispatched stream": (None, 0, "OSError", "samples 12, 13, 14, 15", "record 13 is damaged"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, *in_soak(3)])
def test_all_ranks_stop_and_say_why(case: str, world_size: int) -> None:
    dispatch, culprit, kind, sample, words = CASES[case]
    if world_size == 3:
        culprit = 0 if dispatch or case.endswith("stream") else {"none": 1, "shapes": 1}.get(case, 0)
    results = run_ranks(train, world_size, case, dispatch, timeout=60)
    for rank, found in enumerate(results):
        assert found["took"] < 20, found
        if rank == culprit:
            assert found["kind"] == kind, found
            assert words in found["text"], found
            assert sample in found["notes"] + found["text"], found
        else:
            assert found["kind"] == "PeerFailure", found
            assert f"Rank {culprit} failed: reading" in found["text"], found
            assert sample in found["text"], found
            assert words in found["text"], found
            assert "Traceback" in found["text"], found


def survive() -> list[Any]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Broken(), batch_size=2))
    batches = iter(loader)
    said: list[Any] = []
    for _ in range(5):
        outcome = accelerator.agree(lambda: accelerator.gather(next(batches)))
        if not outcome.ok:
            said.append([str(failure) for failure in outcome.failures])
            break
    said.append(int(accelerator.reduce(torch.tensor(1))))
    return said


def test_inside_an_agreement_it_is_survived() -> None:
    for said in run_ranks(survive, 2, timeout=60):
        assert said == [["rank 0: OSError: record 13 is damaged"], 2]


def one_process() -> str:
    loader = Accelerator().prepare(DataLoader(Broken(), batch_size=2))
    try:
        list(loader)
    except OSError as error:
        return " ".join(getattr(error, "__notes__", ["sample 13"]))
    return "nothing"


def test_one_process_raises_what_the_data_set_raised() -> None:
    assert "sample 13" in run_ranks(one_process, 1)[0]
