"""The numbers of a tensor, against torch's own functions, for every kind of tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.debug_utils import detect_overflow
from lockstep.numerics import stats
from lockstep.numerics.dtype_limits import near_edge, range_named, range_of
from lockstep.numerics.stats import ALWAYS, CHUNK, NEVER, WHERE_SEEN, Numbers, Pending, fetch, measure

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def numbers(tensor: Tensor, count: int = ALWAYS) -> Numbers:
    return fetch([measure(tensor, count=count)])[0]


def expected(tensor: Tensor) -> tuple[float, float, bool, bool]:
    wide = tensor.detach().double().abs()
    return float(wide.min()), float(wide.max()), bool(wide.isnan().any()), bool(wide.isinf().any())


def same(found: Numbers, tensor: Tensor) -> None:
    low, high, nans, infs = expected(tensor)
    assert (found.nans, found.infs) == (nans, infs)
    assert found.abs_max == high or (math.isnan(found.abs_max) and math.isnan(high))
    assert found.abs_min == low or (math.isnan(found.abs_min) and math.isnan(low))
    limits = range_of(tensor.dtype)
    assert limits is not None
    tiny = float((tensor.double().abs() < limits.smallest_normal).double().mean())
    subnormal = tiny - float((tensor == 0).double().mean())
    assert found.tiny == pytest.approx(tiny)
    assert found.subnormal == pytest.approx(subnormal)


SPECIAL = st.sampled_from([0.0, -0.0, 1e-7, 6e-5, -3e-39, 1.0, -65504.0, 3e38, math.inf, -math.inf, math.nan])


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.one_of(SPECIAL, st.floats(width=32)), min_size=1, max_size=40),
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(["plain", "strided", "turned", "expanded"]),
)
def test_the_numbers_are_those_that_torch_finds(values: list[float], dtype: torch.dtype, layout: str) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    if layout == "strided":
        tensor = torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=1)[:, 0]
    elif layout == "turned":
        tensor = tensor.expand(3, -1).contiguous().t()
    elif layout == "expanded":
        tensor = tensor.expand(5, -1)
    same(numbers(tensor), tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 16])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, 7e4])
def test_one_value_among_many_pieces_is_found(dtype: torch.dtype, place: int, value: float) -> None:
    tensor = torch.full((2 * CHUNK + 17,), 0.5, dtype=dtype)
    tensor[place] = value
    same(numbers(tensor), tensor)


@pytest.mark.parametrize("shape", [(3, CHUNK + 5), (700, 3, 401), (2, 2, 2, CHUNK)])
def test_large_tensors_that_do_not_lie_in_one_piece(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).transpose(0, -1)[:, ..., ::2]
    tensor[-1, ..., -1] = 9.0
    assert all(piece.numel() <= CHUNK for piece in stats.pieces(tensor, CHUNK))
    assert sum(piece.numel() for piece in stats.pieces(tensor, CHUNK)) == tensor.numel()
    same(numbers(tensor), tensor)


def test_what_is_shown_a_billion_times_is_read_once() -> None:
    row = torch.tensor([[1.0, -2.0, 1e-40]])
    assert numbers(row.expand(10**9, 3)) == Numbers(numbers(row).abs_min, 2.0, tiny=1 / 3, subnormal=1 / 3)


KINDS: dict[str, tuple[Any, Numbers]] = {
    "integers": (torch.tensor([3, -7, 1]), Numbers(1.0, 7.0)),
    "negative integers": (torch.tensor([-3, -7]), Numbers(3.0, 7.0)),
    "the lowest integer": (torch.tensor([-(2**63), 5]), Numbers(5.0, 2.0**63)),
    "unsigned": (torch.tensor([1, 2**40], dtype=torch.uint64), Numbers(1.0, 2.0**40)),
    "bytes": (torch.tensor([200, 3], dtype=torch.uint8), Numbers(3.0, 200.0)),
    "booleans": (torch.tensor([True, False]), Numbers(0.0, 1.0)),
    "complex": (torch.tensor([3 + 4j, 1j]), Numbers(1.0, 5.0)),
    "half complex": (torch.tensor([3 + 4j], dtype=torch.complex32), Numbers(5.0, 5.0)),
    "complex, nan": (torch.tensor([complex(math.nan, 1)]), Numbers(math.nan, math.nan, nans=True)),
    "sparse": (torch.eye(3).mul(2).to_sparse(), Numbers(2.0, 2.0)),
    "sparse rows": (torch.eye(3).mul(2).to_sparse_csr(), Numbers(2.0, 2.0)),
    "nested": (torch.nested.nested_tensor([torch.ones(2), torch.full((3,), -4.0)]), Numbers(1.0, 4.0)),
    "jagged": (
        torch.nested.nested_tensor([torch.ones(2), torch.full((3,), math.inf)], layout=torch.jagged),
        Numbers(1.0, math.inf, infs=True),
    ),
    "one number": (torch.tensor(-2.5), Numbers(2.5, 2.5)),
    "fp8": (torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn), Numbers(1.0, 448.0)),
    "fp8, nan": (torch.tensor([math.nan]).to(torch.float8_e5m2), Numbers(math.nan, math.nan, nans=True)),
    "a view with its sign turned": (torch._neg_view(torch.tensor([1.0, -2.0])), Numbers(1.0, 2.0)),
    "a parameter": (torch.nn.Parameter(torch.tensor([1.0, -2.0])), Numbers(1.0, 2.0)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls nested and sparse tensors a prototype
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor(kind: str) -> None:
    tensor, wanted = KINDS[kind]
    assert repr(numbers(tensor, NEVER)) == repr(wanted)  # NaN does not equal itself, its text does


def test_what_has_no_numbers_is_noted() -> None:
    assert numbers(torch.empty(0)).note == "empty"
    assert numbers(torch.empty(0, dtype=torch.int32)).note == "empty"
    assert numbers(torch.empty(3, device="meta")).note == "on meta"
    assert numbers(torch.empty(2, 0, 3).to_sparse()).note == "empty"


class Stubborn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" in str(function):
            raise RuntimeError("no")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_that_refuses_is_noted_and_does_not_raise() -> None:
    assert numbers(torch.ones(2).as_subclass(Stubborn)).note == "unreadable Stubborn: RuntimeError"


def test_the_tensor_stays_as_it_was() -> None:
    tensor = torch.randn(2 * CHUNK, requires_grad=True)
    before, version = tensor.detach().clone(), tensor._version
    numbers(tensor)
    assert torch.equal(tensor, before)
    assert tensor._version == version
    assert tensor.grad is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("values", [[1.0, -2.0, 0.0], [1.0, math.nan, math.inf], [math.inf], [1e-7, 1e-45]])
def test_the_way_of_accelerators_finds_the_same(dtype: torch.dtype, values: list[float]) -> None:
    """It starts no wait before ``fetch``; there is no accelerator here, but its operations run on the CPU, too."""
    tensors = [torch.tensor(values, dtype=dtype), torch.tensor(values[:1], dtype=dtype)]
    waiting = [Pending.of(tensor, stats._BITS[dtype], True) for tensor in tensors]
    assert all(isinstance(one, Pending) for one in waiting)
    for found, tensor in zip(fetch([*waiting, stats.NONE])[:2], tensors, strict=True):
        same(found, tensor)


def test_subnormals_are_counted_where_they_are_seen() -> None:
    assert numbers(torch.tensor([1e-40, 1.0]), WHERE_SEEN).tiny == 0.5
    assert numbers(torch.tensor([1.0, 2.0]), WHERE_SEEN).tiny is None
    large = torch.ones(3 * CHUNK)
    large[5] = 1e-40
    assert numbers(large, WHERE_SEEN).tiny == pytest.approx(1 / (3 * CHUNK))


def test_a_mask_is_told_from_an_overflow() -> None:
    assert stats.is_mask(torch.tensor([0.0, -math.inf]))
    assert not stats.is_mask(torch.tensor([0.0, math.inf]))
    assert not stats.is_mask(torch.tensor([0.1, -math.inf]))


def test_detect_overflow_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect_overflow(torch.tensor([math.nan, math.inf]), "after layer_norm") is True
    assert capsys.readouterr().out == "after layer_norm has nans\nafter layer_norm has infs\n"
    assert detect_overflow(torch.tensor([-math.inf]), "x") is True
    assert capsys.readouterr().out == "x has infs\n"
    assert detect_overflow(torch.ones(2), "x") is False
    assert detect_overflow(None, "x") is False
    assert capsys.readouterr().out == ""


def test_ranges() -> None:
    half = range_named("float16")
    assert half is not None
    assert (half.name, half.largest, half.narrow) == ("fp16", 65504.0, True)
    assert near_edge(6.27e4, "float16") == "abs max 6.27e+04 of fp16's 6.55e+04"
    assert near_edge(6.27e4, "bfloat16") is None
    assert near_edge(math.inf, "float16") is None
    assert range_of(torch.int64) is None
    fp8 = range_of(torch.float8_e4m3fn)
    assert fp8 is not None
    assert (fp8.largest, fp8.has_inf) == (448.0, False)
