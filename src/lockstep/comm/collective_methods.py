"""What an accelerator says to the other ranks, each in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.comm import tensors
from lockstep.process_group.group import Group

if TYPE_CHECKING:
    from lockstep.comm.agree import Agreement


class CollectiveMethods:
    """Collectives as methods, the trigger, and steps that are run together."""

    _group: Group
    _trigger = False

    def gather(self, tensor: Any) -> Any:
        """Called on: all ranks. Each tensor of the structure from all ranks, joined along the first dimension."""
        return tensors.gather(self._group, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Called on: all ranks. Each tensor of the structure summed over the ranks; or their "mean", or their "max"."""
        return tensors.reduce(self._group, tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int | float = 0, pad_first: bool = False
    ) -> Any:
        """Called on: all ranks. Each tensor padded to its largest size on any rank."""
        return tensors.pad_across_processes(self._group, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Say on this rank that something has happened that all ranks should learn of."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Called on: all ranks. Whether any rank has set the trigger since the last check."""
        box, mine = self._group.box, torch.tensor(int(self._trigger), device=self._group.device)
        number = box.enter("check_trigger", None, 2)
        try:
            raised = bool(tensors.reduce(self._group, mine, "sum"))
        finally:
            box.leave(number)
        if raised:
            self._trigger = False
        return raised

    def agree(self, step: Callable[[], Any]) -> Agreement[Any]:
        """Called on: all ranks. Run a step on every rank; when it fails on any, all leave it and learn who failed."""
        from lockstep.comm.agree import agree  # loaded where it is used, as few scripts do

        return agree(self._group, step)

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger
