"""The import place that people know for models and small things. Nothing lives here."""

from lockstep.config.objects import (
    get_pretty_name,
    merge_dicts,
    recursive_getattr,
)
from lockstep.config.sizes import (
    convert_bytes,
)
from lockstep.host.network import (
    is_port_in_use,
)
from lockstep.model_files.save import (
    save,
)
from lockstep.training.model_kinds import (
    get_module_children_bottom_up,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
)
from lockstep.training.unwrap import (
    extract_model_from_parallel,
)

__all__ = [
    "convert_bytes",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
]
