"""A tensor's memory as bytes, whatever its strides."""

from __future__ import annotations

import pytest
import torch

from lockstep.comm import replicas
from lockstep.comm.raw_bytes import as_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint16])
@pytest.mark.parametrize(
    "cut",
    [
        lambda grid: grid,
        lambda grid: grid[1],
        lambda grid: grid[0, 1:2],
        lambda grid: grid[:1, 1:2],  # one element, and not a stride of 1 among its own
        lambda grid: grid[:1, :1].T,
        lambda grid: grid[0, 0],
        lambda grid: grid[:0],
    ],
)
def test_they_are_those_of_its_elements(dtype: torch.dtype, cut: object) -> None:
    tensor = cut(torch.arange(6).reshape(2, 3).to(dtype)).contiguous()  # type: ignore[operator]
    found = as_bytes(tensor)
    assert found.numpy().tobytes() == bytes(tensor.clone().untyped_storage())
    assert not found.numel() or found.data_ptr() == tensor.data_ptr()


def test_replicas_with_such_a_parameter_can_be_compared() -> None:
    assert replicas.checksums(0, [torch.ones(4, dtype=torch.float64)[::4]]).sums
