"""The import place that people know for models and their files. Nothing lives here."""

from lockstep.config.sizes import convert_file_size_to_int
from lockstep.memory.cache import get_max_memory
from lockstep.model_files.load import load_checkpoint_in_model
from lockstep.model_files.shared_tensors import id_tensor_storage

__all__ = ["convert_file_size_to_int", "get_max_memory", "id_tensor_storage", "load_checkpoint_in_model"]
