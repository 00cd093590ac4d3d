"""The import place scripts know. Nothing lives here; each name comes from the room it belongs to."""

from lockstep.comm.free import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)
from lockstep.comm.rng import set_seed, synchronize_rng_state, synchronize_rng_states
from lockstep.comm.trees import concatenate, find_batch_size, recursively_apply, send_to_device, slice_tensors
from lockstep.config.choices import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    PrecisionType,
    RNGType,
)
from lockstep.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.errors import DistributedOperationException
from lockstep.launch.basic_config import write_basic_config
from lockstep.memory.activations import estimate_memory
from lockstep.memory.batch_size import find_executable_batch_size
from lockstep.memory.freeing import clear_device_cache, get_max_memory, release_memory
from lockstep.precision.mixed import convert_outputs_to_fp32, convert_to_fp32
from lockstep.progress import tqdm

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "estimate_memory",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_max_memory",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]
