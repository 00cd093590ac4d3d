"""The import place scripts know for collectives. Nothing lives here."""

from lockstep.comm.functional import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from lockstep.comm.nested_tensors import CannotPadNestedTensorWarning
from lockstep.comm.tree_helpers import (
    find_device,
    honor_type,
    ignorant_find_batch_size,
    is_namedtuple,
    is_torch_tensor,
    listify,
)
from lockstep.comm.trees import concatenate, find_batch_size, recursively_apply, send_to_device, slice_tensors
from lockstep.errors import DistributedOperationException
from lockstep.precision.mixed import convert_outputs_to_fp32, convert_to_fp32

__all__ = [
    "CannotPadNestedTensorWarning",
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "honor_type",
    "ignorant_find_batch_size",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
