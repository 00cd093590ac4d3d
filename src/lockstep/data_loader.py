"""The import place that people know for prepared loaders; one class serves for all of them. Nothing lives here."""

from lockstep.data.loader import PreparedDataLoader as DataLoaderDispatcher
from lockstep.data.loader import PreparedDataLoader as DataLoaderShard
from lockstep.data.prepare import skip_first_batches
from lockstep.data.sampler import SeedableRandomSampler

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "SeedableRandomSampler", "skip_first_batches"]
