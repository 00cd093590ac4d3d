"""The data options in force, as users ask an accelerator for them."""

from __future__ import annotations

from lockstep.config.handlers import DataLoaderConfiguration


class DataOptions:
    """One property for each option of the ``DataLoaderConfiguration``."""

    dataloader_config: DataLoaderConfiguration

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is cut between ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that all ranks get equally many batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = bool(value)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the shuffled order is a function of seed and epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's loader is used."""
        return self.dataloader_config.use_stateful_dataloader
