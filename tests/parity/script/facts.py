"""Who am I, what are the defaults, which names are there."""

import dataclasses
import inspect
import random

import numpy as np
import torch
from accelerate import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
    ProfileKwargs,
    utils,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DynamoBackend,
    GradientAccumulationPlugin,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
    set_seed,
)
from notes import fresh, plain
from training import where

OPTIONS = (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
CHOICES = (DistributedType, PrecisionType, RNGType, DynamoBackend, DDPCommunicationHookType)
FUNCTIONS = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "wait_for_everyone",
]


def scenarios():
    return {
        "facts/attributes": attributes,
        "facts/precision": precision,
        "facts/options": options,
        "facts/choices": choices,
        "facts/gradient state": gradient_state,
        "facts/methods": lambda: members(Accelerator),
        "facts/constructor": lambda: parameters(Accelerator.__init__),
        "facts/functions": lambda: {name: parameters(getattr(utils, name)) for name in FUNCTIONS},
        "facts/states": lambda: {cls.__name__: members(cls) for cls in (PartialState, AcceleratorState, GradientState)},
        "facts/optimizer": lambda: prepared("optimizer"),
        "facts/scheduler": lambda: prepared("scheduler"),
        "facts/loader": lambda: prepared("loader"),
        "facts/instance": instance,
        "facts/fp16": half,
        "facts/seeds": seeds,
    }


NAMES = [
    "num_processes",
    "process_index",
    "local_process_index",
    "is_main_process",
    "is_local_main_process",
    "is_last_process",
    "use_distributed",
    "distributed_type",
]


def attributes():
    accelerator = fresh()
    more = [
        "multi_device",
        "mixed_precision",
        "sync_gradients",
        "gradient_accumulation_steps",
        "optimizer_step_was_skipped",
        "split_batches",
        "dispatch_batches",
        "even_batches",
        "use_seedable_sampler",
        "non_blocking",
        "use_stateful_dataloader",
        "project_dir",
        "logging_dir",
        "save_iteration",
        "device_placement",
        "step_scheduler_with_optimizer",
        "rng_types",
        "scaler",
        "step",
    ]
    return {
        "accelerator": {name: getattr(accelerator, name) for name in (*NAMES, *more)},
        "state": {name: getattr(accelerator.state, name) for name in (*NAMES, "mixed_precision", "initialized")},
        "partial": {name: getattr(PartialState(), name) for name in (*NAMES, "initialized", "backend", "debug")},
        "device": [str(accelerator.device), str(accelerator.state.device), str(PartialState().device)],
        "default device": str(PartialState().default_device),
        "type is text": accelerator.distributed_type == str(accelerator.distributed_type.value),
    }


def precision():
    accelerator = fresh(mixed_precision="bf16")
    linear = torch.nn.Linear(2, 2)
    with accelerator.autocast():
        inside = linear(torch.ones(1, 2)).dtype
    return {
        "mode": accelerator.mixed_precision,
        "state": accelerator.state.mixed_precision,
        "inside": str(inside),
        "outside": str(linear(torch.ones(1, 2)).dtype),
        "second": Accelerator().mixed_precision,
    }


def options():
    return {
        cls.__name__: {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)} for cls in OPTIONS
    }


def choices():
    return {
        cls.__name__: {
            name: {"value": member.value, "repr": repr(member), "str": str(member), "equal": member == member.value}
            for name, member in cls.__members__.items()
        }
        for cls in CHOICES
    }


def gradient_state():
    accelerator = fresh(gradient_accumulation_steps=4)
    state = accelerator.gradient_state
    seen = {"before": where(state)}
    seen["more"] = [
        state.adjust_scheduler,
        state.sync_with_dataloader,
        state.initialized,
        state.is_xla_gradients_synced,
    ]
    seen["references"] = [reference is None for reference in state.dataloader_references]
    seen["shared"] = GradientState().num_steps
    accelerator.gradient_accumulation_steps = 2
    seen["steps"] = [accelerator.gradient_accumulation_steps, state.num_steps]
    accelerator.sync_gradients = False
    seen["set"] = [accelerator.sync_gradients, state.sync_gradients]
    state._set_sync_gradients(True)
    seen["set back"] = [accelerator.sync_gradients, state.sync_gradients]
    seen["plugin"] = plain(dict(state.plugin_kwargs))
    state.plugin_kwargs.update({"num_steps": 5})
    seen["written"] = accelerator.gradient_accumulation_steps
    return seen


def members(cls):
    """Public names of a class; for methods, their parameters."""
    return {
        name: parameters(member) if callable(member) else "property"
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_")
    }


def parameters(function):
    return {
        name: [parameter.kind.name, None if parameter.default is parameter.empty else repr(parameter.default)]
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


NAMES_OF_PREPARED = {
    "optimizer": [
        "optimizer",
        "state",
        "param_groups",
        "defaults",
        "add_param_group",
        "load_state_dict",
        "state_dict",
        "zero_grad",
        "step",
        "step_was_skipped",
        "train",
        "eval",
        "scaler",
    ],
    "scheduler": [
        "scheduler",
        "optimizers",
        "step",
        "get_last_lr",
        "get_lr",
        "print_lr",
        "state_dict",
        "load_state_dict",
        "base_lrs",
    ],
    "loader": [
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "collate_fn",
        "num_workers",
        "drop_last",
        "pin_memory",
        "set_epoch",
        "iteration",
        "total_batch_size",
        "total_dataset_length",
        "end_of_dataloader",
        "remainder",
    ],
}


def prepared(kind):
    accelerator = fresh()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    made = accelerator.prepare(
        {
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            "loader": torch.utils.data.DataLoader(range(4), batch_size=2),
        }[kind]
    )
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader)
    return {
        "names": {name: hasattr(made, name) for name in NAMES_OF_PREPARED[kind]},
        "is": [isinstance(made, base) for base in kinds],
        "state": None if kind == "loader" else made.state_dict(),
    }


def instance():
    """What an accelerator carries beside the members of its class."""
    accelerator = fresh()
    names = [
        "state",
        "gradient_state",
        "project_configuration",
        "dataloader_config",
        "device_placement",
        "step_scheduler_with_optimizer",
        "rng_types",
        "scaler",
        "step",
        "trackers",
        "log_with",
        "native_amp",
        "flag_tensor",
        "ddp_handler",
        "scaler_handler",
        "init_handler",
        "autocast_handler",
        "profile_handler",
        "_models",
        "_optimizers",
        "_schedulers",
        "_dataloaders",
        "_custom_objects",
    ]
    return {name: hasattr(accelerator, name) for name in names}


def half():
    accelerator = fresh(mixed_precision="fp16")
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with accelerator.autocast():
        inside = (torch.ones(1, 2) @ torch.ones(2, 2)).dtype
    return {
        "mode": accelerator.mixed_precision,
        "scaled": accelerator.scaler is not None,
        "output": str(model(torch.ones(1, 2)).dtype),
        "inside": str(inside),
    }


def seeds():
    def draw():
        return [random.random(), float(np.random.rand()), torch.rand(2).tolist()]

    seen = {}
    for seed in (0, 42, 2**31):
        set_seed(seed)
        seen[f"{seed}"] = draw()
    set_seed(42, device_specific=True)
    seen["by device"] = draw()
    return seen
