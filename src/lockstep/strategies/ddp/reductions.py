"""Which backwards reduce gradients, and which optimizer steps follow them: what all ranks must have in common.

Ranks whose numbers of reductions differ wait for each other in vain. Ranks whose numbers of steps differ have different
weights. Nothing else has to agree: how far a loader is, or what a rank computes beside the training, is its own affair.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from lockstep.blackbox.layout import OPTIMIZER_STEPS
from lockstep.comm.replicas import checksums
from lockstep.logging import get_notices
from lockstep.process_group.group import Group
from lockstep.strategies.ddp.module import DistributedDataParallel as Replica
from lockstep.strategies.ddp.module import Reduction
from lockstep.strategies.ddp.replica_check import ReplicaCheck
from lockstep.strategies.ddp.trained_parameters import TrainedParameters


class Reductions:
    """Those of one accelerator's models."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._replicas: WeakValueDictionary[int, Replica] = WeakValueDictionary()
        self._numbers = count()
        self._owners: dict[int, list[weakref.ref[Replica]]] = {}
        """id of a parameter -> its models: one that was prepared again may still be used in its old wrapper."""
        self._others: WeakKeyDictionary[nn.Module, TrainedParameters] = WeakKeyDictionary()
        """Prepared models that are not replicas of ours: without a parameter to train, or in a DDP of the script's."""
        self._suspects: WeakSet[Replica] = WeakSet()
        """Models with parameters that were changed, and whose gradients are looked at when an optimizer steps."""
        self.uneven = False
        """Whether ranks may make different numbers of steps at present."""
        self._owned: WeakKeyDictionary[Any, tuple[int, list[Reduction]]] = WeakKeyDictionary()
        self._used: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Optimizer -> reductions before its latest step."""
        self._steps = 0
        self._count = 0
        self._check = ReplicaCheck(group)

    def new(self) -> Reduction:
        """The state of a model that is going to be added."""
        return Reduction(lambda: self._group.box)

    def add(self, replica: Replica) -> None:
        """Know a model by its parameters, and not in wrappers that it had before."""
        for earlier in self._replicas.values():
            earlier.reduction.replaced |= earlier.module is replica.module
        self._replicas[next(self._numbers)] = replica
        self._others.pop(replica.module, None)
        self._owned.clear()
        owner = weakref.ref(replica)
        living = {key: [other for other in others if other() is not None] for key, others in self._owners.items()}
        self._owners = {key: others for key, others in living.items() if others}
        for parameter in replica.parameters():
            self._owners.setdefault(id(parameter), []).insert(0, owner)

    def add_other(self, model: nn.Module) -> None:
        """Know a model that has nothing to average, or that the script has wrapped itself."""
        if isinstance(model, DistributedDataParallel):
            ignored = [f"module.{name}" for name in model.parameters_to_ignore]
            self._others[model] = TrainedParameters(model, ignored, waits=not model.find_unused_parameters)
        else:
            self._others[model] = TrainedParameters(model, waits=False)

    def fits(self, model: nn.Module) -> bool:
        """Whether a prepared model is still trained as it was when it was prepared."""
        if isinstance(model, Replica):
            return model.trained.fits(model.module)
        trained = self._others.get(model)
        return trained is not None and trained.fits(model)

    def replaced(self, model: nn.Module) -> None:
        """The model inside was prepared again; whoever holds the old wrapper can still use it."""
        if isinstance(model, Replica):
            model.reduction.replaced = True
        else:
            self._others.pop(model, None)

    def enter(self, loss: Any, batch: int) -> int | None:
        """A backward begins. If it reduces gradients, it is a collective: its number, for ``Box.leave``.

        Else it is -1 where gradients are held back on this rank, and None where no model of the training is involved.

        Known before any gradient is: a loss reduces when its graph reaches a parameter of a model whose forward has
        prepared it.
        """
        expected = [model for model in self._replicas.values() if model.reduction.expected]
        for model in [model for model in expected if model.trained.may_differ]:
            _report(model.trained.describe(model.module, loss, self._is_expected))
            if model.trained.may_differ:  # else what was registered belongs to another model
                self._suspects.add(model)
        for other, trained in list(self._others.items()) if self._others else ():
            if trained.may_differ and getattr(other, "require_backward_grad_sync", True):
                _report(trained.describe(other, loss, self._is_expected))
        reached = self._reached(loss) if expected else None
        if reached is None:
            holds_back = any(model.reduction.held_back for model in self._replicas.values())
            return -1 if holds_back or not self._replicas else None
        reached.expected = False
        reached.count += 1
        self._count += 1
        if not reached.owned and not self.uneven and self._check.is_due(self._count, unowned=True):
            self._check.check(self._count, self._equal(), unowned=True)
        box = self._group.box
        box.answered()
        return box.enter("backward", OPTIMIZER_STEPS, 4, self._steps, batch)

    def reduced(self, replicas: Iterable[Any]) -> None:
        """The gradients of these models were reduced outside of a backward."""
        for replica in replicas:
            if isinstance(replica, Replica):
                replica.reduction.count += 1

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step; only its first one after a reduction counts."""
        owned = self._of(optimizer)
        if not owned:
            return
        # A loss.backward() of the script's own reduces as well, and is not seen.
        unseen = [reduction for reduction in owned if reduction.expected]
        if unseen:
            for model in self._replicas.values():
                if model.reduction in unseen and model.trained.may_differ:
                    self._suspects.add(model)
        for reduction in unseen:
            reduction.expected = False
            reduction.count += 1
        if self._suspects:
            self._report_suspects()
        used = sum(reduction.count for reduction in owned)
        if used != self._used.get(optimizer, 0):
            self._used[optimizer] = used
            self._steps += 1
            self._group.box.stepped(3)
            if not self.uneven and self._check.is_due(self._steps):
                self._check.check(self._steps, self._equal())
        else:
            for reduction in owned:
                reduction.local = True

    def _report_suspects(self) -> None:
        """Report gradients that were not averaged and that no graph showed, as with activation checkpointing."""
        for model in self._suspects:
            _report(model.trained.describe_local(model.module, self._has_own_gradient))
        self._suspects.clear()

    def _has_own_gradient(self, parameter: Tensor) -> bool:
        return parameter.grad is not None and not self._averages(parameter)

    def _is_expected(self, parameter: Tensor) -> bool:
        """Whether a model whose forward has run averages this parameter's gradient in the backward to come."""
        models = self._models_of(parameter)
        return any(model.reduction.expected and model.trained.averages(parameter) for model in models)

    def _averages(self, parameter: Tensor) -> bool:
        return any(model.trained.averages(parameter) for model in self._models_of(parameter))

    def restart(self) -> None:
        """All ranks have been given the same weights, and no backward of a forward before this will come."""
        self._steps = self._count = 0
        self._check.restart()
        self.uneven = False
        for replica in self._replicas.values():
            state = replica.reduction
            state.expected = state.local = state.held_back = False
        self._group.box.answered()

    def checksums(self) -> bytes:
        """Those of the parameters that must be the same on all ranks; empty where none must be."""
        parameters = self._equal()
        return checksums(self._steps, (parameter for _, parameter in parameters)).pack() if parameters else b""

    def names(self) -> list[str]:
        """Of these parameters."""
        return [name for name, _ in self._equal()]

    def _equal(self) -> list[tuple[str, Tensor]]:
        """Parameters that every rank updates alike: what torch reduces, unless steps were made without."""
        models = [
            replica
            for replica in self._replicas.values()
            if replica.reduction.is_replica and not replica.reduction.replaced
        ]
        return [
            (f"{place}.{name}" if len(models) > 1 else name, parameter)
            for place, model in enumerate(models)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]

    def _of(self, optimizer: Any) -> list[Reduction]:
        """The models whose parameters it updates."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._owned.get(optimizer)
        if known is not None and known[0] == size:
            return known[1]
        found = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for replica in self._models_of(parameter):
                    found[id(replica)] = replica.reduction
                    replica.reduction.owned = True
        self._owned[optimizer] = size, list(found.values())
        return list(found.values())

    def _models_of(self, parameter: Tensor) -> list[Replica]:
        found = (owner() for owner in self._owners.get(id(parameter), ()))
        return [replica for replica in found if replica is not None]

    def _reached(self, loss: Any) -> Reduction | None:
        """A model whose gradients the backward of this loss reduces. Breadth first: a parameter is never far."""
        first = loss.grad_fn if isinstance(loss, Tensor) else None
        if first is None:
            return None
        nodes, seen, opaque = deque([first]), {first}, False
        while nodes:
            node = nodes.popleft()
            if type(node).__name__ == "AccumulateGrad":
                for replica in self._models_of(node.variable):  # type: ignore[attr-defined]
                    if replica.reduction.expected:
                        return replica.reduction
                continue
            opaque = opaque or isinstance(node, BackwardCFunction)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)
        if not opaque:
            return None
        # A function of the user's, or activation checkpointing, may run a part of the model in its own backward.
        return next((model.reduction for model in self._replicas.values() if model.reduction.expected), None)


def _report(text: str | None) -> None:
    if text is not None:
        get_notices("lockstep.prepare").warning(text)
