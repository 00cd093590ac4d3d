"""Option objects that are changed after they were made: checked, in force, or refused with the reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import (
    Accelerator,
    AutocastKwargs,
    ConfigError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from lockstep.utils import DDPCommunicationHookType

pytestmark = pytest.mark.usefixtures("alone")

KINDS: list[Any] = [
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_none_is_told(kind: Any) -> None:
    options = kind()
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no option 'find_unused_parameter'. Allowed: "):
        options.find_unused_parameter = True


def test_what_is_set_is_checked_and_brought_into_form() -> None:
    options = DistributedDataParallelKwargs()
    options.find_unused_parameters = True
    assert options.to_kwargs() == {"find_unused_parameters": True}
    options.comm_hook = "bf16"  # type: ignore[assignment]
    assert options.comm_hook is DDPCommunicationHookType.BF16
    with pytest.raises(ConfigError, match="find_unused_parameters='yes' must be True or False"):
        options.find_unused_parameters = "yes"  # type: ignore[assignment]
    assert options.find_unused_parameters is True
    group = InitProcessGroupKwargs()
    group.timeout = 90  # type: ignore[assignment]
    assert group.timeout == timedelta(seconds=90)


def test_loaders_go_by_what_is_set_when_they_are_prepared() -> None:
    options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42)
    accelerator = Accelerator(cpu=True, dataloader_config=options)

    def order() -> list[int]:
        loader = accelerator.prepare(DataLoader(list(range(50)), shuffle=True))
        return [int(batch) for batch in loader]

    first = order()
    assert order() == first
    options.data_seed = 43
    assert order() != first
    accelerator.even_batches = False
    assert options.even_batches is False


def test_what_has_been_used_says_that_it_is_too_late() -> None:
    plugin, scaler, group = GradientAccumulationPlugin(num_steps=2), GradScalerKwargs(), InitProcessGroupKwargs()
    Accelerator(cpu=True, gradient_accumulation_plugin=plugin, kwargs_handlers=[scaler, group])
    for options, name, value in ((plugin, "num_steps", 4), (scaler, "init_scale", 2.0), (group, "backend", "gloo")):
        with pytest.raises(ConfigError, match=f"{name}=.* comes too late: an Accelerator was made with it"):
            setattr(options, name, value)


def test_what_is_read_later_may_be_set_later() -> None:
    options = AutocastKwargs()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[options])
    for enabled in (True, False, True):
        options.enabled = enabled
        with accelerator.autocast():
            assert torch.is_autocast_enabled("cpu") is enabled


def test_a_reproducible_run_keeps_its_data_options() -> None:
    options = DataLoaderConfiguration()
    accelerator = Accelerator(cpu=True, dataloader_config=options, reproducible=True)
    for each in (options, accelerator.dataloader_config):
        with pytest.raises(ConfigError, match="comes too late"):
            each.even_batches = False
