"""What can be stored safely comes back as it was; what cannot is refused by name."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.checkpoint import safe_pickle
from lockstep.errors import CheckpointError
from lockstep.storage import hashing
from lockstep.storage.disk import Disk

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


def through_file(value: Any, path: Path) -> Any:
    path.unlink(missing_ok=True)
    with hashing.HashedFile(path, Disk(), durable=False) as file:
        safe_pickle.write(safe_pickle.pack(value, "it"), file)
    return safe_pickle.unpack(safe_pickle.read(path), path)


@given(PLAIN)
def test_plain_values_come_back(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert through_file(value, tmp_path_factory.getbasetemp() / "plain.bin") == value


def test_a_file_is_what_torch_writes(tmp_path: Path) -> None:
    """Large tensors are written in another thread, of which torch knows nothing."""
    large = torch.arange(1 << 16)
    parts = [
        large,
        torch.ones(3),
        large[10:],
        torch.empty(1 << 19).expand(2, -1),
        torch.arange(1 << 18),
        b"x" * (1 << 19),
    ]
    value = safe_pickle.pack({"parts": parts, "text": "y" * (1 << 20)}, "it")
    with hashing.HashedFile(tmp_path / "ours", Disk(), durable=False) as file:
        safe_pickle.write(value, file)
    torch.save(value, tmp_path / "torch's")
    ours, theirs = (zipfile.ZipFile(tmp_path / name) for name in ("ours", "torch's"))
    assert ours.testzip() is None
    contents = [{name.partition("/")[2]: file.read(name) for name in file.namelist()} for file in (ours, theirs)]
    assert contents[0] == contents[1]
    assert (file.size, file.chunks) == hashing.hash_file(tmp_path / "ours")


class FullDisk(Disk):
    """Takes some bytes and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: int, data: memoryview) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, data)


@pytest.mark.parametrize("room", [0, 1 << 20, 3 << 20, (4 << 20) + 500])
def test_an_error_of_the_disk_comes_out_as_it_is(tmp_path: Path, room: int) -> None:
    value = [torch.ones(1 << 18) for _ in range(4)]
    with (
        pytest.raises(OSError, match="No space left") as failure,
        hashing.HashedFile(tmp_path / "a", FullDisk(room)) as file,
    ):
        safe_pickle.write(value, file)
    assert failure.value.errno == errno.ENOSPC


def test_tensors_arrays_and_the_rest_come_back(tmp_path: Path) -> None:
    value = {
        "bf16": torch.randn(3).bfloat16(),
        "numpy": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "empty": np.zeros((0, 2)),
        "scalar": np.float64(0.1),
        "counts": Counter({3: 2}),
        "ordered": OrderedDict(b=1, a={1, 2}),
        "kinds": [torch.float16, torch.Size([2, 3]), torch.device("cpu"), 1 + 2j, float("inf")],
        (1, "key"): b"\x00\xff",
        "nothing": b"",
    }
    found = through_file(value, tmp_path / "a")
    assert torch.equal(found["bf16"], value["bf16"])
    for name in ("numpy", "empty"):
        assert found[name].dtype == value[name].dtype
        assert np.array_equal(found[name], value[name])
    assert type(found["scalar"]) is float
    for name in ("counts", "ordered", "kinds", (1, "key")):
        assert found[name] == value[name]
        assert type(found[name]) is type(value[name])


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Thing:
    x: int = 0


@pytest.mark.parametrize(
    "value",
    [Thing(), Thing, print, functools.partial(print), Point(1, 2), deque([1]), defaultdict(int), range(3), Path("a"),
     np.array([Thing()]), np.array(["text"]), torch.eye(2).to_sparse(), {Thing: 1}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_need_code_to_read_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"The state of my object cannot be saved: its state_dict\(\)\['a'\]\[1\]"
    ):
        safe_pickle.pack({"a": [0, value]}, "my object")


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="holds itself"):
        safe_pickle.pack(value, "my object")


class Bomb:
    def __reduce__(self) -> Any:
        return (open, ("exploded", "w"))


def test_reading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Bomb()}, tmp_path / "bomb.bin")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.bin", "old.bin"):
        with pytest.raises(CheckpointError, match=name):
            safe_pickle.read(tmp_path / name)
    assert not (tmp_path / "exploded").exists()
    safe_pickle.read(tmp_path / "bomb.bin", trusted=True)["a"].close()
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"no such thing", b"\x80\x04" + b"." * 20, b"PK\x03\x04" + b"\0" * 100]
)
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.bin"):
        safe_pickle.read(tmp_path / "x.bin")


def test_a_copy_keeps_what_is_one_tensor_one() -> None:
    weight = torch.randn(4)
    a: dict[str, Tensor] = {"one": weight, "same": weight.detach(), "other": weight[:2]}
    copied = safe_pickle.copy_to_host(a)
    weight.zero_()
    assert copied["one"] is copied["same"]
    assert copied["one"].abs().sum() > 0
    assert torch.equal(copied["other"], copied["one"][:2])
