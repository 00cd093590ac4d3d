from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import hashing, once
from lockstep.checkpoint.once import FileOnce

CHUNK = 1 << 17
DATA = bytes(range(251)) * 2000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("once") / "file"
    made.write_bytes(DATA)
    return made


reads = st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA)), st.booleans()), max_size=8)


@settings(max_examples=60, deadline=None)
@given(reads=reads)
def test_it_reads_as_any_file_and_hashes_as_the_whole_whatever_the_order(
    path: Path, reads: list[tuple[int, int, bool]]
) -> None:
    like = io.BytesIO(DATA)
    with FileOnce(path, CHUNK) as file:
        for place, size, into in reads:
            assert file.seek(place) == like.seek(place)
            if into:
                mine, theirs = bytearray(size), bytearray(size)
                assert file.readinto(mine) == like.readinto(theirs)
                assert mine == theirs
            else:
                assert file.read(size) == like.read(size)
            assert file.tell() == like.tell()
        assert file.finish() == hashing.hash_file(path, CHUNK)[1]


def test_it_seeks_from_here_and_from_the_end(path: Path) -> None:
    with FileOnce(path, CHUNK) as file:
        assert file.seek(-3, os.SEEK_END) == len(DATA) - 3
        assert file.read() == DATA[-3:]
        file.seek(5)
        assert file.seek(2, os.SEEK_CUR) == 7


def test_torch_loads_from_it_and_each_large_part_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.bin"
    state = {name: torch.randn(1 << 17) for name in "abc"}
    torch.save(state, path)
    fetched = 0
    preadv, pread = os.preadv, os.pread

    def counting(file: int, buffers: list[memoryview], place: int) -> int:
        nonlocal fetched
        got = preadv(file, buffers, place)
        fetched += got
        return got

    def counting_too(file: int, size: int, place: int) -> bytes:
        nonlocal fetched
        data = pread(file, size, place)
        fetched += len(data)
        return data

    monkeypatch.setattr(once.os, "preadv", counting)
    monkeypatch.setattr(once.os, "pread", counting_too)
    with FileOnce(path, CHUNK) as file:
        loaded = torch.load(file, weights_only=True)
        marks = file.finish()
    size = path.stat().st_size
    assert size <= fetched < 1.05 * size
    monkeypatch.undo()
    assert marks == hashing.hash_file(path, CHUNK)[1]
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_changed_byte_changes_the_hash_of_what_was_read(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA[:200_000] + b"\0" + DATA[200_001:])
    with FileOnce(other, CHUNK) as file:
        assert file.read() == other.read_bytes()
        marks = file.finish()
    whole = hashing.hash_file(path, CHUNK)[1]
    assert [mine == theirs for mine, theirs in zip(marks, whole, strict=True)] == [True, False, True, True]
