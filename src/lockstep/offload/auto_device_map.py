"""Dividing a model between devices, the host and the disk, in the order of its parts.

The maps are those that Accelerate makes of the same sizes and limits, so that a model lies where people know it to lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.config.sizes import in_words
from lockstep.logging import get_logger
from lockstep.offload.module_sizes import (
    Dtype,
    Part,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    is_split,
    own_parts,
)
from lockstep.offload.tied_parameters import check_tied_parameters_in_config, find_tied_parameters
from lockstep.topology.memory import get_max_memory

Device = int | str
DISK = "disk"


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Which part of a model goes where: accelerators are filled first, in order, then the host, then the disk.

    The first accelerator and the host keep room for the largest layer that comes after what they hold, as it is
    brought there to run.

    Args:
        model: May be on the meta device. Tie its weights first.
        max_memory: Limits by device number, ``"cpu"``, ``"disk"``; without it, what is free now.
        no_split_module_classes: Classes whose modules stay on one device, such as blocks with a residual connection.
        dtype: What the weights are going to be loaded as.
        special_dtypes: The same for single weights, by name.
        verbose: Print each decision.
        clean_result: Replace parts that go to one device by the module that consists of them.
        offload_buffers: Whether buffers of offloaded parts are offloaded too, so that they need no room.
        fallback_allocation: Where the next part does not fit on a device that is still empty, look for a later part
            that does.
    """
    limits = get_max_memory(max_memory)
    tied = find_tied_parameters(model)
    if not tied and check_tied_parameters_in_config(model):
        get_logger(__name__).warning(
            "The configuration of this model ties weights, and they are not tied: call model.tie_weights() before "
            "infer_auto_device_map, or they are counted, and placed, twice."
        )
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    whole = as_classes(no_split_module_classes)
    plan = _Allocation(own_parts(model), sizes, limits, tied, whole, fallback=fallback_allocation, verbose=verbose)
    plan.run()
    if not offload_buffers:
        _check_buffers(plan, limits, lambda part: compute_module_total_buffer_size(part, dtype, special_dtypes))
    if plan.too_small:
        told = ", ".join(f"{device} needs {size} bytes" for device, size in plan.too_small.items())
        get_logger(__name__).info(f"Nothing fitted on some devices, with what is reserved there: {told}.")
    return clean_device_map(plan.device_map) if clean_result else plan.device_map


def as_classes(names: Sequence[str] | str | None) -> list[str]:
    """Names of classes, also if it is one, or none."""
    return [names] if isinstance(names, str) else list(names or ())


