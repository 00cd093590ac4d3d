"""What tensors tell beside their public face."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.torch_internals import fake, tensor


def test_all_are_copied_and_scaled_at_once() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)]
    tensor.copy_all(targets, [torch.ones(2), torch.full((3,), 2.0)])
    tensor.scale_all(targets, 0.5)
    assert [one.tolist() for one in targets] == [[0.5, 0.5], [1.0, 1.0, 1.0]]


def test_each_change_in_place_is_counted() -> None:
    one = torch.zeros(2)
    before = tensor.version_of(one)
    one.add_(1)
    assert tensor.version_of(one) == before + 1
    with torch.inference_mode():
        assert tensor.version_of(torch.zeros(1)) == -1


def test_a_sparse_tensor_as_it_lies_there() -> None:
    sparse = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (2,), check_invariants=True)
    assert tensor.sparse_indices(sparse).tolist() == [[1, 1, 0]]
    assert tensor.sparse_values(sparse).tolist() == [1.0, 2.0, 3.0]


def test_storages_are_told_apart_also_without_memory() -> None:
    for device in ("cpu", "meta"):
        one, other = torch.empty(4, device=device), torch.empty(4, device=device)
        keys = [tensor.storage_key(item.untyped_storage()) for item in (one, one.view(2, 2), other)]
        assert keys[0] == keys[1] != keys[2]


def test_a_fake_tensor_knows_where_its_bytes_lie(tmp_path: Path) -> None:
    values = torch.arange(5.0)
    torch.save({"weight": values}, tmp_path / "file")
    with fake.fake_tensors():
        held = torch.load(tmp_path / "file", weights_only=True)["weight"]
    start = tensor.offset_in_file(held.untyped_storage())
    assert start
    assert (tmp_path / "file").read_bytes()[start : start + values.nbytes] == values.numpy().tobytes()
    assert tensor.offset_in_file(torch.ones(1).untyped_storage()) is None
