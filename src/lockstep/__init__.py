"""Lockstep: PyTorch training on one device or many, that says at once when the processes stop marching together.

Names are loaded when they are first used, so that ``import lockstep`` and the command line start without torch.
"""

from __future__ import annotations

import gc
import importlib

TYPE_CHECKING = False  # as typing has it, which takes as long to load as all the rest here
if TYPE_CHECKING:
    from typing import Any

    from lockstep.accelerator import Accelerator
    from lockstep.comm.rng import set_seed, synchronize_rng_states
    from lockstep.config.choices import DDPCommunicationHookType, DistributedType
    from lockstep.config.handlers import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from lockstep.data.prepare import skip_first_batches
    from lockstep.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DistributedOperationException,
        LockstepError,
        NotYetError,
        NumericsError,
        OutOfMemory,
        PeerFailure,
        RankFailed,
        TopologyError,
        UsageError,
    )
    from lockstep.host.packages import is_rich_available
    from lockstep.launch.notebook import debug_launcher, notebook_launcher
    from lockstep.memory.batch_size import find_executable_batch_size
    from lockstep.model_files.load import load_checkpoint_in_model
    from lockstep.offload.auto_device_map import infer_auto_device_map
    from lockstep.offload.cpu_offload_hook import cpu_offload_with_hook
    from lockstep.offload.dispatch import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
    from lockstep.offload.empty_weights import init_empty_weights, init_on_device
    from lockstep.progress import tqdm
    from lockstep.state import AcceleratorState, GradientState, PartialState
    from lockstep.training.local_sgd import LocalSGD

__version__ = "0.1.0.dev0"

_PLACES = {
    "lockstep.accelerator": ("Accelerator",),
    "lockstep.model_files.load": ("load_checkpoint_in_model",),
    "lockstep.comm.rng": ("set_seed", "synchronize_rng_states"),
    "lockstep.config.choices": ("DDPCommunicationHookType", "DistributedType"),
    "lockstep.config.handlers": (
        "AutocastKwargs",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
        "ProjectConfiguration",
        "TorchDynamoPlugin",
    ),
    "lockstep.data.prepare": ("skip_first_batches",),
    "lockstep.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DistributedOperationException",
        "LockstepError",
        "NotYetError",
        "NumericsError",
        "OutOfMemory",
        "PeerFailure",
        "RankFailed",
        "TopologyError",
        "UsageError",
    ),
    "lockstep.host.packages": ("is_rich_available",),
    "lockstep.launch.notebook": ("debug_launcher", "notebook_launcher"),
    "lockstep.memory.batch_size": ("find_executable_batch_size",),
    "lockstep.offload.auto_device_map": ("infer_auto_device_map",),
    "lockstep.offload.cpu_offload_hook": ("cpu_offload_with_hook",),
    "lockstep.offload.dispatch": ("cpu_offload", "disk_offload", "dispatch_model", "load_checkpoint_and_dispatch"),
    "lockstep.offload.empty_weights": ("init_empty_weights", "init_on_device"),
    "lockstep.progress": ("tqdm",),
    "lockstep.training.local_sgd": ("LocalSGD",),
    "lockstep.state": ("AcceleratorState", "GradientState", "PartialState"),
}
_HOME = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "CheckpointError",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataError",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "LockstepError",
    "NotYetError",
    "NumericsError",
    "OutOfMemory",
    "PartialState",
    "PeerFailure",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RankFailed",
    "TopologyError",
    "TorchDynamoPlugin",
    "UsageError",
    "__version__",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "tqdm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    # What is made while modules load would set off a collection of all that torch has loaded: 60 ms, for nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
