"""Tensors that are spread over the ranks by rows: whole in files, so that any number of processes can load them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.model_files.tensor_entry import is_stored
from lockstep.offload.offloaded_state import whole_state_dict
from lockstep.strategies.base import Rows, Strategy


def whole_model(strategy: Strategy, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
    """Called on: all ranks, where parameters are spread over them. A model's state dict, of whole tensors.

    Where they are not to be kept, what is spread is left out.
    """
    state = whole_state_dict(model)
    whole: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rows = strategy.rows_of(parameter)
        if rows is None or name not in state:
            continue
        if id(parameter) not in whole:  # what is tied stays tied
            whole[id(parameter)] = strategy.gather_rows(state[name], rows)
        state[name] = whole[id(parameter)]
        if not keep:
            whole[id(parameter)] = state.pop(name).new_empty(0)
    return state


def whole_optimizer(strategy: Strategy, optimizer: Any, *, keep: bool = True) -> dict[str, Any]:
    """Called on: all ranks, where parameters are spread over them. The same for an optimizer."""
    state = optimizer.state_dict()
    spread = _spread(optimizer, state, strategy)
    if not spread:
        return dict(state)
    values = dict(state["state"])
    for number, (parameter, rows) in spread.items():
        gathered = {
            name: strategy.gather_rows(value, rows)
            if isinstance(value, Tensor) and value.shape == parameter.shape
            else value
            for name, value in values.get(number, {}).items()
        }
        if number in values:
            values[number] = gathered if keep else {}
    return {**state, "state": values}


def rows_of_model(strategy: Strategy, model: nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Stored weights as they go into this rank's model: of those that are spread, the rows that it has."""
    found = dict(entries)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rows, entry = strategy.rows_of(parameter), found.get(name)
        if (
            rows is not None
            and entry is not None
            and is_stored(entry)
            and tuple(entry.shape) == whole_shape(strategy, parameter)
        ):
            found[name] = StoredRows(entry, rows)
    return found


def rows_of_optimizer(strategy: Strategy, optimizer: Any, saved: Any) -> Any:
    """A saved optimizer's state as it goes into this rank's; what is no such state is left for others to refuse."""
    try:
        spread = _spread(optimizer, saved, strategy)
        values = {number: dict(saved["state"][number]) for number in spread if number in saved["state"]}
    except (AttributeError, KeyError, TypeError, ValueError):
        return saved
    for number, kept in values.items():
        parameter, rows = spread[number]
        for name, value in kept.items():
            if isinstance(value, Tensor) and tuple(value.shape) == whole_shape(strategy, parameter):
                kept[name] = rows.take(value)
    return {**saved, "state": {**saved["state"], **values}} if values else saved


def _spread(optimizer: Any, state: Mapping[str, Any], strategy: Strategy) -> dict[Any, tuple[Tensor, Rows]]:
    """The parameters that are spread, by their numbers in a state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(strategy.rows_of(parameter) is None for parameter in parameters):
        return {}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    triples = ((number, item, strategy.rows_of(item)) for number, item in zip(numbers, parameters, strict=True))
    return {number: (item, rows) for number, item, rows in triples if rows is not None}


def whole_shape(strategy: Strategy, parameter: Tensor) -> tuple[int, ...]:
    """The shape of a parameter, of which this rank may have some rows only."""
    rows = strategy.rows_of(parameter)
    return tuple(parameter.shape) if rows is None else (rows.total, *parameter.shape[1:])


def refuse_alone(strategy: Strategy, parameters: Iterable[Tensor], absent: Mapping[int, str]) -> None:
    """Raise where a save needs rows that other ranks have, and these do not come."""
    if any(strategy.rows_of(parameter) is not None for parameter in parameters):
        where = "; ".join(f"rank {rank} {doing}" for rank, doing in absent.items())
        raise CheckpointError(
            f"save_state() needs all ranks, because each has a part of the parameters ({where}). Call it on all."
        )


class StoredRows:
    """Rows of a stored tensor."""

    def __init__(self, entry: Any, rows: Rows) -> None:
        self._entry, self._rows = entry, rows
        self.shape = (rows.stop - rows.start, *entry.shape[1:])
        self.dtype = entry.dtype
        self.file = getattr(entry, "file", None)

    def read(self) -> Tensor:
        """These rows."""
        rows: Tensor = self._entry.read()[self._rows.start : self._rows.stop]
        return rows

    def read_into(self, target: Tensor) -> None:
        """Overwrite the target with them."""
        target.copy_(self.read())
