"""What a checkpoint holds besides the weights, and how it goes back into the objects.

==========================  ===========================================================================
optimizer.bin               each optimizer's state (optimizer_1.bin, … for further ones)
scheduler.bin, scaler.pt    the same for schedulers and fp16's loss scale
dl_state_dict.bin           where each loader stands, for any number of processes to go on from
custom_checkpoint_0.pkl     what ``register_for_checkpointing`` was given
random_states_0.pkl         of each rank: its generators, and its own view of the loaders
gradients_0.bin             of each rank: the gradients of an accumulation window that is open
lockstep_state.json         counters, and how the run is set up
==========================  ===========================================================================

All of these hold tensors and plain values only. The names are Accelerate's where it has such a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from lockstep.checkpoint import generators, safe_pickle, spread
from lockstep.checkpoint.safe_pickle import Fill
from lockstep.checkpoint.state_files import StateFiles
from lockstep.errors import CheckpointError
from lockstep.model_files.shared_tensors import stored_bytes
from lockstep.model_files.state_loader import Assignment
from lockstep.model_files.tensor_entry import as_entries
from lockstep.model_files.weights import refuse_meta
from lockstep.storage import manifest
from lockstep.storage.open_files import read_small
from lockstep.strategies.base import Strategy

STATE = "lockstep_state.json"
SCALER = "scaler.pt"
_LARGEST_COUNTERS = 1 << 22
_MOST_RANKS, _MOST_STEPS, _MOST_OBJECTS = 1 << 24, 1 << 53, 1 << 16
"""What no job has: a number beyond them is none that was saved."""


def numbered_name(stem: str, number: int, suffix: str) -> str:
    """The first file has no number."""
    return f"{stem}{suffix}" if number == 0 else f"{stem}_{number}{suffix}"


class Stateful(Protocol):
    """Gives its state and takes it back."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take it back."""
        ...


class Loader(Stateful, Protocol):
    """What is asked of a prepared loader."""

    at_first_batch: Callable[[], None] | None

    def check_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Raise where it would not take a state back."""
        ...


@dataclass(frozen=True, kw_only=True)
class Objects:
    """What an accelerator has to save and load."""

    models: list[nn.Module]
    """The user's models, without what was put around them."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Stateful]
    loaders: Sequence[Any]
    scaler: Any
    """Torch's scaler; None unless training in fp16."""
    custom: Sequence[Any]
    """What was registered."""
    window: Stateful
    """Where gradient accumulation stands."""
    parameters: list[Tensor]
    """What is trained, each once."""
    device: torch.device
    rank: int
    world_size: int
    strategy: Strategy
    """Says what is spread over the ranks."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one rank writes, all of it in its safe form."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    """The state dict of each model; none on a rank that does not write what the ranks have in common."""
    files: dict[str, Any] = field(default_factory=dict)
    """What else, by the name of its file."""
    counters: dict[str, Any] = field(default_factory=dict)
    """What goes into the JSON file."""

    def to_host(self) -> Content:
        """A copy in host memory that training does not change."""
        for tensors in self.weights:
            refuse_meta(tensors)
        weights, files = safe_pickle.copy_to_host((self.weights, self.files))
        return Content(weights=weights, files=files, counters=self.counters)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored_bytes(tensor) for tensor in safe_pickle.tensors((self.weights, self.files)))


# ---------------------------------------------------------------- saving


def own_files(objects: Objects) -> dict[str, Any]:
    """What only this rank has."""
    window = objects.window.state_dict()
    loaders = [_loader_state(loader, number) for number, loader in enumerate(objects.loaders)]
    files: dict[str, Any] = {
        f"random_states_{objects.rank}.pkl": {
            "step": window["step"],
            **generators.capture(objects.device),
            "loaders": loaders,
            "items": list(window["items"]),
        }
    }
    if window["filled"]:
        files[f"gradients_{objects.rank}.bin"] = objects.strategy.window_gradients(objects.parameters)
    return files


def common_files(objects: Objects, optimizers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have alike, or what one of them says for all; ``optimizers`` are their whole states."""
    files: dict[str, Any] = {}
    for number, (optimizer, state) in enumerate(zip(objects.optimizers, optimizers, strict=True)):
        files[numbered_name("optimizer", number, ".bin")] = safe_pickle.pack(
            state, f"optimizer {number} ({_kind(optimizer, 'optimizer')})"
        )
    for number, scheduler in enumerate(objects.schedulers):
        files[numbered_name("scheduler", number, ".bin")] = safe_pickle.pack(
            scheduler.state_dict(), f"scheduler {number} ({_kind(scheduler, 'scheduler')})"
        )
    for number, loader in enumerate(objects.loaders):
        files[numbered_name("dl_state_dict", number, ".bin")] = _loader_state(loader, number)
    if objects.scaler is not None:
        files[SCALER] = safe_pickle.pack(objects.scaler.state_dict(), "the loss scaler")
    for number, thing in enumerate(objects.custom):
        what = f"{type(thing).__name__} (number {number} of register_for_checkpointing)"
        files[f"custom_checkpoint_{number}.pkl"] = safe_pickle.pack(thing.state_dict(), what)
    return files


