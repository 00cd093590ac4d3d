"""Model files and several ranks: one writes, all know how it went; one reads, all have the weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import Accelerator, CheckpointError, load_checkpoint_in_model
from lockstep.model_files.weights import write_weights
from lockstep.testing import run_ranks
from lockstep.utils import save
from tests.unit.checkpoint.small_models import Tied, bits, on_meta, same_values


def digest(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def saving(folder: str) -> tuple[list[str], dict[str, bytes], dict[str, bytes]]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, folder, max_shard_size=400)
    accelerator.wait_for_everyone()
    seen = sorted(name for name in os.listdir(folder) if name.startswith("model"))
    save(accelerator.process_index, f"{folder}/who.pt")
    accelerator.save(accelerator.process_index, f"{folder}/who_else.pt")
    fresh = accelerator.prepare(Tied())
    load_checkpoint_in_model(fresh, folder, strict=True)
    return seen, digest(accelerator.unwrap_model(model)), digest(accelerator.unwrap_model(fresh))


def test_one_rank_writes_for_all(tmp_path: Path) -> None:
    first, second = run_ranks(saving, 2, str(tmp_path))
    assert first[0] == second[0]
    assert first[0][-1] == "model.safetensors.index.json"
    assert first[1] == first[2] == second[1] == second[2]
    assert torch.load(tmp_path / "who.pt") == torch.load(tmp_path / "who_else.pt") == 0


def saving_in_vain(folder: str) -> tuple[str, float]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    text = ""
    try:
        accelerator.save_model(model, folder)
    except CheckpointError as error:
        text = str(error)
    # Training can go on: the ranks are still together.
    return text, accelerator.reduce(torch.ones(1)).item()


def test_a_rank_that_cannot_write_raises_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (first, total), (second, _) = run_ranks(saving_in_vain, 2, str(tmp_path / "file" / "folder"))
    assert "The model was not saved to" in first
    assert f"{tmp_path / 'file'}'" in first  # what is in the way
    assert second == ""
    assert total == 2


def loading_from_rank_0(folder: str, dtype: str | None) -> tuple[list[str], dict[str, bytes], bool]:
    accelerator = Accelerator(cpu=True)
    path = folder if accelerator.is_main_process else "/nowhere"
    model = Tied() if dtype is None else on_meta()
    loaded = load_checkpoint_in_model(model, path, dtype=dtype, strict=True, broadcast_from_rank0=True)
    return loaded.missing_keys, digest(model), model.head.weight is model.embed.weight


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_rank_0_reads_for_all(tmp_path: Path, safe: bool, dtype: str | None) -> None:
    source = Tied()
    write_weights(source.state_dict(), tmp_path, max_shard_size=300, safe=safe)
    if dtype is not None:
        source.double()
    for missing, values, tied in run_ranks(loading_from_rank_0, 2, str(tmp_path), dtype):
        assert missing == []
        assert values == digest(source)
        assert tied


def loading_in_vain(folder: str, odd_rank: int | None) -> tuple[str, bool, float]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 3) if accelerator.process_index == odd_rank else Tied()
    before = digest(model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(model, folder, broadcast_from_rank0=True)
    return str(caught.value), digest(model) == before, accelerator.reduce(torch.ones(1)).item()


def test_what_one_rank_cannot_load_none_does(tmp_path: Path) -> None:
    write_weights(Tied().state_dict(), tmp_path)
    first, second = run_ranks(loading_in_vain, 2, str(tmp_path), 1)
    assert "Rank 1 cannot load the checkpoint, so none does" in first[0]
    assert "does not fit Linear" in second[0]
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert first[1:] == second[1:] == (True, 2)
    first, second = run_ranks(loading_in_vain, 2, str(tmp_path), None)
    assert "model.safetensors has 7 bytes" in first[0]
    assert "Rank 0, which reads for all, could not" in second[0]
    assert first[1:] == second[1:] == (True, 2)


def test_the_model_that_was_trained_is_the_one_in_the_file(tmp_path: Path) -> None:
    state = run_ranks(trained, 2, str(tmp_path))[1]
    model = nn.Linear(4, 1)
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert digest(model) == state
    assert not same_values(model, nn.Linear(4, 1))


def trained(folder: str) -> dict[str, bytes]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.randn(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, folder, safe_serialization=False)
    return digest(accelerator.unwrap_model(model))
