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
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoint import generators, safe
from lockstep.checkpoint.safe import Fill
from lockstep.errors import CheckpointError

STATE = "lockstep_state.json"
SCALER = "scaler.pt"


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
        weights, files = safe.copy_to_host((self.weights, self.files))
        return Content(weights=weights, files=files, counters=self.counters)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in safe.tensors((self.weights, self.files)))


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
        files[f"gradients_{objects.rank}.bin"] = [
            None if parameter.grad is None else parameter.grad.detach() for parameter in objects.parameters
        ]
    return files


def common_files(objects: Objects) -> dict[str, Any]:
    """What all ranks have alike, or what one of them says for all."""
    files: dict[str, Any] = {}
    for number, optimizer in enumerate(objects.optimizers):
        files[numbered_name("optimizer", number, ".bin")] = safe.pack(
            optimizer.state_dict(), f"optimizer {number} ({_kind(optimizer, 'optimizer')})"
        )
    for number, scheduler in enumerate(objects.schedulers):
        files[numbered_name("scheduler", number, ".bin")] = safe.pack(
            scheduler.state_dict(), f"scheduler {number} ({_kind(scheduler, 'scheduler')})"
        )
    for number, loader in enumerate(objects.loaders):
        files[numbered_name("dl_state_dict", number, ".bin")] = _loader_state(loader, number)
    if objects.scaler is not None:
        files[SCALER] = safe.pack(objects.scaler.state_dict(), "the loss scaler")
    for number, thing in enumerate(objects.custom):
        what = f"{type(thing).__name__} (number {number} of register_for_checkpointing)"
        files[f"custom_checkpoint_{number}.pkl"] = safe.pack(thing.state_dict(), what)
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
    return safe.pack(loader.state_dict(), f"loader {number}")


def _kind(prepared: Any, inner: str) -> str:
    return type(getattr(prepared, inner, prepared)).__name__


# ---------------------------------------------------------------- loading


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint's files, read and checked against the objects they are for; nothing has been changed yet."""

    counters: dict[str, Any] | None
    """None for a folder of Accelerate's."""
    optimizers: list[Any]
    schedulers: list[Any]
    scaler: Any
    loaders: list[Any]
    custom: list[Any]
    generators: dict[str, Any] | None
    """This rank's; rank 0's when this rank was not there; None when the folder has none."""
    known: bool
    """Whether this rank was there."""
    items: list[float]
    gradients: list[Tensor | None] | None
    """Of the open window; None when none is."""


def read(folder: Path, objects: Objects, *, trusted: bool = False, fill: Fill | None = None) -> Loaded:
    """Read all files but the weights; CheckpointError when they do not fit the objects.

    ``fill`` reads the values of a large optimizer's tensors.
    """
    state = read_counters(folder)
    if state is not None:
        _compare(state, objects, folder)
    before = objects.world_size if state is None else state["world_size"]
    own, known = _rank_file(folder, objects.rank, trusted), True
    if own is None or (state is not None and objects.rank >= before):
        own, known = _rank_file(folder, 0, trusted), False
    if state is not None and own is None:
        raise CheckpointError(f"{folder} has no random_states_0.pkl: it is not complete.")

    def values(stem: str, count: int, fill: Fill | None = None) -> list[Any]:
        names = [numbered_name(stem, number, ".bin") for number in range(count)]
        return [safe.read(folder / name, trusted=trusted, fill=fill) for name in names]

    optimizers = values("optimizer", len(objects.optimizers), fill)
    for number, (optimizer, saved) in enumerate(zip(objects.optimizers, optimizers, strict=True)):
        _check_optimizer(optimizer, saved, folder / numbered_name("optimizer", number, ".bin"))
    same = before == objects.world_size and known
    gradients, items = _window(folder, state, objects, trusted)
    return Loaded(
        counters=state,
        optimizers=optimizers,
        schedulers=values("scheduler", len(objects.schedulers)),
        scaler=safe.read(folder / SCALER, trusted=trusted) if objects.scaler is not None else None,
        loaders=_loader_states(folder, objects, own if same else None, trusted) if state is not None else [],
        custom=[
            safe.read(folder / f"custom_checkpoint_{number}.pkl", trusted=trusted)
            for number in range(len(objects.custom))
        ],
        generators=own,
        known=known,
        items=items,
        gradients=gradients,
    )


def read_counters(folder: Path) -> dict[str, Any] | None:
    """The JSON file; None when the folder has none, as those of Accelerate."""
    path = folder / STATE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    window = state.get("window") if isinstance(state, dict) else None
    if not isinstance(window, dict) or not isinstance(state.get("world_size"), int):
        raise CheckpointError(f"{path} is damaged: it does not say where the run stood.")
    return state


def _compare(state: dict[str, Any], objects: Objects, folder: Path) -> None:
    """Raise unless the script has prepared what was saved."""
    here = {
        "models": len(objects.models),
        "optimizers": len(objects.optimizers),
        "schedulers": len(objects.schedulers),
        "loaders": len(objects.loaders),
        "objects registered for checkpointing": len(objects.custom),
    }
    saved = {**state, "objects registered for checkpointing": len(state.get("custom", ()))}
    differ = [f"{saved.get(name)} {name} (here {count})" for name, count in here.items() if saved.get(name) != count]
    if bool(state.get("scaler")) != (objects.scaler is not None):
        differ.append(
            "a loss scaler, as fp16 has one (here none)" if state.get("scaler") else "no loss scaler (here one)"
        )
    if differ:
        raise CheckpointError(
            f"{folder} was saved with {', '.join(differ)}. Prepare and register the same objects, in the same order, "
            "before load_state()."
        )