def counters(objects: Objects, updates: int, record: dict[str, Any] | None) -> dict[str, Any]:
    """What people and the next run want to know."""
    window = objects.window.state_dict()
    return {
        "world_size": objects.world_size,
        "updates": updates,
        "window": {name: value for name, value in window.items() if name != "items"},
        "run": record,
        "models": len(objects.models),
        "optimizers": len(objects.optimizers),
        "schedulers": len(objects.schedulers),
        "loaders": len(objects.loaders),
        "scaler": objects.scaler is not None,
        "custom": [type(thing).__name__ for thing in objects.custom],
    }


def _loader_state(loader: Stateful, number: int) -> Any:
    return safe_pickle.pack(loader.state_dict(), f"loader {number}")


def _kind(prepared: Any, inner: str) -> str:
    return type(getattr(prepared, inner, prepared)).__name__


# ---------------------------------------------------------------- loading


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """A checkpoint's files, read and checked against the objects they are for; nothing has been changed yet."""

    counters: dict[str, Any] | None
    """None for a folder of Accelerate's."""
    optimizers: list[Any]
    schedulers: list[Any]
    scaler: Any
    loaders: dict[int, Any]
    """By its number, the state of each loader that goes on where it was."""
    custom: list[Any]
    generators: dict[str, Any] | None
    """This rank's; rank 0's when this rank was not there; None when the folder has none."""
    known: bool
    """Whether this rank was there."""
    items: list[float]
    gradients: list[Tensor | None] | None
    """Of the open window; None when none is."""
    left_out: list[str] = field(default_factory=list)
    """What the checkpoint holds and is not restored, because this script has not prepared what it is for."""
    trains: bool = True
    """Whether the training goes on; else only what it has made is of use."""


