"""The import place that people know for memory. Nothing lives here."""

from lockstep.memory.batch_size import find_executable_batch_size
from lockstep.memory.cache import clear_device_cache, release_memory
from lockstep.memory.oom_detect import is_out_of_memory as should_reduce_batch_size

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]
