"""The manifest: what is read back, and that nothing anybody puts in its place does harm."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import CheckpointError
from lockstep.storage import hashing, manifest
from lockstep.storage.manifest import Manifest, ManifestEntry, parse

MARK = "0123456789abcdef" * 2


def example(files: int = 3) -> Manifest:
    entries = {f"file_{number}.bin": ManifestEntry(size=number + 1, chunks=(MARK,)) for number in range(files)}
    return Manifest(files=entries, about={"updates": 7, "world_size": 2, "number": None})


def with_checksum(body: dict[str, object]) -> bytes:
    body.pop("checksum", None)
    return json.dumps({**body, "checksum": manifest._checksum(body)}).encode()


def test_what_was_written_is_read() -> None:
    assert parse(example().dump()) == example()


@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?", fullmatch=True), st.integers(0, 1 << 40), min_size=1))
def test_any_files_are_read_back(sizes: dict[str, int]) -> None:
    files = {
        name: ManifestEntry(size=size, chunks=(MARK,) * hashing.count_chunks(size, 1 << 34))
        for name, size in sizes.items()
    }
    made = Manifest(files=files, chunk=1 << 34)
    assert parse(made.dump()) == made


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../b",
        "",
        ".",
        "..",
        "a//b",
        "a/./b",
        "a\\b",
        "a\nb",
        "a\0b",
        "./a",
        "a/",
        "x" * 2000,
    ],
)
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    body = json.loads(example().dump())
    body["files"][name] = {"size": 1, "chunks": [MARK]}
    with pytest.raises(CheckpointError, match="no plain path inside"):
        parse(with_checksum(body))


def test_a_newer_format_says_what_to_do() -> None:
    body = json.loads(example().dump())
    body["version"] = manifest.VERSION + 1
    with pytest.raises(CheckpointError, match="Update lockstep"):
        parse(with_checksum(body))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"chunk": 0}, "chunks have 0 bytes"),
        ({"algorithm": "rot13"}, "knows xxh3-128"),
        ({"files": {}}, "lists no files"),
        ({"files": {"a": {"size": -1, "chunks": [MARK]}}}, "no size with hashes"),
        ({"files": {"a": {"size": 1, "chunks": []}}}, "0 hashes for 1 bytes"),
        ({"files": {"a": {"size": 1, "chunks": ["../" * 22]}}}, "a hash of 'a' is none"),
        ({"files": {"a": 5}}, "no size with hashes"),
        ({"version": "1"}, "does not say the version"),
        ({"version": True}, "does not say the version"),
        ({"about": []}, "lists no files"),
    ],
)
def test_values_that_make_no_sense(change: dict[str, object], found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        parse(with_checksum({**json.loads(example().dump()), **change}))


def test_a_folder_without_one_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        manifest.read(tmp_path)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """The bytes with something done to them: flipped, cut, repeated, put in, swapped for another value."""
    kind = dice.randrange(7)
    place, other = sorted((dice.randrange(len(data)), dice.randrange(len(data))))
    if kind == 0:
        return data[:place] + bytes([data[place] ^ (1 << dice.randrange(8))]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + data[other:]
    if kind == 3:
        return data[:other] + data[place:]
    if kind == 4:
        return data[:place] + dice.randbytes(dice.randrange(1, 9)) + data[place:]
    if kind == 5:
        return data[:place] + dice.choice([b"null", b"1e999", b"-1", b"[" * 3000, b'"', b"{}", b"NaN"]) + data[other:]
    return dice.randbytes(dice.randrange(64))


def test_no_mutation_is_taken_for_a_manifest() -> None:
    """Ten thousand inputs: each is the manifest as it was, or a CheckpointError; none is anything else."""
    dice, whole = random.Random(11), example()
    data = whole.dump()
    refused = 0
    for number in range(10_000):
        text = mutated(data, dice)
        for _ in range(number % 3):
            text = mutated(text, dice) if text else text
        try:
            assert parse(text) == whole
        except CheckpointError:
            refused += 1
    assert refused > 9_000


def test_no_value_with_a_right_checksum_leads_outside() -> None:
    """The same for somebody who can write checksums: whatever is accepted names only what is inside the folder."""
    dice = random.Random(12)
    values = [None, True, -1, 0, 1 << 70, 1.5, "x", "../up", "/abs", [], {}, [MARK], {"size": 1, "chunks": [MARK]}]
    for _ in range(3_000):
        body = json.loads(example().dump())
        for _ in range(dice.randrange(1, 4)):
            where = dice.choice([body, body["files"] if isinstance(body.get("files"), dict) else body])
            where[dice.choice([*where, "../a", "b"])] = dice.choice(values)
        try:
            found = parse(with_checksum(body))
        except CheckpointError:
            continue
        assert all(manifest.stays_inside(name) for name in found.files)
        assert all(len(entry.chunks) == hashing.count_chunks(entry.size, found.chunk) for entry in found.files.values())
