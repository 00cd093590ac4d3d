"""What ranks tell each other of a save through the job's store: data only, and nothing stays behind."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.checkpoint.exchange import StoreExchange
from lockstep.checkpoint.manifest import Entry
from lockstep.checkpoint.save import Mark, Written
from lockstep.errors import CheckpointError


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ends(store: Any, ticket: str, ranks: int = 2) -> list[StoreExchange]:
    groups: list[Any] = [
        SimpleNamespace(rank=rank, world_size=ranks, store=store, timeout=timedelta(seconds=20), leaving=False)
        for rank in range(ranks)
    ]
    return [StoreExchange(group, ticket) for group in groups]


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_every_rank_gets_every_value_and_the_store_does_not_grow(store: Any) -> None:
    before = store.num_keys()
    with ThreadPoolExecutor(3) as threads:
        for number in range(20):
            made = ends(store, f"save {number}", 3)
            for turn in range(2):
                values = [{"rank": rank, "turn": turn, "text": "ü", "none": None} for rank in range(3)]
                found = list(threads.map(lambda end, value: end(value, "testing"), made, values))
                assert found == [values] * 3
    assert store.num_keys() == before


def test_what_a_stranger_writes_is_not_run(store: Any, tmp_path: Path) -> None:
    first, _ = ends(store, "save")
    store.set("checkpoint/save/1/1", pickle.dumps(Touch(tmp_path / "owned")))
    with pytest.raises(CheckpointError, match="in the place of rank 1's answer"):
        first({"house": 0}, "testing")
    assert not (tmp_path / "owned").exists()


def written() -> Written:
    entry = Entry(size=3, chunks=("0" * 32,))
    mark = Mark(generation=2, number=7, digest=2**63 + 1, checksums=b"\x00\xff")
    return Written(house=1, answer={"model.safetensors": entry}, mark=mark)


def test_what_a_rank_has_written_travels() -> None:
    assert Written.parse(written().to_json(), 0) == written()


@pytest.mark.parametrize(
    "change",
    [
        {"house": "x"},
        {"files": []},
        {"files": {"../../etc/passwd": {"size": 0, "chunks": []}}},
        {"files": {"model.safetensors": {"size": -1, "chunks": []}}},
        {"files": {"model.safetensors": None}},
        {"place": [1, 2]},
        {"checksums": "zz"},
        {"checksums": 5},
    ],
)
def test_what_is_nothing_of_the_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="What rank 3 said of the checkpoint"):
        Written.parse({**written().to_json(), **change}, 3)
    for nothing in (None, 5, "x", [], {}):
        with pytest.raises(CheckpointError):
            Written.parse(nothing, 3)
