"""The views of one process: what they show, and the few things that can be set through them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import (
    Accelerator,
    AcceleratorState,
    ConfigError,
    DistributedType,
    GradientAccumulationPlugin,
    GradientState,
    PartialState,
    UsageError,
    current,
)

pytestmark = pytest.mark.usefixtures("alone")


def test_the_first_view_joins() -> None:
    assert current.peek() is None
    state = PartialState()
    assert state.initialized
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert state.distributed_type is DistributedType.NO
    assert state.backend is None
    assert not state.use_distributed
    assert "Num processes: 1" in repr(state)
    assert "Why:" in repr(state)
    PartialState._reset_state()
    assert current.peek() is None
    assert not state.initialized


def test_views_show_one_and_the_same() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert PartialState().device == accelerator.device
    assert AcceleratorState().mixed_precision == "bf16"
    assert accelerator.state.mixed_precision == "bf16"
    assert "Mixed precision type: bf16" in repr(AcceleratorState())


@pytest.mark.parametrize(
    "name", ["num_processes", "process_index", "device", "distributed_type", "is_main_process", "mixed_precision"]
)
def test_views_cannot_be_written(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(Accelerator(cpu=True).state, name, 7)


def test_the_guides_name_for_xla() -> None:
    assert DistributedType.TPU is DistributedType.XLA
    assert DistributedType.TPU == "XLA"
    known = "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA MEGATRON_LM"
    assert set(known.split()) <= set(DistributedType.__members__)


def test_gradient_state_follows_the_loop() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(torch.arange(3.0)))
    state = GradientState()
    assert (state.num_steps, state.in_dataloader, state.end_of_dataloader, state.remainder) == (2, False, False, -1)
    seen = []
    for _ in loader:
        with accelerator.accumulate():
            seen.append((state.sync_gradients, state.end_of_dataloader, state.in_dataloader))
            assert state.active_dataloader is loader
            assert state.dataloader_references == [None, loader]
    assert seen == [(False, False, True), (True, False, True), (True, True, True)]
    assert not state.in_dataloader


def test_sync_gradients_can_be_set_by_hand() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1)).backward()
    before = model.weight.item()
    GradientState()._set_sync_gradients(False)
    assert accelerator.sync_gradients is False
    optimizer.step()
    assert model.weight.item() == before
    accelerator.sync_gradients = True
    assert GradientState().sync_gradients is True
    optimizer.step()
    assert model.weight.item() != before


def test_plugin_kwargs_can_be_read_and_written() -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, tail_divisor="window"),
    )
    state = accelerator.gradient_state
    assert state.plugin_kwargs["num_steps"] == 2
    state.plugin_kwargs["num_steps"] = 3
    assert accelerator.gradient_accumulation_steps == 3
    state.plugin_kwargs.update({"sync_with_dataloader": False, "num_steps": 5})
    assert state.sync_with_dataloader is False
    assert accelerator.gradient_accumulation_steps == 5
    assert state.plugin_kwargs["sync_with_dataloader"] is False
    assert state.plugin_kwargs["num_steps"] == 5
    state.plugin_kwargs = {**state.plugin_kwargs, "adjust_scheduler": False}
    assert state.adjust_scheduler is False
    assert state.num_steps == 5
    with pytest.raises(ConfigError, match=r"plugin_kwargs\['speed'\].*Allowed: num_steps"):
        state.plugin_kwargs["speed"] = 3
    with pytest.raises(ConfigError, match="at least 1"):
        state.plugin_kwargs["num_steps"] = 0


def test_a_plugin_for_a_view_is_an_error() -> None:
    Accelerator(cpu=True)
    with pytest.raises(UsageError, match="gradient_accumulation_plugin"):
        GradientState(GradientAccumulationPlugin(num_steps=2))


def test_decorators_of_one() -> None:
    state = PartialState()

    def answer() -> int:
        return 42

    for wrap in (state.on_main_process, state.on_local_main_process, state.on_last_process):
        assert wrap(answer)() == 42
    assert state.on_process(answer, 0)() == 42
    assert state.on_process(process_index=0)(answer)() == 42
    assert state.on_local_process(local_process_index=0)(answer)() == 42
    for wrong in (None, 1, -1):
        with pytest.raises(ConfigError, match=f"process_index={wrong} .*Allowed: 0 to 0"):
            state.on_process(answer, wrong)


def test_decorators_without_arguments() -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.on_main_process
    def one() -> int:
        return 1

    @accelerator.on_main_process()
    def two() -> int:
        return 2

    @accelerator.on_last_process()
    def three() -> int:
        return 3

    assert (one(), two(), three()) == (1, 2, 3)