class _Allocation:
    """The parts that are still to be placed, and how full each device is."""

    def __init__(
        self,
        parts: list[Part],
        sizes: Mapping[str, int],
        limits: Mapping[Device, int],
        tied: Sequence[Sequence[str]],
        whole: Sequence[str],
        *,
        fallback: bool,
        verbose: bool,
    ) -> None:
        self._queue, self._sizes, self._limits, self._tied, self._whole = parts, sizes, limits, tied, whole
        self._fallback, self._verbose = fallback, verbose
        self._devices = [*limits, *(() if DISK in limits else (DISK,))]
        accelerators = [device for device in self._devices if device not in ("cpu", DISK)]
        self._reserving = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        self._largest, self._largest_names = get_max_layer_size(parts, sizes, whole)
        self.device_map: dict[str, Device] = {}
        self.modules: dict[Device, list[nn.Module]] = {device: [] for device in self._devices}
        """What was put on each device by itself; tied partners that came along do not count."""
        self.used = dict.fromkeys(self._devices, 0)
        """Bytes on each device, with what it keeps free."""
        self.too_small: dict[Device, int] = {}
        """Devices that stayed empty, and the bytes that the first part would have needed there."""

    def run(self) -> None:
        """Place every part."""
        while self._queue:
            name, part = self._queue.pop(0)
            self._forget_largest(name)
            self._place(name, part)

    def _place(self, name: str, part: Any) -> None:
        device = self._devices[0]
        reserved = self._largest if device in self._reserving else 0
        room = None if device == DISK else self._limits[device] - reserved - self.used[device]
        size = self._sizes.get(name, 0)
        partners, needed = self._with_partners(name, self._queue)
        if room is None or needed <= room:
            self._put(name, part, partners, needed)
            return
        if partners and size <= room and self._split_partner(name, part, partners):
            return
        if size >= room and is_split(part, self._whole):
            self._log(f"{name} ({size} bytes) does not fit on {device} ({room} bytes left): split")
            self._queue[:0] = _children(name, part)
            self._find_largest()
            return
        if not self.used[device]:
            if self._fallback and self._take_later(self._limits[device] - max(self._largest, needed), name, part):
                return
            self.too_small[device] = needed + reserved
        self._log(f"{name} ({needed} bytes with what is tied to it) does not fit on {device} ({room} bytes left)")
        self.used[device] += reserved
        self._devices.pop(0)
        self._queue.insert(0, (name, part))

    def _put(self, name: str, part: Any, partners: Sequence[str], needed: int) -> None:
        device = self._devices[0]
        self._log(f"{', '.join((name, *partners))} ({needed} bytes): {device}")
        self.used[device] += needed
        self.device_map.update(dict.fromkeys((name, *partners), device))
        self._queue = [entry for entry in self._queue if entry[0] not in partners]
        if isinstance(part, nn.Module):
            self.modules[device].append(part)

    # --- the largest layer ---------------------------------------------------------------------------------------

    def _forget_largest(self, name: str) -> None:
        """The part is about to be placed; room is kept for those after it."""
        self._largest_names = [layer for layer in self._largest_names if not _lies_under(layer, name)]
        if not self._largest_names:
            self._find_largest()

    def _find_largest(self) -> None:
        modules = [(name, part) for name, part in self._queue if isinstance(part, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self._sizes, self._whole)

    # --- tied parameters -----------------------------------------------------------------------------------------

    def _with_partners(self, name: str, queue: Sequence[Part]) -> tuple[list[str], int]:
        """The later parts that share a parameter with this one, and the bytes of all together."""
        partners: dict[str, int] = {}
        for group in self._tied:
            outside = [other for other in group if not _lies_under(other, name)]
            if len(outside) == len(group):
                continue
            for other in outside:
                later = next((part for part, _ in queue if _lies_under(other, part)), None)
                if later is not None:
                    partners.setdefault(later, self._sizes.get(later, 0))
                    partners[later] -= self._sizes.get(other, 0)  # the weight itself is there already
        return list(partners), self._sizes.get(name, 0) + sum(partners.values())

    def _split_partner(self, name: str, part: Any, partners: Sequence[str]) -> bool:
        """Put the children of the first partner that has some in its place: perhaps not all have to come along."""
        for partner in partners:
            index = next(index for index, entry in enumerate(self._queue) if entry[0] == partner)
            module = self._queue[index][1]
            if is_split(module, self._whole):
                self._log(f"{partner} does not fit on {self._devices[0]} together with {name}: split")
                self._queue[index : index + 1] = _children(partner, module)
                self._queue.insert(0, (name, part))
                self._find_largest()
                return True
        return False

    # --- a later part on an empty device -------------------------------------------------------------------------

    def _take_later(self, room: int, name: str, part: Any) -> bool:
        """Bring the first part that fits to the front of the queue, and say whether there is one."""
        waiting = list(self._queue)
        found = None
        while waiting and found is None and room >= 0:
            candidate, module = waiting.pop(0)
            if self._with_partners(candidate, waiting)[1] <= room:
                found = candidate, module
            elif is_split(module, self._whole):
                waiting[:0] = _children(candidate, module)
        if found is None:
            return False
        self._log(f"{name} does not fit on {self._devices[0]}: {found[0]} is put there instead")
        while found[0] not in (entry[0] for entry in self._queue):
            index = next(index for index, entry in enumerate(self._queue) if _lies_under(found[0], entry[0]))
            self._queue[index : index + 1] = _children(*self._queue[index])
        rest = [entry for entry in self._queue if entry[0] != found[0]]
        self._queue = [found, (name, part), *rest]
        return True

    def _log(self, text: str) -> None:
        if self._verbose:
            print(text)


def _lies_under(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _children(name: str, module: nn.Module) -> list[Part]:
    return [(f"{name}.{part}", value) for part, value in own_parts(module)]


def _check_buffers(plan: _Allocation, limits: Mapping[Device, int], count: Callable[[nn.Module], int]) -> None:
    """Buffers of offloaded parts stay on the device that runs them, and nothing was reserved for them."""
    accelerators = [device for device in limits if device not in ("cpu", DISK)]
    offloaded = [module for device in ("cpu", DISK) for module in plan.modules.get(device, ())]
    if not accelerators or not offloaded:
        return
    needed = sum(map(count, offloaded))
    if needed and all(limits[device] < needed + plan.used[device] for device in accelerators):
        warnings.warn(
            f"The buffers of offloaded parts take {in_words(needed)}, which no accelerator has left. If memory runs "
            "out, pass offload_buffers=True.",
            stacklevel=3,
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Replace entries below a module that all have one device by one for the module, at any depth; in place."""
    prefix = f"{module_name}." if module_name else ""
    below = {key: place for key, place in device_map.items() if key.startswith(prefix)}
    merged = _merged(below, module_name, prefix)
    entries = list(device_map.items())
    device_map.clear()
    for key, place in entries:
        device_map.update(merged if key in below else {key: place})
    return device_map


def _merged(entries: Mapping[str, Any], name: str, prefix: str) -> dict[str, Any]:
    places = list(entries.values())
    if len(places) > 1 and all(place == places[0] for place in places):
        return {name: places[0]}
    result: dict[str, Any] = {}
    heads: dict[str, dict[str, Any]] = {}
    for key, place in entries.items():
        heads.setdefault(prefix + key[len(prefix) :].partition(".")[0], {})[key] = place
    for head, below in heads.items():
        inside = {key: place for key, place in below.items() if key != head}
        result |= {key: place for key, place in below.items() if key == head}
        result |= _merged(inside, head, f"{head}.") if inside else {}
    return result
