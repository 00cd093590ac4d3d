"""The numbers of any tensor, next to those that a slow and simple reading finds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.numerics import stats
from lockstep.numerics.stats import ALWAYS, NEVER, WHERE_SEEN, Pending, fetch, measure

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool]
COMPLEX = [torch.complex64, torch.complex128]
VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, -2.5, 448.0, -6e4, 7e4, 1e30, -1e-3, 3e-8, 1e-40, math.inf, -math.inf, math.nan]
)
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def views(draw, dtypes):
    """Tensors of any shape, whole or as what is left after slicing, turning and showing rows again."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(SHAPES)
    size = math.prod(shape)
    if dtype in INTEGERS:
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        numbers = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        tensor = torch.tensor(numbers, dtype=dtype).reshape(shape)
    else:
        values = torch.tensor(draw(st.lists(VALUES, min_size=size, max_size=size)), dtype=torch.float64)
        if dtype in COMPLEX:
            values = torch.complex(values, values.flip(0))
        tensor = values.to(dtype).reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        if not tensor.dim():
            break
        dim = draw(st.integers(0, tensor.dim() - 1))
        way = draw(st.sampled_from(["turn", "part", "again", "every", "conj"]))
        if way == "turn":
            tensor = tensor.transpose(0, dim)
        elif way == "part" and tensor.shape[dim]:
            tensor = tensor.narrow(dim, draw(st.integers(0, tensor.shape[dim] - 1)), 1)
        elif way == "again":
            tensor = tensor.unsqueeze(dim).expand(*tensor.shape[:dim], draw(st.integers(1, 3)), *tensor.shape[dim:])
        elif way == "every" and tensor.shape[dim]:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif way == "conj" and dtype in COMPLEX:
            tensor = tensor.conj()
    return tensor


def simply(tensor):
    """Smallest, largest, nan and inf, by way of Python's own numbers."""
    values = [
        abs(value) for value in tensor.to(torch.float64 if not tensor.dtype.is_complex else None).flatten().tolist()
    ]
    nans = any(math.isnan(value) for value in values)
    infs = any(math.isinf(value) for value in values)
    low, high = (math.nan, math.nan) if nans else (min(values), max(values))
    return low, high, nans, infs


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


def same_bits(one, other):
    flat = (tensor.flatten().clone(memory_format=torch.contiguous_format) for tensor in (one, other))
    return torch.equal(*(tensor.view(torch.uint8) for tensor in flat))


def check(found, tensor):
    if tensor.numel() == 0:
        assert found.note == "empty"
        return
    low, high, nans, infs = simply(tensor)
    assert (found.note, found.nans, found.infs) == ("", nans, infs)
    assert same(found.abs_min, low)
    assert same(found.abs_max, high)


@pytest.mark.parametrize("chunk", [3, stats.CHUNK])
@given(tensor=views(FLOATS + INTEGERS), count=st.sampled_from([NEVER, WHERE_SEEN, ALWAYS]))
@settings(max_examples=150, deadline=None)
def test_numbers_are_right_whatever_the_tensor_and_the_pieces(chunk, tensor, count):
    before = tensor.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "CHUNK", chunk)
        patch.setattr(stats, "_buffers", stats._Buffers())
        (found,) = fetch([measure(tensor, count=count)])
    check(found, tensor)
    assert same_bits(tensor, before)
    if count == ALWAYS and tensor.dtype.is_floating_point and tensor.numel():
        values = [abs(value) for value in tensor.to(torch.float64).flatten().tolist()]
        least = torch.finfo(tensor.dtype).smallest_normal
        if all(tensor.stride()):  # of a row that is shown again only one is counted
            assert found.tiny == pytest.approx(sum(value < least for value in values) / len(values))
            assert found.subnormal == pytest.approx(sum(0 < value < least for value in values) / len(values))


@given(tensor=views([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
@settings(max_examples=80, deadline=None)
def test_the_way_of_accelerators_is_right_too(tensor):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "DEVICE_CHUNK", 3)
        (found,) = fetch([Pending.of(tensor, stats._BITS[tensor.dtype], True)])
    check(found, tensor)


@given(tensor=views(COMPLEX))
@settings(max_examples=60, deadline=None)
def test_complex_numbers_count_by_their_size(tensor):
    (found,) = fetch([measure(tensor, count=ALWAYS)])
    if tensor.numel() == 0:
        assert found.note == "empty"
        return
    sizes = tensor.abs()
    assert found.nans == bool(sizes.isnan().any())
    assert found.infs == bool(sizes.isinf().any())
    if not found.nans:
        assert found.abs_max == pytest.approx(sizes.max().item())
        assert found.abs_min == pytest.approx(sizes.min().item())