def read(files: StateFiles, objects: Objects, *, trusted: bool = False, fill: Fill | None = None) -> LoadedState:
    """Read all files but the weights; CheckpointError when they do not fit the objects.

    ``fill`` reads the values of a large optimizer's tensors.
    """
    reader = StateReader(files, trusted)
    state = read_counters(files)
    left_out = [] if state is None else _compare(state, objects, files.folder)
    before = objects.world_size if state is None else state["world_size"]
    own, known = reader.rank_file(objects.rank), True
    if own is None or (state is not None and objects.rank >= before):
        own, known = reader.rank_file(0), False
    if state is not None and own is None:
        raise CheckpointError(f"{files.folder} has no random_states_0.pkl: it is not complete.")
    optimizers = []
    for number, optimizer in enumerate(objects.optimizers):
        name = numbered_name("optimizer", number, ".bin")
        optimizers.append(spread.rows_of_optimizer(objects.strategy, optimizer, reader.value(name, fill)))
        _check_optimizer(optimizer, optimizers[-1], files.folder / name)
    same = before == objects.world_size and known
    # A script that evaluates a model has no optimizer: where the training stood in its data is not its affair.
    trains = state is None or bool(objects.optimizers) or not state["optimizers"]
    gradients, items = _window(reader, state, objects) if trains else (None, [])
    loaders = {} if state is None or not trains else _loader_states(reader, state, objects, own if same else None)
    if state is not None and len(loaders) < len(objects.loaders):
        anew = [str(number) for number in range(len(objects.loaders)) if number not in loaders]
        left_out.append(f"the position of loader {', '.join(anew)} (a new epoch starts)")
    return LoadedState(
        counters=state,
        optimizers=optimizers,
        schedulers=[
            reader.table(numbered_name("scheduler", number, ".bin")) for number in range(len(objects.schedulers))
        ],
        scaler=reader.table(SCALER) if objects.scaler is not None else None,
        loaders=loaders,
        custom=[reader.custom(number, thing) for number, thing in enumerate(objects.custom)],
        generators=own,
        known=known,
        items=items,
        gradients=gradients,
        left_out=left_out,
        trains=trains,
    )


class StateReader:
    """Reads the files of one checkpoint, each into what was saved in it."""

    def __init__(self, files: StateFiles, trusted: bool) -> None:
        self.folder = files.folder
        self._files, self._trusted = files, trusted

    def value(self, name: str, fill: Fill | None = None) -> Any:
        """What a file holds."""
        path = self.folder / name
        if not self._files.has(name):
            raise CheckpointError(f"{path} is missing.")
        found = safe_pickle.read(path, trusted=self._trusted, fill=fill, opener=self._files.open)
        return safe_pickle.unpack(found, path)

    def table(self, name: str) -> dict[str, Any]:
        """The same where it has to be a table."""
        found = self.value(name)
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.folder / name} holds a {type(found).__name__}, not the table that was saved.")
        return found

    def custom(self, number: int, thing: Any) -> Any:
        """The state of a registered object; that of a module is compared with it before anything is changed."""
        name = f"custom_checkpoint_{number}.pkl"
        found = self.value(name)
        if getattr(type(thing), "load_state_dict", None) is nn.Module.load_state_dict and isinstance(found, dict):
            Assignment(thing, as_entries(found), strict=True, where=str(self.folder / name))
        return found

    def rank_file(self, rank: int) -> dict[str, Any] | None:
        """What a rank alone has saved; None when there is nothing of it."""
        name = f"random_states_{rank}.pkl"
        if not self._files.has(name):
            return None
        states = self.table(name)
        problem = generators.check(states)
        items = states.get("items", [])
        if problem is None and not (isinstance(items, list) and all(_is_number(item) for item in items)):
            problem = "its numbers of items are none"
        if problem is not None:
            raise CheckpointError(f"{self.folder / name} holds no states of generators: {problem}.")
        return states


