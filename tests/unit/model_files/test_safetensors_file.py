from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep import CheckpointError
from lockstep.model_files import safetensors_file
from lockstep.model_files.safetensors_file import SafeFile
from lockstep.model_files.writer import PLAIN, Opened
from tests.unit.checkpoint.small_models import bits

DTYPES = sorted(safetensors_file._DTYPES.values(), key=str)
SHARED_WITH_TORCH = [dtype for dtype in DTYPES if "fnuz" not in str(dtype)]


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = dtype.itemsize * int(torch.tensor(shape).prod())
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def test_the_library_of_the_format_reads_every_dtype(tmp_path: Path) -> None:
    tensors = {str(dtype): of(dtype, 3, 5) for dtype in SHARED_WITH_TORCH}
    safetensors_file.write(tensors, tmp_path / "a.safetensors")
    back = load_file(tmp_path / "a.safetensors")
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in back.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in tensors.items()
    }
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_dtype_comes_back_by_mapping_and_into_memory(tmp_path: Path) -> None:
    tensors = {str(dtype): of(dtype, 3, 5) for dtype in DTYPES}
    safetensors_file.write(tensors, tmp_path / "a.safetensors")
    file = SafeFile(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        entry = file.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
        target = torch.zeros_like(tensor)
        entry.read_into(target)
        assert bits(entry.read()) == bits(target) == bits(tensor)
    file.close()


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    tensors = {"odd": of(torch.uint8, 3), "w": of(torch.float32, 4, 4), "b": of(torch.bfloat16, 7)}
    save_file(tensors, tmp_path / "a.safetensors")
    file = SafeFile(tmp_path / "a.safetensors")
    assert {name: bits(entry.read()) for name, entry in file.entries.items()} == {
        n: bits(t) for n, t in tensors.items()
    }
    file.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SHARED_WITH_TORCH), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_any_shapes_in_any_mixture(tmp_path_factory: pytest.TempPathFactory, kinds: list) -> None:
    path = tmp_path_factory.mktemp("mixture") / "a.safetensors"
    tensors = {f"tensor {place} ü": of(dtype, *shape) for place, (dtype, shape) in enumerate(kinds)}
    safetensors_file.write(tensors, path)
    theirs = load_file(path)
    file = SafeFile(path)
    for name, tensor in tensors.items():
        assert bits(theirs[name]) == bits(file.entries[name].read()) == bits(tensor)
        assert theirs[name].shape == file.entries[name].shape == tensor.shape
        assert file.entries[name].start % tensor.element_size() == 0
    file.close()


def test_views_are_written_in_row_major_order(tmp_path: Path) -> None:
    turned, conjugated = torch.arange(6.0).view(2, 3).t(), torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    safetensors_file.write({"t": turned, "c": conjugated}, tmp_path / "a.safetensors")
    back = load_file(tmp_path / "a.safetensors")
    assert torch.equal(back["t"], turned)
    assert torch.equal(back["c"], conjugated.resolve_conj())


def test_a_target_of_another_kind_is_filled_too(tmp_path: Path) -> None:
    source = torch.arange(6.0).view(2, 3)
    safetensors_file.write({"t": source}, tmp_path / "a.safetensors")
    file = SafeFile(tmp_path / "a.safetensors")
    for target in (torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4, 6)[::2, ::2]):
        file.entries["t"].read_into(target)
        assert torch.equal(target.float(), source)
    file.close()


def test_what_is_read_does_not_share_memory_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors_file.write({"t": torch.zeros(4)}, path)
    before = path.read_bytes()
    file = SafeFile(path)
    tensor = file.entries["t"].read()
    file.close()
    tensor.fill_(7)
    assert path.read_bytes() == before
    assert tensor.tolist() == [7.0] * 4


def test_no_copy_of_the_tensors_is_made_on_the_way(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    addresses = []

    class Looking:
        def open(self, path: Path) -> AbstractContextManager[Opened]:
            real = PLAIN.open(path)

            class File:
                def __enter__(self) -> File:
                    self.file = real.__enter__()
                    return self

                def __exit__(self, *error: object) -> None:
                    real.__exit__(*error)

                def write(self, data: bytes | memoryview) -> None:
                    if isinstance(data, memoryview):
                        addresses.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())
                    self.file.write(data)

            return File()

    safetensors_file.write({"w": weight}, tmp_path / "a.safetensors", Looking())
    assert addresses == [weight.data_ptr()]
    assert load_file(tmp_path / "a.safetensors")["w"].shape == (1000,)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("extra", {"a": 1}, "extra is a dict"),
        ("s", torch.eye(2).to_sparse(), "s is a sparse tensor"),
        ("c", torch.zeros(1, dtype=torch.complex128), "c is of torch.complex128"),
        ("__metadata__", torch.zeros(1), "cannot be a name"),
    ],
)
def test_what_the_format_cannot_hold_is_named_and_no_file_is_made(
    tmp_path: Path, name: str, value: object, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        safetensors_file.write({name: value}, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- damaged files


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "empty": b"",
    "short": b"\0" * 7,
    "lying length": file_of({}, length=2**63),
    "length past the end": file_of({}, length=3),
    "not json": file_of(b"{nonsense}"),
    "not a table": file_of(b"[1, 2]"),
    "blank first": file_of(b" {}"),
    "deep": file_of(b"[" * 100_000),
    "not utf-8": file_of(b'{"\xff": 1}'),
    "twice": file_of(
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "unknown dtype": file_of({"a": entry("F128")}, b"1234"),
    "dtype is a list": file_of({"a": entry([])}, b"1234"),
    "entry is a number": file_of({"a": 4}),
    "missing field": file_of({"a": {"dtype": "F32"}}),
    "negative": file_of({"a": entry(shape=[-1])}, b"1234"),
    "fraction": file_of({"a": entry(shape=[1.0])}, b"1234"),
    "truth value": file_of({"a": entry(shape=[True])}, b"1234"),
    "huge shape": file_of({"a": entry(shape=[2**62, 4])}, b"1234"),
    "beyond integers": file_of({"a": entry(shape=[10**400, 0], offsets=[0, 0])}),
    "shape and offsets differ": file_of({"a": entry(shape=[2])}, b"1234"),
    "backwards": file_of({"a": entry(offsets=[4, 0])}, b"1234"),
    "outside": file_of({"a": entry(offsets=[4, 8])}, b"1234"),
    "gap": file_of({"a": entry(), "b": entry(offsets=[8, 12])}, b"1" * 12),
    "overlap": file_of({"a": entry(), "b": entry(offsets=[0, 4])}, b"1234"),
    "truncated": file_of({"a": entry(shape=[2], offsets=[0, 8])}, b"1234"),
    "trailing": file_of({"a": entry()}, b"12345"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[kind])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has .*(damaged|no safetensors)"):
        SafeFile(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(CheckpointError, match=r"it is a (pipe|folder)"):
            SafeFile(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        SafeFile(tmp_path / "none.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_file.write({"w": torch.zeros(100_000)}, path)
    file = SafeFile(path)
    os.truncate(path, 4096)
    with pytest.raises(CheckpointError, match="shorter"):
        file.entries["w"].read_into(torch.zeros(100_000))
    file.close()
