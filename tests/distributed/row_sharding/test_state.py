"""Saving and loading where each rank has some rows: files are whole, and any number of processes reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, CheckpointError, GradientAccumulationPlugin
from lockstep.testing import run_ranks
from tests.distributed.row_sharding.strategy import ShardingAccelerator
from tests.distributed.row_sharding.test_training import BATCH, Net, data, plainly, same
from tests.unit.checkpoint.small_models import bits

State = tuple[dict[str, bytes], dict[str, bytes]]


def whole(accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The bits of the weights and momenta, put together from all ranks by code of the test's own."""
    from lockstep.comm.objects import all_objects

    weights, momenta = {}, {}
    for name, parameter in net.named_parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        everyone = all_objects(accelerator._state.group, (parameter.detach(), momentum))
        spread = bool(parameter.ndim)
        weights[name] = bits(torch.cat([one for one, _ in everyone]) if spread else everyone[0][0])
        if momentum is not None:
            momenta[name] = bits(torch.cat([one for _, one in everyone]) if spread else everyone[0][1])
    return weights, momenta


def step(accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    share = len(x) // accelerator.num_processes
    mine = slice(share * accelerator.process_index, share * (accelerator.process_index + 1))
    accelerator.backward(nn.functional.mse_loss(net(x[mine]), y[mine]))
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: str, source: str | None) -> tuple[State, State | None]:
    """The state before the save, and what was loaded first."""
    accelerator = ShardingAccelerator()
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loaded = None
    if source is not None:
        accelerator.load_state(source)
        loaded = whole(accelerator, net, optimizer)
    x, y = data().tensors
    for xs, ys in zip(x.split(BATCH), y.split(BATCH), strict=True):
        step(accelerator, net, optimizer, xs, ys)
    accelerator.save_state(folder)
    return whole(accelerator, net, optimizer), loaded


def test_two_ranks_then_one_then_three(tmp_path: Path) -> None:
    before, state = None, None
    for number, ranks in enumerate((2, 1, 3)):
        source = None if before is None else str(before)
        before = tmp_path / str(number)
        results = run_ranks(saved, ranks, str(before), source)
        assert all(result == results[0] for result in results)
        assert len(results[0][0][1]) == 5, "each trained parameter has a momentum; the unused layer has none"
        assert results[0][1] == state
        state = results[0][0]


def plain_load(folder: str) -> dict[str, bytes]:
    """With one process, or by DDP: nothing in the files says how they were trained."""
    accelerator = Accelerator()
    net = Net()
    net.unused.requires_grad_(False)
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    accelerator.load_state(folder)
    return {name: bits(value) for name, value in accelerator.get_state_dict(net).items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_shards_nothing_reads_the_files(ranks: int, tmp_path: Path) -> None:
    ((wanted, _), _), *_ = run_ranks(saved, 3, str(tmp_path / "state"), None)
    for found in run_ranks(plain_load, ranks, str(tmp_path / "state")):
        assert {name: found[name] for name in wanted} == wanted
        assert found["second.weight"] == found["first.weight"]


def window(folder: str, source: str | None, each: bool) -> dict[str, Tensor]:
    """A third of a window and a save; or the rest of it, after a load."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each, sync_with_dataloader=False)
    accelerator = ShardingAccelerator(gradient_accumulation_plugin=plugin)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if source is not None:
        accelerator.load_state(source)
    x, y = data().tensors
    for place in range(3):
        if (place == 0) == (source is None):
            with accelerator.accumulate(net):
                step(accelerator, net, optimizer, x[place * BATCH :][:BATCH], y[place * BATCH :][:BATCH])
    accelerator.save_state(folder)
    return accelerator.get_state_dict(net)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_an_open_window_goes_on_with_its_gradients(ranks: tuple[int, int], each: bool, tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    nn.functional.mse_loss(net(data().tensors[0]), data().tensors[1]).backward()
    optimizer.step()
    run_ranks(window, ranks[0], str(tmp_path / "open"), None, each)
    for found in run_ranks(window, ranks[1], str(tmp_path / "closed"), str(tmp_path / "open"), each):
        same(found, net.state_dict())


def another_shape(folder: str) -> str:
    accelerator = ShardingAccelerator()
    net = nn.Linear(7, 7)
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = [item.detach().clone() for item in net.parameters()]
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    return str(caught.value)


def smaller(folder: str) -> None:
    accelerator = ShardingAccelerator()
    net = nn.Linear(7, 5)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.save_state(folder)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    run_ranks(smaller, 2, str(tmp_path / "state"))
    assert all("weight has shape (5, 7) there" in text for text in run_ranks(another_shape, 2, str(tmp_path / "state")))


def alone(folder: str) -> str:
    accelerator = ShardingAccelerator()
    net = nn.Linear(7, 5)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    text = ""
    if accelerator.is_main_process:
        with pytest.raises(CheckpointError) as caught:
            accelerator.save_state(folder)
        text = str(caught.value)
    accelerator.wait_for_everyone()
    return text


def test_a_rank_alone_cannot_save(tmp_path: Path) -> None:
    text, _ = run_ranks(alone, 2, str(tmp_path / "state"))
    assert "save_state() needs all ranks, because each has a part of the parameters" in text
    assert not (tmp_path / "state").exists()


def model_files(folder: str) -> None:
    accelerator = ShardingAccelerator()
    net = Net()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), DataLoader(data(), batch_size=BATCH // 2)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(net(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_model(net, folder)


def test_a_model_file_has_whole_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_ranks(model_files, 2, str(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    wanted = {name: value for name, value in plainly()[0].items() if name in found}
    assert set(plainly()[0]) - set(found) == {"second.weight"}, "tied, so it is there once"
    same({name: found[name] for name in wanted}, wanted)