def read_counters(files: StateFiles) -> dict[str, Any] | None:
    """The JSON file; None when the folder has none, as those of Accelerate."""
    if not files.has(STATE):
        if files.listed:
            raise CheckpointError(f"{files.folder} holds no state: its {manifest.NAME} does not list {STATE}.")
        return None
    path = files.folder / STATE
    text = read_small(files.open(path), _LARGEST_COUNTERS, path)
    try:
        state = json.loads(text, object_pairs_hook=manifest.unique_names)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    window = state.get("window") if isinstance(state, dict) else None
    if not isinstance(window, dict) or not isinstance(state.get("custom", []), list):
        raise CheckpointError(f"{path} is damaged: it does not say where the run stood.")
    counts = {
        "world_size": (state.get("world_size"), 1, _MOST_RANKS),
        "updates": (state.get("updates"), 0, _MOST_STEPS),
        **{name: (state.get(name), 0, _MOST_OBJECTS) for name in ("models", "optimizers", "schedulers", "loaders")},
        **{name: (window.get(name), 0, _MOST_STEPS) for name in ("step", "filled")},
        "divisor": (window.get("divisor"), 1, _MOST_STEPS),
    }
    for name, (value, least, most) in counts.items():
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(f"{path} is damaged: {name} is {str(value)[:50]}, and not from {least} to {most}.")
    scale = window.get("item_scale")
    if scale is not None and not _is_number(scale):
        raise CheckpointError(f"{path} is damaged: item_scale is not a number.")
    return state


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _compare(state: dict[str, Any], objects: Objects, folder: Path) -> list[str]:
    """What was saved and has nobody to go to, in words; raise where something here would find nothing, or not its own.

    As in Accelerate, fewer models, optimizers and schedulers than were saved are the first of them: a script that
    evaluates needs no optimizer. What users have registered must be the same.
    """
    here = {
        "models": len(objects.models),
        "optimizers": len(objects.optimizers),
        "schedulers": len(objects.schedulers),
        "objects registered for checkpointing": len(objects.custom),
        "loss scalers, as fp16 has one": int(objects.scaler is not None),
    }
    saved = {
        **state,
        "objects registered for checkpointing": len(state.get("custom", ())),
        "loss scalers, as fp16 has one": int(bool(state.get("scaler"))),
    }
    must_match = "objects registered for checkpointing"
    differ = [
        f"{saved[name]} {name} (here {count})"
        for name, count in here.items()
        if saved[name] < count or (name == must_match and saved[name] != count)
    ]
    if differ:
        raise CheckpointError(
            f"{folder} was saved with {', '.join(differ)}. Prepare and register the same objects, in the same order, "
            "before load_state()."
        )
    return [f"{saved[name] - count} of {saved[name]} {name}" for name, count in here.items() if saved[name] > count]


def _check_optimizer(optimizer: Any, saved: Any, path: Path) -> None:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not _are_groups(groups) or not isinstance(saved.get("state"), dict):
        raise CheckpointError(f"{path} holds no state of an optimizer.")
    there = [len(group["params"]) for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"{path} is of an optimizer with {_groups(there)}; this {_kind(optimizer, 'optimizer')} has "
            f"{_groups(here)}."
        )
    # Others may keep moments of another shape than their parameters, as those do that project gradients.
    of_torch = type(getattr(optimizer, "optimizer", optimizer)).__module__.startswith("torch.optim.")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        values = saved["state"].get(number, {})
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__} as the state of parameter {number}.")
        for name, value in values.items():
            full = of_torch and name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
            if full and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{path}: {name} of parameter {number} has the shape {list(value.shape)}, the parameter has "
                    f"{list(parameter.shape)}. It belongs to another model."
                )


