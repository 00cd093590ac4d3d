"""Large files of tensors, read by several threads: what comes out is what torch.load gives."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.checkpoint import safe_pickle
from lockstep.checkpoint.discovery import Checking
from lockstep.model_files import parallel_read
from lockstep.model_files.parallel_read import Outline, UnfitError
from lockstep.model_files.torch_archive import Archive
from lockstep.storage import hashing
from tests.unit.checkpoint.runs import Run

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
shapes = st.lists(st.integers(0, 7), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    made = torch.randint(0, 2, draw(shapes)).to(draw(st.sampled_from(DTYPES)))
    if made.ndim > 1 and draw(st.booleans()):
        made = made.t() if made.ndim == 2 else made.transpose(0, 2)
    if made.ndim and len(made) > 2 and draw(st.booleans()):
        made = made[1:]
    return made


values = st.recursive(
    tensors() | st.none() | st.integers() | st.text(max_size=5) | st.just(torch.float32),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def torch_says_where() -> bool:
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    read = torch.load(file, map_location="meta", weights_only=True)
    return getattr(read.untyped_storage(), "_checkpoint_offset", None) is not None


needs_places = pytest.mark.skipif(
    not torch_says_where(), reason="this torch does not say where a tensor's bytes are: it reads large files alone"
)


def read_all(path: Path, chunk: int, hashed: set[int] | None = None) -> tuple[Any, dict[int, str | None]]:
    """The value, and the hash of each chunk, read by three threads in any order."""
    with opened(path) as (file, archive):
        return _read_all(Outline(file, archive), path, chunk, hashed)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, Archive]]:
    with path.open("rb") as file:
        yield file, Archive(file.fileno(), path)


def _read_all(outline: Outline, path: Path, chunk: int, hashed: set[int] | None) -> tuple[Any, dict[int, str | None]]:
    numbers = list(range(hashing.count_chunks(path.stat().st_size, chunk)))
    random.Random(0).shuffle(numbers)
    with ThreadPoolExecutor(3) as pool:
        wanted = set(numbers) if hashed is None else hashed
        marks = dict(zip(numbers, pool.map(lambda n: outline.read(n, chunk, n in wanted), numbers), strict=True))
    return outline.value, marks


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


@needs_places
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=values, chunk=st.integers(100, 3000))
def test_what_comes_out_is_what_torch_load_gives(tmp_path: Path, value: Any, chunk: int) -> None:
    path = tmp_path / "file"
    torch.save(value, path)
    got, marks = read_all(path, chunk)
    assert same(got, torch.load(path, weights_only=True))
    assert tuple(marks[number] for number in sorted(marks)) == hashing.hash_file(path, chunk)[1]


@needs_places
def test_only_what_is_wanted_is_hashed(tmp_path: Path) -> None:
    torch.save(torch.arange(1000), tmp_path / "file")
    value, marks = read_all(tmp_path / "file", 1024, hashed={1, 3})
    assert torch.equal(value, torch.arange(1000))
    assert {number for number, mark in marks.items() if mark is not None} == {1, 3}


@needs_places
def test_what_shared_memory_shares_it_again(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    torch.save({"whole": whole, "part": whole[3:5], "twice": whole, "list": [whole]}, tmp_path / "file")
    value, _ = read_all(tmp_path / "file", 4096)
    value["whole"].zero_()
    assert value["part"].tolist() == [0, 0]
    assert value["twice"] is value["whole"] is value["list"][0]


@needs_places
def test_the_tensors_are_ordinary_ones(tmp_path: Path) -> None:
    torch.save([torch.ones(3)], tmp_path / "file")
    (tensor,), _ = read_all(tmp_path / "file", 4096)
    assert tensor.resize_(2000).shape == (2000,)
    assert tensor.device.type == "cpu"
    assert type(tensor) is Tensor


@pytest.mark.parametrize(
    "value",
    [{"a": {1, 2}}, [torch.eye(3).to_sparse()]],
)
def test_the_unusual_is_left_to_torch(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "file")
    with opened(tmp_path / "file") as (file, archive), pytest.raises(UnfitError):
        Outline(file, archive)


@needs_places
@pytest.mark.parametrize("mapped", [False, True])
def test_a_state_dict_of_a_module_comes_out_whole(tmp_path: Path, mapped: bool) -> None:
    """It carries its version beside its items; with keep_vars the tensors are parameters."""
    state = nn.Linear(2, 2).state_dict(keep_vars=True)
    torch.save(state, tmp_path / "file")
    if mapped:
        with opened(tmp_path / "file") as (file, archive):
            got = Outline(file, archive, mapped=True).value
    else:
        got, _ = read_all(tmp_path / "file", 4096)
    assert got._metadata == state._metadata
    assert all(type(got[name]) is nn.Parameter and torch.equal(got[name], state[name]) for name in state)


@needs_places
def test_a_tensor_that_lies_outside_of_the_file_is_left_to_torch(tmp_path: Path) -> None:
    for name, length in (("file", 1000), ("other", 10)):
        torch.save(torch.ones(length), tmp_path / name)
    with opened(tmp_path / "file") as (file, _), opened(tmp_path / "other") as (_, archive), pytest.raises(UnfitError):
        Outline(file, archive)


@pytest.mark.parametrize("places", [(640, 640), (640, 700)])
def test_tensors_that_would_be_read_in_part_are_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[int, int]
) -> None:
    """As only a forged file has them: memory that nobody has written must not come out."""
    torch.save(torch.ones(1000), tmp_path / "file")
    told = [torch.empty(size, device="meta") for size in (20, 30)]
    for tensor, place in zip(told, places, strict=True):
        tensor.untyped_storage()._checkpoint_offset = place
    monkeypatch.setattr(parallel_read.torch, "load", lambda *_, **__: told)
    with opened(tmp_path / "file") as (file, archive), pytest.raises(UnfitError):
        Outline(file, archive)


@needs_places
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("unfit", [False, True])
def test_a_run_goes_on_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfit: bool) -> None:
    expected = Run().train().result()
    Run().train(4).accelerator.save_state(tmp_path / "state")
    read: list[str] = []
    fill = Checking.fill

    def filled(self: Checking, path: Path, outline: Outline) -> None:
        read.append(path.name)
        if unfit:
            raise UnfitError
        fill(self, path, outline)

    monkeypatch.setattr(Checking, "fill", filled)
    monkeypatch.setattr(safe_pickle, "LARGE", 0)
    again = Run()
    again.accelerator.load_state(tmp_path / "state")
    assert read == ["optimizer.bin"]
    assert again.train().result() == expected


@needs_places
@pytest.mark.usefixtures("alone")
def test_a_large_optimizer_is_read_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared() -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1500, 1500)
        return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters()))

    accelerator, model, optimizer = prepared()
    accelerator.backward(model(torch.randn(3, 1500)).square().mean())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "optimizer.bin").stat().st_size > parallel_read.LARGE
    monkeypatch.setattr(torch, "load", _refusing(torch.load))
    other, its_model, its_optimizer = prepared()
    other.load_state(tmp_path / "state")
    assert torch.equal(its_model.weight, model.weight)
    for one, two in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def _refusing(load: Any) -> Any:
    def checked(file: BinaryIO, **options: Any) -> Any:
        assert os.fstat(file.fileno()).st_size < parallel_read.LARGE or options["map_location"] == "meta"
        return load(file, **options)

    return checked
