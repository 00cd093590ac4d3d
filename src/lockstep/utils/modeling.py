"""The import place that people know for models and their files. Nothing lives here."""

from lockstep.config.sizes import convert_file_size_to_int
from lockstep.model_files.device_map import check_device_map
from lockstep.model_files.load import load_checkpoint_in_model
from lockstep.model_files.shared_tensors import id_tensor_storage
from lockstep.offload.align_devices import align_module_device, has_offloaded_params
from lockstep.offload.auto_device_map import clean_device_map, infer_auto_device_map
from lockstep.offload.balanced_memory import get_balanced_memory
from lockstep.offload.module_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    get_non_persistent_buffers,
    named_module_tensors,
)
from lockstep.offload.offloaded_state import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    load_offloaded_weights,
)
from lockstep.offload.set_tensor import set_module_tensor_to_device
from lockstep.offload.tied_parameters import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from lockstep.topology.memory import get_max_memory
from lockstep.training.model_kinds import is_peft_model

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]
