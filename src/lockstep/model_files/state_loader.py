"""From stored tensors into a model: everything is checked before the first weight changes.

Weights are overwritten in place, so that whoever holds them (an optimizer, DDP) sees the new values, and what is tied
stays tied. Only weights that have no memory yet, or that are to change their dtype or device, get new memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.comm.raw_bytes import as_bytes
from lockstep.errors import CheckpointError
from lockstep.logging import get_logger
from lockstep.model_files.shared_tensors import overlaps_itself, stored_bytes, view_key
from lockstep.model_files.tensor_entry import Entries, as_entries, is_stored, read_all, some
from lockstep.torch_internals.module import is_norm, loads_by_itself, loads_plainly, run_load_pre_hooks, tensor_tables


@dataclass(frozen=True)
class NameDifferences:
    """Which names had no counterpart."""

    missing_keys: list[str]
    """Names of the model that were not there to be loaded; one that is tied to a name that was does not count."""
    unexpected_keys: list[str]
    """Names that were there, and that the model does not have."""


@dataclass(frozen=True)
class WeightPlacement:
    """Where a weight is to be, and as what."""

    device: torch.device
    """The device; ``meta`` for one that is handed to ``offload`` instead of being kept."""
    dtype: torch.dtype


Placement = Callable[[str, Tensor], WeightPlacement]
Offload = Callable[[str, Tensor], None]


def in_place(name: str, target: Tensor) -> WeightPlacement:
    """Where the weight is already; on the host where it has no memory yet."""
    return WeightPlacement(torch.device("cpu") if target.is_meta else target.device, target.dtype)


def load_into(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> NameDifferences:
    """Load a state dict, or raise and leave the model as it is.

    Names are compared where ``strict``; shapes and kinds of dtype always are.
    """
    assignment = Assignment(model, as_entries(state_dict), strict, "the state dict")
    assignment.run()
    return assignment.loaded


class Assignment:
    """What is going to be loaded into a model. Making it checks; ``run`` does it."""

    def __init__(
        self,
        model: nn.Module,
        entries: Entries,
        strict: bool,
        where: str,
        *,
        place: Placement = in_place,
        offload: Offload | None = None,
        surplus: Iterable[str] = (),
    ) -> None:
        self.model = model
        self._entries, self._place, self._offload = entries, place, offload
        self._targets: dict[str, Any] = model.state_dict(keep_vars=True)
        self._keys = {name: view_key(value) for name, value in self._targets.items() if isinstance(value, Tensor)}
        self._uses = _uses(model)
        self._custom = _custom(model)
        self._done: set[Hashable] = set()
        self.by_module = _has_own_ways(model, entries)
        """Whether modules load by code of their own, so that torch has to call them, all at once."""
        self.may_refuse = self.by_module and _runs_own_code(model, entries)
        """Whether a module may raise when it is given what was read, after others have changed."""
        found = _after_hooks(model, entries, strict) if self.by_module else entries
        self.loaded = self._compare_names(found, surplus)
        self._check(found, strict, where)
        self.places = {
            name: place(name, target)
            for name, target in self._targets.items()
            if isinstance(target, Tensor) and name in found
        }

    # --- checking ----------------------------------------------------------------------------------------------

    def _compare_names(self, found: Entries, surplus: Iterable[str]) -> NameDifferences:
        there = {self._keys.get(name) for name in found}
        lenient = (*self._custom, *_late_names(self.model))
        missing = [
            name
            for name in self._targets
            if name not in found and self._keys.get(name, name) not in there and not name.startswith(lenient)
        ]
        unexpected = [name for name in found if name not in self._targets and not name.startswith(self._custom)]
        return NameDifferences(missing, [*unexpected, *surplus])

    def _check(self, found: Entries, strict: bool, where: str) -> None:
        problems = [text for name in self._targets if name in found if (text := self._misfit(name, found[name]))]
        missing, unexpected = self.loaded.missing_keys, self.loaded.unexpected_keys
        if strict and missing:
            problems.append(f"{len(missing)} names of the model are not there: {some(missing)}")
        if strict and unexpected:
            problems.append(f"{len(unexpected)} names are not in the model: {some(unexpected)}")
        if found and self._targets and not set(found) & set(self._targets):
            problems.append(
                f"not one of its {len(found)} names ({some(list(found))}) is a name of the model "
                f"({some(list(self._targets))})"
            )
        torn = self._torn(found)
        if strict:
            problems += torn
        if problems:
            listed = "\n  ".join(problems[:10])
            raise CheckpointError(
                f"{where} does not fit {type(self.model).__name__}, which was left as it is:\n  {listed}"
            )
        for text in torn:
            get_logger(__name__).warning(f"{where}: {text}; the last one is used")

    def _misfit(self, name: str, entry: Any) -> str | None:
        target = self._targets[name]
        if not isinstance(target, Tensor) or is_lazy(target) or name.startswith(self._custom):
            return None
        if not isinstance(entry, Tensor) and not is_stored(entry):
            return f"{name} is a {type(entry).__name__} there, and a tensor in the model"
        if tuple(entry.shape) != tuple(target.shape):
            return f"{name} has shape {tuple(entry.shape)} there, and {tuple(target.shape)} in the model"
        if _kind(entry.dtype) != _kind(target.dtype):
            return f"{name} is of {entry.dtype} there, and of {target.dtype} in the model"
        if hasattr(target, "device_mesh"):
            return f"{name} is spread over processes (DTensor) in the model, which this release cannot load into"
        return None

    def _torn(self, found: Entries) -> list[str]:
        """Names that are one weight in the model and have different values in the file."""
        first: dict[Hashable, str] = {}
        problems = []
        for name in found:
            key = self._keys.get(name)
            if key is None:
                continue
            one = first.setdefault(key, name)
            if one != name and not _same(found[one], found[name]):
                problems.append(f"{one} and {name} are one tensor in the model, and two that differ there")
        return problems

    # --- loading -----------------------------------------------------------------------------------------------

    def run(self, offloaded: Callable[[], None] = lambda: None) -> None:
        """Load everything. ``offloaded`` is called when all weights were handed to ``offload``."""
        if self.by_module:
            self._through_torch()
            offloaded()
        else:
            self._offload_all()  # a full disk is noticed before the model is touched
            offloaded()
            self._fill_all()

    def _offload_all(self) -> None:
        for name in self._file_by_file(self._entries):
            if self.places[name].device.type == "meta":
                self._hand_over(name, self._entries[name].read())

    @torch.no_grad()
    def _fill_all(self) -> None:
        for name in self._file_by_file(self._entries):
            self._fill_one(name)

    @torch.no_grad()
    def fill(self, names: Iterable[str]) -> None:
        """Load the tensors of these names only; several threads may share the names, unless ``by_module`` holds."""
        for name in names:
            self._fill_one(name)

    def shares(self, parts: int) -> list[list[str]]:
        """All names, for so many threads to load about as many bytes each."""
        by_size = sorted(self.places, key=lambda name: stored_bytes(self._targets[name]), reverse=True)
        return [by_size[part::parts] for part in range(parts)]

    def _file_by_file(self, names: Iterable[str]) -> Iterator[str]:
        """Those of the names that are to be loaded; a file that is done with holds no memory any more."""
        last: Any = None
        for name in names:
            if name in self.places:
                file = getattr(self._entries[name], "file", None)
                if last is not None and file is not last:
                    last.rest()
                last = file
                yield name

    def _fill_one(self, name: str) -> None:
        place, target, entry = self.places[name], self._targets[name], self._entries[name]
        key = self._keys[name]
        if place.device.type == "meta":
            self._forget(name)
        elif key in self._done or (place.device == target.device and place.dtype == target.dtype):
            self._overwrite(name, entry)
        else:
            fresh = torch.empty(target.shape, dtype=place.dtype, device=place.device)
            entry.read_into(fresh)
            self._put(key, target, fresh)
        self._done.add(key)

    def _overwrite(self, name: str, entry: Any) -> None:
        target = self._current(name)
        if not overlaps_itself(target):
            entry.read_into(target)
            return
        values = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        entry.read_into(values)
        trial = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
        _copy_expanded(trial, values)
        if torch.equal(_bytes(trial), _bytes(values)):
            _copy_expanded(target, values)
        else:  # elements that are one place in the model are to get different values: each needs its own
            self._put(self._keys[name], target, values)

    @torch.no_grad()
    def _through_torch(self) -> None:
        for name, place in self.places.items():
            target, key = self._targets[name], self._keys[name]
            device = torch.device("cpu") if place.device.type == "meta" else place.device
            other = (device, place.dtype) != (target.device, target.dtype) or overlaps_itself(target)
            if key not in self._done and not is_lazy(target) and other:
                self._put(key, target, torch.empty(target.shape, dtype=place.dtype, device=device))
            self._done.add(key)
        self.model.load_state_dict(read_all(self._entries), strict=False)
        for name, place in self.places.items():
            if place.device.type == "meta":
                self._hand_over(name, self._current(name).detach())
                self._forget(name)

    def _hand_over(self, name: str, value: Tensor) -> None:
        assert self._offload is not None
        self._offload(name, value.to(self.places[name].dtype))

    def _forget(self, name: str) -> None:
        target, dtype = self._targets[name], self.places[name].dtype
        self._put(self._keys[name], target, torch.empty(target.shape, dtype=dtype, device="meta"))

    def _current(self, name: str) -> Tensor:
        """The weight as it is in the model by now."""
        table, attribute = self._uses[self._keys[name]][0]
        return table[attribute]

    def _put(self, key: Hashable, old: Tensor, fresh: Tensor) -> None:
        """Give a weight new memory at all places that it is used in."""
        made: dict[int, Tensor] = {}
        for table, attribute in self._uses.get(key, ()):
            value = table[attribute]
            if not old.is_meta and not fresh.is_meta:
                value.grad = None
                value.data = fresh  # the object stays, and with it whoever holds it
                continue
            if id(value) not in made:
                made[id(value)] = replacement(value, fresh)
            table[attribute] = made[id(value)]


def _copy_expanded(target: Tensor, values: Tensor) -> None:
    """Copy into a tensor of which one element may stand for many, which torch itself refuses."""
    for dimension, stride in enumerate(target.stride()):
        if not stride:
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    target.copy_(values)


def _bytes(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.contiguous())


def replacement(old: Tensor, fresh: Tensor) -> Tensor:
    """The new values as what the old ones were: a parameter with its attributes, or a buffer."""
    if not isinstance(old, nn.Parameter):
        return fresh
    new: Any = nn.Parameter(fresh, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _uses(model: nn.Module) -> dict[Hashable, list[tuple[dict[str, Any], str]]]:
    """For each weight, by its memory, the tables of modules that it is in, and its name there."""
    uses: dict[Hashable, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for table in tensor_tables(module):
            for attribute, value in table.items():
                if value is not None:
                    uses.setdefault(view_key(value), []).append((table, attribute))
    return uses


def _has_own_ways(model: nn.Module, entries: Entries) -> bool:
    """Whether some module does more when it is loaded than to copy its tensors."""
    return not all(is_stored(entry) for entry in entries.values()) or not all(map(loads_plainly, model.modules()))


def _runs_own_code(model: nn.Module, entries: Entries) -> bool:
    extra = not all(is_stored(entry) for entry in entries.values())
    return extra or any(loads_by_itself(module) for module in model.modules())


def _custom(model: nn.Module) -> tuple[str, ...]:
    """How names begin that are the business of modules with a way of their own to load them."""
    return tuple(f"{name}." if name else "" for name, module in model.named_modules() if loads_by_itself(module))


def _late_names(model: nn.Module) -> list[str]:
    """Names that may be missing: norms of old files did not count their batches."""
    norms = [name for name, module in model.named_modules() if is_norm(module)]
    return [f"{name}.num_batches_tracked".lstrip(".") for name in norms]


def _after_hooks(model: nn.Module, entries: Entries, strict: bool) -> dict[str, Any]:
    """The entries as the modules' own hooks rename and complete them before they are loaded."""
    state = OrderedDict(read_all(entries))
    run_load_pre_hooks(model, state, strict)
    return state


def _same(one: Any, other: Any) -> bool:
    a, b = (value.read() if is_stored(value) else value for value in (one, other))
    return view_key(a) == view_key(b) or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating"
    return "bool" if dtype == torch.bool else "integer"
