"""A training by hand: no accelerator, no session, no process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.choices import PrecisionType
from lockstep.config.handlers import AutocastKwargs, GradientAccumulationPlugin
from lockstep.data.current_batch import CurrentBatch
from lockstep.optim.accumulation import Accumulation
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.precision.mixed import Precision
from lockstep.process_group.group import Group
from lockstep.strategies.single import Single
from lockstep.topology.topology import Topology
from lockstep.training import step
from lockstep.training.state import TrainingState

CPU = torch.device("cpu")


def make_state(*models: nn.Module, steps: int = 1, **fields: Any) -> TrainingState:
    """What one process trains these models with, each by SGD."""
    topology, batch = Topology(device=CPU), CurrentBatch()
    group = Group(topology)
    state = TrainingState(
        topology=topology,
        group=group,
        strategy=Single(topology, group),
        precision=Precision(PrecisionType.NO, CPU, AutocastKwargs()),
        accumulation=Accumulation(GradientAccumulationPlugin(num_steps=steps), batch),
        current_batch=batch,
        **fields,
    )
    for model in models:
        state.models.append(model)
        state.optimizers.append(
            PreparedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                state.accumulation,
                None,
                gate=state.monitor,
                stepped=state.stepped,
            )
        )
    return state


def train(state: TrainingState, batch: Tensor) -> Tensor:
    """One update on this batch; its loss."""
    loss: Tensor = state.models[0](batch).pow(2).mean()
    step.backward(state, loss, None)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()
