"""The import place that people know for models larger than a device's memory. Nothing lives here."""

from lockstep.model_files.load import load_checkpoint_in_model
from lockstep.offload.auto_device_map import infer_auto_device_map
from lockstep.offload.cpu_offload_hook import cpu_offload_with_hook
from lockstep.offload.dispatch import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from lockstep.offload.empty_weights import init_empty_weights, init_on_device
from lockstep.offload.layerwise_casting import attach_layerwise_casting_hooks

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
