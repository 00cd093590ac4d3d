"""The import place scripts know. Nothing lives here; each name comes from the package it belongs to."""

from lockstep.comm.functional import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)
from lockstep.comm.nested_tensors import CannotPadNestedTensorWarning
from lockstep.comm.rng import set_seed, synchronize_rng_state, synchronize_rng_states
from lockstep.comm.trees import concatenate, find_batch_size, recursively_apply, send_to_device, slice_tensors
from lockstep.config.choices import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
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
from lockstep.config.sizes import convert_file_size_to_int
from lockstep.errors import DistributedOperationException
from lockstep.estimate.activations import estimate_memory
from lockstep.launch.basic_config import write_basic_config
from lockstep.memory.batch_size import find_executable_batch_size
from lockstep.memory.cache import clear_device_cache, release_memory
from lockstep.model_files.device_map import check_device_map
from lockstep.model_files.load import load_checkpoint_in_model
from lockstep.model_files.save import save
from lockstep.model_files.shared_tensors import clean_state_dict_for_safetensors, id_tensor_storage
from lockstep.offload.align_devices import align_module_device, has_offloaded_params
from lockstep.offload.auto_device_map import infer_auto_device_map
from lockstep.offload.balanced_memory import get_balanced_memory
from lockstep.offload.module_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    get_max_layer_size,
    named_module_tensors,
)
from lockstep.offload.offloaded_state import load_offloaded_weights
from lockstep.offload.offloaded_weights import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from lockstep.offload.set_tensor import set_module_tensor_to_device
from lockstep.offload.tied_parameters import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from lockstep.precision.mixed import convert_outputs_to_fp32, convert_to_fp32
from lockstep.progress import tqdm
from lockstep.topology.memory import get_max_memory
from lockstep.training.unwrap import extract_model_from_parallel

__all__ = [
    "AutocastKwargs",
    "CannotPadNestedTensorWarning",
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
    "LoggerType",
    "OffloadedWeightsLoader",
    "PrecisionType",
    "PrefixedDataset",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
    "align_module_device",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_state_dict_for_safetensors",
    "clear_device_cache",
    "compute_module_sizes",
    "concatenate",
    "convert_file_size_to_int",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "dtype_byte_size",
    "estimate_memory",
    "extract_model_from_parallel",
    "extract_submodules_state_dict",
    "find_batch_size",
    "find_executable_batch_size",
    "find_tied_parameters",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "release_memory",
    "retie_parameters",
    "save",
    "save_offload_index",
    "send_to_device",
    "set_module_tensor_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]
