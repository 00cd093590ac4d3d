"""The facade on one process: what it says of itself, and what it takes from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import (
    Accelerator,
    AcceleratorState,
    ConfigError,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    UsageError,
)
from lockstep.utils import broadcast, gather, gather_object, pad_across_processes, reduce

pytestmark = pytest.mark.usefixtures("alone")


def test_alone() -> None:
    accelerator = Accelerator()
    assert accelerator.distributed_type is DistributedType.NO
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    assert not torch.distributed.is_initialized()


def test_its_repr_says_why() -> None:
    text = repr(Accelerator(cpu=True, mixed_precision="bf16"))
    assert "one process" in text
    assert "cpu" in text
    assert "mixed precision bf16 from argument" in text


@pytest.mark.parametrize("prefix", ["ACCELERATE", "LOCKSTEP"])
def test_settings_from_the_environment(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{prefix}_MIXED_PRECISION", "bf16")
    monkeypatch.setenv(f"{prefix}_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv(f"{prefix}_DEBUG_MODE", "1")
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.state.debug
    assert f"environment ({prefix}_MIXED_PRECISION)" in repr(accelerator)


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=2)
    assert accelerator.mixed_precision == "no"
    assert accelerator.gradient_accumulation_steps == 2


def test_reproducible_switches_the_seedable_sampler_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Accelerator().use_seedable_sampler
    assert Accelerator(reproducible=True).use_seedable_sampler
    given = DataLoaderConfiguration(use_seedable_sampler=False, split_batches=True)
    accelerator = Accelerator(reproducible=True, dataloader_config=given)
    assert accelerator.use_seedable_sampler
    assert accelerator.split_batches
    monkeypatch.setenv("LOCKSTEP_REPRODUCIBLE", "yes")
    assert Accelerator().use_seedable_sampler
    assert not Accelerator(reproducible=False).use_seedable_sampler


def test_reproducible_refuses_a_precision_that_was_settled_before() -> None:
    Accelerator(mixed_precision="bf16")
    with pytest.raises(ConfigError, match="bf16"):
        Accelerator(reproducible=True)


def test_a_look_at_the_state_does_not_settle_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    AcceleratorState()
    assert Accelerator().mixed_precision == "bf16"
    assert AcceleratorState().mixed_precision == "bf16"


def test_options_reach_their_place(tmp_path: Path) -> None:
    accelerator = Accelerator(
        project_dir=tmp_path,
        rng_types=["torch", "generator"],
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, even_batches=False, use_seedable_sampler=True, data_seed=4, non_blocking=True
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True),
        device_placement=False,
    )
    assert accelerator.project_dir == str(tmp_path)
    assert accelerator.logging_dir == str(tmp_path)
    assert accelerator.save_iteration == 0
    assert accelerator.rng_types == ["torch", "generator"]
    assert accelerator.split_batches
    assert accelerator.use_seedable_sampler
    assert accelerator.non_blocking
    assert accelerator.device_placement is False
    assert accelerator.gradient_accumulation_steps == 2
    assert accelerator.even_batches is False
    accelerator.even_batches = True
    assert accelerator.even_batches is True


def test_a_project_configuration(tmp_path: Path) -> None:
    options = ProjectConfiguration(logging_dir="logs", iteration=4)
    accelerator = Accelerator(project_dir=tmp_path, project_config=options)
    assert accelerator.project_dir == str(tmp_path)
    assert accelerator.logging_dir == "logs"
    assert accelerator.save_iteration == 4


NESTED: list[Any] = [torch.ones(2), {"a": (torch.ones(()), [torch.tensor(True)])}]


@pytest.mark.parametrize("tree", NESTED, ids=["tensor", "nested"])
def test_collectives_of_one_give_their_input_back(tree: Any) -> None:
    accelerator = Accelerator()
    for collective in (gather, reduce, broadcast, pad_across_processes, accelerator.gather, accelerator.reduce):
        assert collective(tree) is tree
    assert accelerator.gather_for_metrics(tree) is tree
    assert gather_object(["x"]) == ["x"]
    accelerator.wait_for_everyone()


def test_triggers() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_breakpoint()
    assert not accelerator.check_trigger()
    accelerator.set_breakpoint()
    assert accelerator.check_trigger()


def test_profile(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))) as recorded:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert any("mm" in event.key for event in recorded.key_averages())
    assert (tmp_path / "traces" / "profile_0.json").stat().st_size > 0


def test_the_model_can_be_compiled() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = torch.nn.Linear(1, 1)
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(1)).item() == pytest.approx((model.weight + model.bias).item())
    assert prepared._compiled_call_impl is not None
    bare = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    assert bare is model
    assert bare._compiled_call_impl is None


def test_there_is_nothing_to_slice_when_one_rank_reads_for_all() -> None:
    with pytest.raises(UsageError, match="no batch is ever sliced"):
        Accelerator().prepare_data_loader(torch.utils.data.DataLoader([1]), slice_fn_for_dispatch=len)


def test_a_second_accelerator_shares_the_place() -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    assert first.state.device == second.state.device
    first.sync_gradients = False
    assert second.sync_gradients
