"""What differs between the ways to train a model on several processes: the one seam between them and all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.tensors import gather_ragged
from lockstep.config.settings import Settings
from lockstep.process_group.group import Group
from lockstep.strategies.rebinding import Rebinding
from lockstep.topology.data_parallel import DataParallelRanks
from lockstep.topology.topology import Topology

if TYPE_CHECKING:
    from lockstep.optim.accumulation import Accumulation


class RemembersUpdates(Protocol):
    """What remembers past updates: an optimizer, a scheduler, a loss scale."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember this instead."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that one rank has."""

    start: int
    stop: int
    total: int
    """Rows of the whole tensor."""

    def take(self, whole: Tensor) -> Tensor:
        """These rows, in memory of their own."""
        return whole.detach()[self.start : self.stop].clone()


class Strategy:
    """A way to train; what is written here does for one process, which shares nothing with anybody."""

    sees_all_gradients = True
    """Whether a gradient that is not finite is so on every rank when an optimizer steps; see ``any_rank``."""

    def __init__(self, topology: Topology, group: Group, settings: Settings | None = None) -> None:
        self._topology = topology
        self._group = group
        self._rebinding = Rebinding()

    @classmethod
    def reason(cls, topology: Topology) -> str:
        """What it does and why it is chosen for such a job, in a line."""
        raise NotImplementedError

    @cached_property
    def data_parallel(self) -> DataParallelRanks:
        """Which part of each global batch this rank works on: one of its own, unless ranks share one."""
        return DataParallelRanks(self._topology.rank, range(self._topology.world_size))

    # --- models and optimizers ---------------------------------------------------------------------------------

    def wrap(self, model: nn.Module) -> nn.Module:
        """Called on: all ranks. The model, ready to be trained.

        Parameters may be replaced by others of the same names; optimizers follow (``rebind``).
        """
        return model

    def fits(self, model: nn.Module) -> bool:
        """Whether a prepared model is still trained as it was when it was prepared."""
        return True

    def replaced(self, model: nn.Module) -> None:
        """Note that the model inside this wrapper was prepared again."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's model."""
        return model

    def rebind(self, before: Mapping[str, Tensor], model: nn.Module, optimizers: Iterable[Any]) -> None:
        """Have optimizers hold what has taken the place of a model's parameters, and those that come later as well.

        ``before`` is what ``named_parameters`` gave before the model was prepared.
        """
        after = dict(self.unwrap(model).named_parameters(remove_duplicate=False))
        self._rebinding.add(before, after)
        for optimizer in optimizers:
            self.rebind_optimizer(optimizer)

    def rebind_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The same for one optimizer, whatever was prepared before it."""
        self._rebinding.rebind(optimizer, self.rows_of)

    def check_optimizer(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Before its first step: raise for an optimizer that has none of the parameters that are trained."""
        self._rebinding.check(optimizer, models)

    # --- forward and backward ----------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """A region in which backward leaves the gradients on this rank; None where there is nothing to hold back."""
        return None

    def forced_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A region whose backward averages gradients even if its forwards ran without."""
        return nullcontext()

    def join(
        self, joinables: Any, accumulation: Accumulation, states: Sequence[RemembersUpdates]
    ) -> AbstractContextManager[None]:
        """Called on: all ranks. A region in which a rank may have fewer batches than others.

        ``states`` is what a rank that runs out early takes over from the others at the end.
        """
        return nullcontext()

    def enter_backward(self, loss: Any, batch: int) -> int | None:
        """Note that a backward begins, if it reduces gradients: the number to leave the black box by.

        The guard knows it by the name under which it is entered there. ``batch``: the loader's place. Negative where it
        reduces nothing; None where it has nothing to do with the models that are trained.
        """
        return -1

    @contextmanager
    def silenced(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """A region whose backward adds zeros: a mean over nothing is 0 / 0, and its gradient would be no number."""
        hooks = [parameter.register_hook(torch.zeros_like) for parameter in parameters if parameter.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def start_parts(self, models: Sequence[nn.Module]) -> None:
        """Called on: all ranks. Before backwards that do not average: what a forward would do with other ranks."""

    def average(self, models: Sequence[nn.Module]) -> None:
        """Called on: all ranks. Average the gradients that such backwards have left."""

    def note_forwards(self, model: nn.Module, note: Callable[..., None]) -> RemovableHandle | None:
        """Have ``note`` called with the user's model and its inputs before each forward that is trained on.

        None where a hook on the user's model does.
        """
        return None

    # --- gradients and updates ---------------------------------------------------------------------------------

    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Called on: all ranks where parameters are spread over them. The norm of all their gradients together."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type=norm_type)

    def any_rank(self, finding: bool) -> bool:
        """Called on: all ranks, before an update. Whether any of them has found something in its gradients."""
        return finding

    def drop_held(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop gradients of its parameters that were held back (``no_sync``), where they are not in ``grad``."""

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has made a step."""

    # --- what a checkpoint holds -------------------------------------------------------------------------------

    def rows_of(self, parameter: Tensor) -> Rows | None:
        """The rows that this rank has of a parameter that is spread over the ranks; None for one that it has whole.

        From this alone checkpoints are written whole, and read by rows, on any number of processes.
        """
        return None

    def gather_rows(self, own: Tensor, rows: Rows) -> Tensor:
        """Called on: all ranks. A whole tensor from the rows of each, which follow each other."""
        if self._topology.world_size == 1:
            return own
        return torch.cat(gather_ragged(self._group, [own], [own])[0])

    def window_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """This rank's gradients of an accumulation window that is open, each whole: what is to be averaged."""
        return [None if parameter.grad is None else parameter.grad.detach() for parameter in parameters]

    def restore_window(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Go on with such gradients, or without any."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    # --- the ranks as a whole ----------------------------------------------------------------------------------

    def checksums(self) -> tuple[list[str], bytes]:
        """Names and checksums of the parameters that must be the same on all ranks; nothing where none must be."""
        return [], b""

    def restart(self) -> None:
        """Called on: all ranks. Count steps anew: all ranks have been given the same weights."""

    def enable_recovery(self) -> None:
        """From now on a failure is to be survived: have each backward wait in a way that can be left."""

    def reattach(self, model: nn.Module) -> None:
        """After a failure, once the group is rebuilt: point the model at it, and drop what the failure has left."""

    def detach(self, model: nn.Module) -> None:
        """Have a model that is trained no more let go of the group's old generation."""
