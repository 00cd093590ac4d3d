"""Which strategy, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.config.handlers import DistributedDataParallelKwargs
from lockstep.process_group.group import Group
from lockstep.strategies.single import Single
from lockstep.topology.topology import Topology

if TYPE_CHECKING:
    from lockstep.optim.accumulation import Accumulation
    from lockstep.strategies.ddp.uneven_inputs import RemembersUpdates


class Strategy(Protocol):
    """What differs between the ways to train a model on several processes."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Called on: all ranks. The model, ready to be trained."""

    def fits(self, model: nn.Module) -> bool:
        """Whether a prepared model is still trained as it was when it was prepared."""

    def replaced(self, model: nn.Module) -> None:
        """Note that the model inside this wrapper was prepared again."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """A region in which backward leaves the gradients on this rank; None where there is nothing to hold back."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's model."""

    def forced_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A region whose backward averages gradients even if its forwards ran without."""

    def join(
        self, joinables: Any, accumulation: Accumulation, states: Sequence[RemembersUpdates]
    ) -> AbstractContextManager[None]:
        """Called on: all ranks. A region in which a rank may have fewer batches than others.

        ``states`` is what a rank that runs out early takes over from the others at the end.
        """

    def enter_backward(self, loss: Any, batch: int) -> int | None:
        """Note that a backward begins, if it reduces gradients; what to leave it by. ``batch``: the loader's place.

        Negative where it does not; None where it has nothing to do with the models that are trained.
        """

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has made a step."""

    def checksums(self) -> tuple[list[str], bytes]:
        """Names and checksums of the parameters that must be the same on all ranks; nothing where none must be."""

    def restart(self) -> None:
        """Called on: all ranks. Count steps anew: all ranks have been given the same weights."""

    def start_parts(self, models: Sequence[nn.Module]) -> None:
        """Called on: all ranks. Before backwards that do not average: what a forward would do with other ranks."""

    def average(self, models: Sequence[nn.Module]) -> None:
        """Called on: all ranks. Average the gradients that such backwards have left."""

    def note_forwards(self, model: nn.Module, note: Callable[..., None]) -> RemovableHandle | None:
        """Have ``note`` called with the user's model and its inputs before each forward that is trained on.

        None where a hook on the user's model does.
        """

    def enable_recovery(self) -> None:
        """From now on a failure is to be survived: have each backward wait in a way that can be left."""

    def reattach(self, model: nn.Module) -> None:
        """Point the model at the group's new generation."""

    def detach(self, model: nn.Module) -> None:
        """Have a model that is trained no more let go of the group's old generation."""


@dataclass(frozen=True, eq=False)
class ChosenStrategy:
    """A strategy and the reason for it."""

    strategy: Strategy
    """What to train with."""
    reason: str
    """Why, in words."""


def choose(topology: Topology, group: Group, ddp: DistributedDataParallelKwargs) -> ChosenStrategy:
    """The strategy for this job."""
    if topology.world_size == 1:
        return ChosenStrategy(Single(), "one process, so the model is used as it is")
    from lockstep.strategies.ddp.strategy import DDP  # loaded where it is used: one process does without

    return ChosenStrategy(
        DDP(topology, group, ddp), f"{topology.world_size} processes, so DDP averages gradients over {topology.backend}"
    )
