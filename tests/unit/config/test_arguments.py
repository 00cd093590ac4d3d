"""What Accelerator refuses, and that it refuses before it has joined anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lockstep import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    ConfigError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    NotYetError,
    PartialState,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    current,
)

pytestmark = pytest.mark.usefixtures("alone")


def spell(arguments: dict[str, Any]) -> str:
    """A name that is the same in every process, so that several can share the tests."""
    return re.sub(r" at 0x\w+", "", str(arguments))


@pytest.fixture(autouse=True)
def nobody_joins(alone: None) -> Iterator[None]:
    yield
    assert not dist.is_initialized()
    assert current.peek() is None


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"mixed_precision": "fp32"}, ["mixed_precision='fp32'", "'no'", "'fp16'", "'bf16'"]),
    ({"mixed_precision": 16}, ["mixed_precision=16", "'fp16'"]),
    ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps=0", "at least 1"]),
    ({"gradient_accumulation_steps": 2.0}, ["gradient_accumulation_steps=2.0", "whole number"]),
    ({"gradient_accumulation_steps": True}, ["gradient_accumulation_steps=True", "whole number"]),
    ({"gradient_accumulation_steps": "4"}, ["gradient_accumulation_steps='4'", "whole number"]),
    ({"device_placement": "yes"}, ["device_placement='yes'", "True or False"]),
    ({"device_placement": None}, ["device_placement=None", "True or False"]),
    ({"split_batches": 1}, ["split_batches=1", "True or False"]),
    ({"cpu": "true"}, ["cpu='true'", "True or False"]),
    ({"dataloader_config": {"split_batches": True}}, ["dataloader_config", "dict", "DataLoaderConfiguration"]),
    ({"project_config": "here"}, ["project_config", "str", "ProjectConfiguration"]),
    ({"project_dir": 5}, ["project_dir=5", "path"]),
    ({"gradient_accumulation_plugin": 3}, ["gradient_accumulation_plugin", "int", "GradientAccumulationPlugin"]),
    ({"rng_types": "torch"}, ["rng_types='torch'", "list"]),
    ({"rng_types": 3}, ["rng_types=3", "list"]),
    ({"rng_types": ["dice"]}, ["rng_types='dice'", "'torch'", "'generator'"]),
    ({"step_scheduler_with_optimizer": "no"}, ["step_scheduler_with_optimizer='no'", "True or False"]),
    ({"step_with_optimizer": 0}, ["step_with_optimizer=0", "True or False"]),
    ({"kwargs_handlers": [object()]}, ["kwargs_handlers", "object", "AutocastKwargs", "GradScalerKwargs"]),
    ({"kwargs_handlers": 3}, ["kwargs_handlers=3", "list"]),
    ({"kwargs_handlers": AutocastKwargs()}, ["kwargs_handlers", "AutocastKwargs", "list"]),
    ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ["two AutocastKwargs"]),
    ({"dynamo_backend": "gcc"}, ["dynamo_backend='gcc'", "'INDUCTOR'"]),
    ({"dynamo_plugin": "inductor"}, ["dynamo_plugin", "str", "TorchDynamoPlugin"]),
    ({"scheduler_unit": "epoch"}, ["scheduler_unit='epoch'", "'process'", "'update'"]),
    ({"debug": "everything"}, ["debug='everything'", "'collectives'"]),
    ({"debug": 3}, ["debug=3", "'collectives'"]),
    ({"reproducible": "yes"}, ["reproducible='yes'", "True or False"]),
    ({"reproducible": True, "mixed_precision": "bf16"}, ["reproducible=True", "mixed_precision='bf16'"]),
    (
        {"reproducible": True, "dataloader_config": DataLoaderConfiguration(even_batches=False)},
        ["reproducible=True", "even_batches=False"],
    ),
    (
        {
            "reproducible": True,
            "gradient_accumulation_plugin": GradientAccumulationPlugin(
                tail_divisor="window", sync_with_dataloader=False
            ),
        },
        ["reproducible=True", "tail_divisor='window'", "sync_with_dataloader=False"],
    ),
    (
        {"reproducible": True, "kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]},
        ["reproducible=True", "comm_hook"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[spell(arguments) for arguments, _ in WRONG])
def test_a_wrong_argument_is_named_with_what_was_given_and_what_is_allowed(
    arguments: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(**arguments)
    assert [word for word in words if word not in str(caught.value)] == []


CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"split_batches": True, "dataloader_config": DataLoaderConfiguration()},
        ["split_batches=True", "dataloader_config.split_batches=False"],
    ),
    (
        {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
        ["gradient_accumulation_steps=2", "num_steps=3"],
    ),
    (
        {"step_scheduler_with_optimizer": True, "step_with_optimizer": False},
        ["step_scheduler_with_optimizer=True", "step_with_optimizer=False"],
    ),
    (
        {"project_dir": "a", "project_config": ProjectConfiguration(project_dir="b")},
        ["project_dir='a'", "project_config.project_dir='b'"],
    ),
    (
        {"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")},
        ["dynamo_backend='eager'", "dynamo_plugin"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), CONTRADICTIONS, ids=[str(list(a)) for a, _ in CONTRADICTIONS])
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(**arguments)
    assert [word for word in words if word not in str(caught.value)] == []


def test_all_problems_in_one_message() -> None:
    with pytest.raises(ConfigError, match="5 settings cannot be used") as caught:
        Accelerator(
            mixed_precision="int3",
            gradient_accumulation_steps=-1,
            log_with="tensorbord",
            scheduler_unit="minute",
            rng_types=["dice"],
        )
    for name in ("mixed_precision=", "gradient_accumulation_steps=", "log_with=", "scheduler_unit=", "rng_types="):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"fsdp_plugin": object()},
        {"deepspeed_plugin": object()},
        {"deepspeed_plugins": {}},
        {"torch_tp_plugin": object()},
        {"megatron_lm_plugin": object()},
        {"parallelism_config": object()},
        {"mixed_precision": "fp8"},
    ],
    ids=spell,
)
def test_what_is_known_and_not_built_says_not_yet(arguments: dict[str, Any]) -> None:
    with pytest.raises(NotYetError, match=rf"{next(iter(arguments))}=.*not supported yet"):
        Accelerator(**arguments)


@pytest.mark.parametrize(
    "variable",
    ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"],
)
def test_a_variable_that_asks_for_what_is_not_built(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(NotYetError, match=f"{variable}='1'.*not supported yet"):
        Accelerator()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp12"),
        ("LOCKSTEP_MIXED_PRECISION", "fp12"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0"),
        ("ACCELERATE_USE_CPU", "perhaps"),
        ("LOCKSTEP_DEBUG_MODE", "perhaps"),
        ("LOCKSTEP_REPRODUCIBLE", "perhaps"),
        ("ACCELERATE_USE_FSDP", "perhaps"),
        ("ACCELERATE_DYNAMO_BACKEND", "gcc"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as caught:
        Accelerator()
    assert re.search(f"{variable}='?{text}'?[ .]", str(caught.value))


HANDLERS: list[tuple[Any, dict[str, Any], str]] = [
    (GradScalerKwargs, {"growth_factor": 1.0}, "growth_factor=1.0"),
    (GradScalerKwargs, {"backoff_factor": 1.5}, "backoff_factor=1.5"),
    (GradScalerKwargs, {"init_scale": 0.0}, "init_scale=0.0"),
    (GradScalerKwargs, {"init_scale": "big"}, "init_scale='big'"),
    (GradScalerKwargs, {"growth_interval": 0}, "growth_interval=0"),
    (GradScalerKwargs, {"enabled": "yes"}, "enabled='yes'"),
    (AutocastKwargs, {"enabled": 1}, "enabled=1"),
    (InitProcessGroupKwargs, {"timeout": "soon"}, "timeout='soon'"),
    (InitProcessGroupKwargs, {"timeout": timedelta(0)}, "timeout=0:00:00"),
    (DistributedDataParallelKwargs, {"comm_hook": "zip"}, "comm_hook='zip'"),
    (DistributedDataParallelKwargs, {"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "comm_wrapper='power_sgd'"),
    (DistributedDataParallelKwargs, {"comm_wrapper": "fp16"}, "comm_wrapper='fp16'"),
    (DistributedDataParallelKwargs, {"check_reduction": True}, "check_reduction=True"),
    (DistributedDataParallelKwargs, {"find_unused_parameters": "yes"}, "find_unused_parameters='yes'"),
    (ProfileKwargs, {"activities": ["disk"]}, "disk"),
    (ProfileKwargs, {"with_stack": 1}, "with_stack=1"),
    (DataLoaderConfiguration, {"split_batches": "yes"}, "split_batches='yes'"),
    (DataLoaderConfiguration, {"even_batches": None}, "even_batches=None"),
    (DataLoaderConfiguration, {"data_seed": 3}, "data_seed=3"),
    (GradientAccumulationPlugin, {"num_steps": 0}, "num_steps=0"),
    (GradientAccumulationPlugin, {"tail_divisor": "half"}, "tail_divisor='half'"),
    (GradientAccumulationPlugin, {"sync_with_dataloader": 1}, "sync_with_dataloader=1"),
    (TorchDynamoPlugin, {"backend": "gcc"}, "dynamo_backend='gcc'"),
]


@pytest.mark.parametrize(("kind", "options", "word"), HANDLERS, ids=[f"{k.__name__}-{o}" for k, o, _ in HANDLERS])
def test_an_option_object_checks_itself(kind: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(kwargs_handlers=[kind(**options)])
    assert word in str(caught.value)
    assert kind.__name__ in str(caught.value) or "dynamo" in word


def test_a_backend_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29999")
    with pytest.raises(ConfigError, match=r"'pigeon' is not known.*gloo"):
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="pigeon")])


def test_the_views_check_their_arguments() -> None:
    with pytest.raises(ConfigError, match=r"PartialState got speed\. Allowed: backend, init_method, timeout"):
        PartialState(speed=3)
    with pytest.raises(ConfigError, match="mixed_precision='fp12'"):
        AcceleratorState(mixed_precision="fp12")
