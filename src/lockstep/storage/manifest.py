"""The manifest: which files a checkpoint has, how long they are, what they hash to. Without it there is no checkpoint.

It is read before anything else, from a folder that anybody may have written to: whatever is in it, parsing gives a
manifest or a ``CheckpointError`` that says what is wrong. It carries a hash of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from lockstep.errors import CheckpointError
from lockstep.storage import hashing
from lockstep.storage.open_files import open_inside, read_small

NAME = "lockstep_manifest.json"
VERSION = 1
"""Of the format. A reader takes its own version and older ones."""
_LARGEST = 1 << 24
"""Bytes that a manifest may have: 16 MiB is enough for the hashes of 6 TB."""
_FEW, _ENTRY_BYTES = 10_000, 16
"""There is a hash of 32 letters to at most three commas, so that many commas in few bytes are no manifest."""
_SMALLEST_CHUNK = 1 << 16
"""Bytes; each chunk costs a little memory while it is verified."""
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """One file."""

    size: int
    chunks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What ``parse_entry`` reads."""
        return {"size": self.size, "chunks": list(self.chunks)}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is in a checkpoint."""

    files: Mapping[str, ManifestEntry]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What people want to know of it: step, number of processes, time, versions."""
    version: int = VERSION
    algorithm: str = hashing.ALGORITHM
    chunk: int = hashing.CHUNK
    """Bytes in a chunk."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def chunks(self) -> list[hashing.Chunk]:
        """All chunks of all files."""
        return [(name, number) for name, entry in self.files.items() for number in range(len(entry.chunks))]

    def dump(self) -> bytes:
        """The manifest as it is written."""
        body = {
            "version": self.version,
            "algorithm": self.algorithm,
            "chunk": self.chunk,
            "about": dict(self.about),
            "files": {name: entry.to_json() for name, entry in sorted(self.files.items())},
        }
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode() + b"\n"


def read(folder: Path) -> Manifest:
    """The manifest of a folder; CheckpointError when there is none, or none that can be used."""
    path = folder / NAME
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} has no {NAME}: it is no complete checkpoint.")
    return parse(read_small(open_inside(folder, NAME), _LARGEST, path), str(path))


def parse(data: bytes, where: str = NAME) -> Manifest:
    """The manifest that these bytes are."""
    if (
        data.count(b",") > _FEW + len(data) // _ENTRY_BYTES
        or data.count(b"[") + data.count(b"{") > _FEW + len(data) // 8
    ):
        raise CheckpointError(f"{where} is damaged: it has more values than a manifest of its size can hold.")
    try:
        body = json.loads(data, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {str(error)[:200] or 'it is no JSON'}.") from None
    if not isinstance(body, dict):
        raise CheckpointError(f"{where} is damaged: it holds no object.")
    version = body.get("version")
    if not _whole(version) or version < 1:
        raise CheckpointError(f"{where} is damaged, or no manifest: it does not say the version of its format.")
    if version > VERSION:
        raise CheckpointError(
            f"{where} has version {version} of the format; this release reads up to {VERSION}. Update lockstep."
        )
    stored = body.pop("checksum", None)
    if stored != _checksum(body):
        raise CheckpointError(f"{where} is damaged: its content does not match its checksum.")
    return _built(body, where)


def _built(body: dict[str, Any], where: str) -> Manifest:
    algorithm, chunk = body.get("algorithm"), body.get("chunk")
    if algorithm != hashing.ALGORITHM:
        known = hashing.ALGORITHM
        raise CheckpointError(f"{where} names the hash {algorithm!r}; this release knows {known}. Update lockstep.")
    if not _whole(chunk) or chunk < _SMALLEST_CHUNK:
        raise CheckpointError(f"{where} is damaged: its chunks have {chunk!r} bytes.")
    about, files = body.get("about"), body.get("files")
    if not isinstance(about, dict) or not isinstance(files, dict) or not files or NAME in files:
        raise CheckpointError(f"{where} is damaged: it lists no files, or itself.")
    entries = {name: parse_entry(name, value, chunk, where) for name, value in files.items()}
    return Manifest(files=entries, about=about, version=body["version"], algorithm=algorithm, chunk=chunk)


def parse_entry(name: str, value: Any, chunk: int, where: str) -> ManifestEntry:
    """One file's entry, as it was written to JSON; ``where`` says in what, for an error."""
    if not stays_inside(name):
        raise CheckpointError(f"{where} lists {name[:200]!r}, which is no plain path inside the folder.")
    size = value.get("size") if isinstance(value, dict) else None
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not _whole(size) or size < 0 or not isinstance(chunks, list):
        raise CheckpointError(f"{where} is damaged: the entry of {name!r} is no size with hashes.")
    if len(chunks) != hashing.count_chunks(size, chunk):
        raise CheckpointError(f"{where} is damaged: {name!r} has {len(chunks)} hashes for {size} bytes.")
    if not all(isinstance(mark, str) and _HEX.fullmatch(mark) for mark in chunks):
        raise CheckpointError(f"{where} is damaged: a hash of {name!r} is none.")
    return ManifestEntry(size=size, chunks=tuple(chunks))


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON, in which no name comes twice: readers would not agree which of the two counts."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name comes twice")
    return table


def stays_inside(name: str) -> bool:
    """Whether a path names something below the folder it is relative to, and nothing a shell or screen stumbles on."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and 0 < len(name) <= 1024
    return plain and not path.is_absolute() and str(path) == name and bool(path.parts) and ".." not in path.parts


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _checksum(body: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
