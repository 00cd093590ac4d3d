"""What ranks tell each other of a save through the job's store: data only, and nothing stays behind."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.checkpoint.exchange import StoreExchange
from lockstep.checkpoint.save import Mark, SavedFiles
from lockstep.errors import CheckpointError
from lockstep.job_store.signed_store import SignedStore
from lockstep.storage.manifest import ManifestEntry

SECRET = "secret"
WRITTEN: dict[tuple[int, int], set[str]] = {}
"""What each rank has in a store, as its group knows it from one save to the next."""


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ends(store: Any, ticket: str, ranks: int = 2) -> list[StoreExchange]:
    groups: list[Any] = [
        SimpleNamespace(
            rank=rank,
            world_size=ranks,
            store=SignedStore(store, SECRET, written=WRITTEN.setdefault((id(store), rank), set())),
            timeout=timedelta(seconds=20),
            leaving=False,
            boxes=None,
        )
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
    with ThreadPoolExecutor(3) as threads:
        for number in range(20):
            made = ends(store, f"save {number}", 3)
            for turn in range(2):
                values = [{"rank": rank, "turn": turn, "text": "ü", "none": None} for rank in range(3)]
                found = list(threads.map(lambda end, value: end(value, "testing"), made, values))
                assert found == [values] * 3
    assert store.num_keys() <= 3 + 1  # each rank's last answer, which the next save removes; and one of torch's


def test_what_a_stranger_writes_is_not_run(store: Any, tmp_path: Path) -> None:
    first, second = ends(store, "save")
    planted = [pickle.dumps(Touch(tmp_path / "owned")), b'[{"house": 7}]', b"[" * 100_000, bytes(range(256))]
    with ThreadPoolExecutor(1) as threads:
        for planted_value in planted:
            store.set("checkpoint/save/1/1", planted_value)
            early = threads.submit(first, {"house": 0}, "testing")
            time.sleep(0.2)
            assert not early.done()  # it waits for the true answer
            assert second({"house": 1}, "testing") == early.result(20) == [{"house": 0}, {"house": 1}]
            first._turn = second._turn = 0
    assert not (tmp_path / "owned").exists()


def test_an_answer_that_never_comes_is_an_error(store: Any) -> None:
    first, _ = ends(store, "save")
    first._group.timeout = timedelta(seconds=0.1)
    with pytest.raises(CheckpointError, match=r"rank 1 did not answer: .* overwrites"):
        first({"house": 0}, "testing")


def written() -> SavedFiles:
    entry = ManifestEntry(size=3, chunks=("0" * 32,))
    mark = Mark(generation=2, number=7, digest=2**63 + 1, checksums=b"\x00\xff")
    return SavedFiles(house=1, answer={"model.safetensors": entry}, mark=mark)


def test_what_a_rank_has_written_travels() -> None:
    assert SavedFiles.parse(written().to_json(), 0) == written()


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
        SavedFiles.parse({**written().to_json(), **change}, 3)
    for nothing in (None, 5, "x", [], {}):
        with pytest.raises(CheckpointError):
            SavedFiles.parse(nothing, 3)