def _are_groups(groups: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether these are groups of parameters, which go by numbers."""
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(number) in (int, str) for number in group["params"])
        for group in groups
    )


def _groups(sizes: list[int]) -> str:
    counts = ", ".join(str(size) for size in sizes)
    return f"{len(sizes)} group{'s' * (len(sizes) != 1)} of {counts} parameters"


def _loader_states(
    reader: StateReader, state: dict[str, Any], objects: Objects, own: dict[str, Any] | None
) -> dict[int, Any]:
    """Each loader's place: as this rank saw it where it can go on from that, else as rank 0 told it for all.

    Where more or fewer loaders are prepared than were saved, a place is for the loader of the same number if that has
    as many samples; another one begins an epoch.
    """
    found = {}
    count = state["loaders"]
    views = [{}] * min(count, len(objects.loaders)) if own is None else own.get("loaders")
    where = reader.folder / f"random_states_{objects.rank}.pkl"
    if not isinstance(views, list) or (own is not None and len(views) != count):
        raise CheckpointError(f"{where} does not have the places of {count} loaders.")
    for number, (loader, mine) in enumerate(zip(objects.loaders, views, strict=False)):
        reads = isinstance(mine, dict) and mine.get("reads")
        if own is not None and reads:
            _check_loader(mine, where)
        place = mine
        if not reads or mine.get("ended"):
            name = numbered_name("dl_state_dict", number, ".bin")
            common = reader.table(name)
            _check_loader(common, reader.folder / name)
            # With even_batches=False this rank may have had its last batch before rank 0: the epoch is not over.
            place = {**mine, "ended": common.get("ended", True)} if reads else common
        if count == len(objects.loaders) or place.get("length") == loader.state_dict().get("length"):
            found[number] = place
    return found


def _check_loader(state: dict[str, Any], path: Path) -> None:
    """Raise for what no loader has said of its place."""
    counts = [state.get(name) for name in ("epoch", "world_size")]
    maybe = [state.get(name) for name in ("batches", "length", "seed", "sampler_epoch") if state.get(name) is not None]
    places, generator = state.get("places"), state.get("generator")
    fits = isinstance(places, list) and all(type(number) is int for number in (*counts, *maybe, *places))
    fits = fits and all(0 <= number < 2**62 for number in (*counts, *places))  # type: ignore[misc]
    if fits and generator is not None:
        try:
            torch.Generator().set_state(generator)
        except (TypeError, RuntimeError):
            fits = False
    if not fits or any(name not in state for name in ("begun", "reads", "owns_generator", "seed", "inner")):
        raise CheckpointError(f"{path} does not say where a loader stood.")


def _window(
    reader: StateReader, state: dict[str, Any] | None, objects: Objects
) -> tuple[list[Tensor | None] | None, list[float]]:
    """The gradients of the open window that this rank goes on with, and the items they stand for.

    A rank that was there has its own. On another number of processes each takes those of the old ranks whose number
    is its own modulo the new number, and adds them up. At the end of the window the gradients are averaged: of plain
    means over the new number of ranks, so that the sums are scaled by new / old to give the same average; weighted
    ones (``num_items``) are divided by the items of all ranks, so that sums are what is needed.
    """
    if state is None or not state["window"].get("filled") or state.get("alone"):
        return None, []
    before, now = state["world_size"], objects.world_size
    mine = range(objects.rank, objects.rank + 1) if before == now else range(objects.rank, before, now)
    total: list[Tensor | None] = [None] * len(objects.parameters)
    items: list[float] = []
    for rank in mine:
        name = f"gradients_{rank}.bin"
        gradients, states = reader.value(name), reader.rank_file(rank)
        if not _fits(gradients, objects):
            raise CheckpointError(
                f"{reader.folder / name} holds gradients of other parameters than the {len(total)} there are here."
            )
        total = [_sum(one, other) for one, other in zip(total, gradients, strict=True)]
        counts = states["items"] if states is not None else []
        if items and len(items) != len(counts):
            raise CheckpointError(f"{reader.folder / name} is of another accumulation window than those before it.")
        items = [one + other for one, other in zip(items, counts, strict=True)] if items else list(counts)
    if not mine:  # a rank more than there were: it has done nothing of the window yet
        first = reader.rank_file(0)
        items = [0.0] * len(first["items"] if first is not None else ())
    elif before != now and not items:
        total = [None if gradient is None else gradient * (now / before) for gradient in total]
    return total, items


def _fits(gradients: Any, objects: Objects) -> bool:
    parameters = objects.parameters
    if not isinstance(gradients, list) or len(gradients) != len(parameters):
        return False
    return all(
        gradient is None
        or (
            isinstance(gradient, Tensor)
            and gradient.shape == spread.whole_shape(objects.strategy, parameter)
            and getattr(parameter, "grad_dtype", parameter.dtype) in (gradient.dtype, None)  # None allows any
        )
        for gradient, parameter in zip(gradients, parameters, strict=True)
    )


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
