"""This process's place in the job, and what follows from it, as users ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lockstep import current
from lockstep.comm import control
from lockstep.comm.barrier import barrier
from lockstep.config.choices import DistributedType
from lockstep.errors import ConfigError


class ProcessView:
    """The questions and orders that ``Accelerator`` and ``PartialState`` have in common."""

    _session: current.Session

    @classmethod
    def _of_session(cls, session: current.Session, number: int | None) -> Any:
        """The view of this process that was pickled; None when there is none such."""
        view = cls.__new__(cls)
        view._session = session
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        from lockstep.comm import pickling  # loaded where it is used, as few scripts do

        return pickling.taken_apart(self, precision=self._session.mixed_precision)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._session.topology.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of job."""
        return self._session.topology.distributed_type

    @property
    def num_processes(self) -> int:
        """Processes in the job."""
        return self._session.topology.world_size

    @property
    def process_index(self) -> int:
        """Number of this process in the job."""
        return self._session.topology.rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine."""
        return self._session.topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the job's first process."""
        return self._session.topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's first process."""
        return self._session.topology.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the job's last process."""
        return self._session.topology.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._session.topology.world_size > 1

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A function that only the job's first process runs."""
        return _decorate(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A function that only each machine's first process runs."""
        return _decorate(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A function that only the job's last process runs."""
        return _decorate(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A function that only the process of this number runs."""
        return _chosen("process_index", process_index, self.process_index, self.num_processes, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """A function that only the process of this number on each machine runs."""
        local = self._session.topology.local_world_size
        return _chosen("local_process_index", local_process_index, self.local_process_index, local, function)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Called on: all ranks. The job's first process runs the block before the others."""
        return control.first(self._session.group, self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Called on: all ranks. Each machine's first process runs the block before the others."""
        return control.first(self._session.group, self.is_local_main_process)

    def wait_for_everyone(self) -> None:
        """Called on: all ranks. Wait until every rank is here."""
        barrier(self._session.group)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        control.print_here(self._session.topology, *args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, tuple, tensor or mapping of these."""
        yield control.share(inputs, self._session.topology, apply_padding)


def _decorate(chosen: bool, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """As a decorator with and without brackets."""
    if function is None:
        return lambda later: control.only_on(chosen, later)
    return control.only_on(chosen, function)


def _chosen(
    name: str, wanted: int | None, here: int, count: int, function: Callable[..., Any] | None
) -> Callable[..., Any]:
    if wanted is None or not 0 <= wanted < count:
        raise ConfigError(f"{name}={wanted} is not a process here. Allowed: 0 to {count - 1}.")
    return _decorate(here == wanted, function)
