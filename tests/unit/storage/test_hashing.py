"""Hashes are those of the bytes that went by, however they were cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lockstep.storage import hashing
from lockstep.storage.disk import Disk
from lockstep.storage.hashing import Digests, HashedFile


def by_hand(data: bytes, chunk: int) -> tuple[str, ...]:
    parts = [data[place : place + chunk] for place in range(0, len(data), chunk)] or [b""]
    return tuple(xxhash.xxh3_128_hexdigest(part) for part in parts)


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 40))
def test_cuts_do_not_matter(pieces: list[bytes], chunk: int) -> None:
    digests = Digests(chunk=chunk)
    for piece in pieces:
        digests.update(memoryview(piece))
    data = b"".join(pieces)
    assert digests.finish() == by_hand(data, chunk)
    assert digests.size == len(data)
    assert hashing.count_chunks(len(data), chunk) == len(by_hand(data, chunk))


def test_a_file_hashes_to_what_is_read_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    data = os.urandom(300_000)
    with HashedFile(tmp_path / "a", Disk(), moved=told.append) as file:
        for start, end in ((0, 5), (5, 5), (5, 200_000), (200_000, 300_000)):
            file.write(data[start:end])
    assert (tmp_path / "a").read_bytes() == data
    assert (file.size, sum(told)) == (300_000, 300_000)
    assert file.chunks == by_hand(data, hashing.CHUNK)
    assert hashing.hash_file(tmp_path / "a") == (file.size, file.chunks)
    small = 70_000
    assert hashing.hash_file(tmp_path / "a", chunk=small)[1] == by_hand(data, small)


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "a", Disk())
    assert (tmp_path / "a").read_text() == "mine"