def _check_optimizer(optimizer: Any, saved: Any, path: Path) -> None:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not isinstance(saved.get("state"), dict):
        raise CheckpointError(f"{path} holds no state of an optimizer.")
    there = [len(group.get("params", ())) for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"{path} is of an optimizer with {_groups(there)}; this {_kind(optimizer, 'optimizer')} has "
            f"{_groups(here)}."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            full = isinstance(value, Tensor) and name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
            if full and value.shape != parameter.shape:
                raise CheckpointError(
                    f"{path}: {name} of parameter {number} has the shape {list(value.shape)}, the parameter has "
                    f"{list(parameter.shape)}. It belongs to another model."
                )


def _groups(sizes: list[int]) -> str:
    counts = ", ".join(str(size) for size in sizes)
    return f"{len(sizes)} group{'s' * (len(sizes) != 1)} of {counts} parameters"


def _rank_file(folder: Path, rank: int, trusted: bool) -> dict[str, Any] | None:
    path = folder / f"random_states_{rank}.pkl"
    if not path.exists():
        return None
    states = safe.read(path, trusted=trusted)
    problem = generators.check(states) if isinstance(states, dict) else "it holds no table"
    if problem is not None:
        raise CheckpointError(f"{path} holds no states of generators: {problem}.")
    return states


def _loader_states(folder: Path, objects: Objects, own: dict[str, Any] | None, trusted: bool) -> list[Any]:
    """Each loader's place: as this rank saw it where it can go on from that, else as rank 0 told it for all."""
    found = []
    for number in range(len(objects.loaders)):
        mine: dict[str, Any] = {} if own is None else safe.unpack(own["loaders"][number])
        reads = mine.get("reads")
        if reads and not mine.get("ended"):
            found.append(mine)
            continue
        path = folder / numbered_name("dl_state_dict", number, ".bin")
        common = safe.unpack(safe.read(path, trusted=trusted))
        # With even_batches=False this rank may have had its last batch before rank 0: the epoch is not over.
        found.append({**mine, "ended": common.get("ended", True)} if reads else common)
    return found


def _window(
    folder: Path, state: dict[str, Any] | None, objects: Objects, trusted: bool
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
    mine = [objects.rank] if before == now else list(range(objects.rank, before, now))
    total: list[Tensor | None] = [None] * len(objects.parameters)
    items: list[float] = []
    for rank in mine:
        path = folder / f"gradients_{rank}.bin"
        gradients, states = safe.read(path, trusted=trusted), _rank_file(folder, rank, trusted)
        if not _fits(gradients, objects.parameters):
            raise CheckpointError(f"{path} holds gradients of other parameters than the {len(total)} there are here.")
        total = [_sum(one, other) for one, other in zip(total, gradients, strict=True)]
        counts = states["items"] if states is not None else []
        items = [one + other for one, other in zip(items, counts, strict=True)] if items else list(counts)
    if not mine:  # a rank more than there were: it has done nothing of the window yet
        first = _rank_file(folder, 0, trusted)
        items = [0.0] * len(first["items"] if first is not None else ())
    elif before != now and not items:
        total = [None if gradient is None else gradient * (now / before) for gradient in total]
    return total, items


def _fits(gradients: Any, parameters: list[Tensor]) -> bool:
    if not isinstance(gradients, list) or len(gradients) != len(parameters):
        return False
    pairs = zip(gradients, parameters, strict=True)
    return all(gradient is None or gradient.shape == parameter.shape for gradient, parameter in pairs)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def assign(loaded: Loaded, objects: Objects) -> int | None:
    """Put everything but the weights into the objects; the seed of this rank's generators if they had to be derived."""
    for optimizer, value in zip(objects.optimizers, loaded.optimizers, strict=True):
        optimizer.load_state_dict(value)
    for scheduler, value in zip(objects.schedulers, loaded.schedulers, strict=True):
        scheduler.load_state_dict(safe.unpack(value))
    if objects.scaler is not None:
        objects.scaler.load_state_dict(loaded.scaler)
    for loader, value in zip(objects.loaders, loaded.loaders, strict=False):
        loader.load_state_dict(value)
    for thing, value in zip(objects.custom, loaded.custom, strict=True):
        thing.load_state_dict(safe.unpack(value))
    if loaded.counters is not None:
        objects.window.load_state_dict({**loaded.counters["window"], "items": loaded.items})
    gradients = loaded.gradients or [None] * len(objects.parameters)
    for parameter, gradient in zip(objects.parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    return _assign_generators(loaded, objects)


def _assign_generators(loaded: Loaded, objects: Objects) -> int | None:
    """Last, as loading may draw numbers; and once more when the first batch is there, as an iterator draws some too."""
    if loaded.generators is None:
        return None
    if not loaded.known:
        return generators.derive(loaded.generators, objects.rank, objects.device)
    # An epoch that begins anew draws what it draws; one that is gone on with has drawn it before.
    states, begun = (
        loaded.generators,
        [
            loader
            for loader, value in zip(objects.loaders, loaded.loaders, strict=False)
            if value.get("begun") and not value.get("ended")
        ],
    )

    def again() -> None:
        for loader in begun:
            loader.at_first_batch = None
        generators.restore(states, objects.device)

    generators.restore(states, objects.device)
    for loader in begun:
        loader.at_first_batch = again
    return None
