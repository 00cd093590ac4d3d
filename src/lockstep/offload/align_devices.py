"""The hook that brings weights and inputs to the device a module runs on, and takes offloaded weights off again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.trees import flatten, send_to_device
from lockstep.errors import CheckpointError, UsageError
from lockstep.logging import get_notices
from lockstep.offload.hooks import ModelHook, add_hook_to_module, hooks_of
from lockstep.offload.module_sizes import children, get_non_persistent_buffers, named_module_tensors
from lockstep.offload.offloaded_weights import PrefixedDataset
from lockstep.offload.set_tensor import Place, TiedParams, owner_table, placed, set_module_tensor_to_device
from lockstep.torch_internals.module import parameters_of


class AlignDevicesHook(ModelHook):
    """Puts inputs, and the weights where they are offloaded, onto one device for the forward.

    Args:
        execution_device: Where the forward runs.
        offload: Whether the weights are on the meta device between forwards.
        io_same_device: Whether the output goes to where the input was.
        weights_map: The values of offloaded weights by name; by default those that they have, kept on the CPU.
        offload_buffers: Whether buffers are offloaded as well.
        place_submodules: Whether the weights of all modules inside are meant.
        skip_keys: Keyword arguments that stay where they are.
        tied_params_map: By address of a tied weight, what each device has of it.
    """

    only: frozenset[str] | None = None
    """The tensors that are meant, where it is not all of the module's."""

    def __init__(
        self,
        execution_device: Place | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device, self.offload, self.io_same_device = execution_device, offload, io_same_device
        self.weights_map, self.offload_buffers, self.place_submodules = weights_map, offload_buffers, place_submodules
        self.skip_keys, self.tied_params_map = skip_keys, tied_params_map
        self.original_devices: dict[str, torch.device] = {}
        """Where each weight was before."""
        self.input_device: torch.device | None = None
        """Where the input of this forward was."""
        self._slots: list[tuple[str, dict[str, Any], str]] = []
        self._resting: list[Tensor] = []
        self._lent: list[tuple[int, Any]] = []
        self._depth = 0

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    # --- adding and removing -------------------------------------------------------------------------------------

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the weights, or offload them."""
        if not self.offload:
            if self.execution_device is not None:
                self._place(module, [name for name, _ in self._tensors(module)])
            return module
        tensors = dict(self._tensors(module))
        unsaved = get_non_persistent_buffers(module, recurse=self.place_submodules)
        buffers = {name for name, _ in module.named_buffers(recurse=self.place_submodules)} & set(tensors)
        stay = buffers if not self.offload_buffers else buffers & unsaved
        self.original_devices = {name: value.device for name, value in tensors.items()}
        if self.weights_map is None:
            self.weights_map = {name: value.detach().to("cpu") for name, value in tensors.items() if name not in stay}
        names = [name for name in tensors if name not in stay]
        self._check(names)
        self._slots = [(name, *owner_table(module, name)) for name in names]
        for name in names:
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is not None:
            self._place(module, [name for name in stay if not tensors[name].is_meta])
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring the weights back to where they were before the hook was added; on meta they stay there."""
        for name, table, attribute in self._slots:
            device = self.original_devices[name]
            if device.type != "meta" and self.weights_map is not None:
                value = self.weights_map[name]
                table[attribute] = placed(table[attribute], value, device, table[attribute].dtype)
        self._slots = []
        return module

    def _tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, value in named_module_tensors(module, recurse=self.place_submodules):
            if self.only is None or name in self.only:
                yield name, value

    def _place(self, module: nn.Module, names: list[str]) -> None:
        assert self.execution_device is not None
        for name in names:
            set_module_tensor_to_device(module, name, self.execution_device, tied_params_map=self.tied_params_map)

    def _check(self, names: list[str]) -> None:
        assert self.weights_map is not None
        if absent := [name for name in names if name not in self.weights_map]:
            raise CheckpointError(
                f"{', '.join(absent[:5])} of a module that is to be offloaded have no values in weights_map "
                f"({', '.join(list(self.weights_map)[:5])} …). Offload the state dict of this model."
            )

    # --- around a forward ----------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring weights and inputs."""
        if torch.compiler.is_compiling():  # reading files is no part of a graph
            return torch.compiler.disable(self._enter)(args, kwargs)
        return self._enter(args, kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = _device_of((args, kwargs))
        if self.offload:
            self._depth += 1
            if self._depth == 1:
                self._load()
        device = self.execution_device
        if device is None:
            return args, kwargs
        return _send(args, device, None), _send(kwargs, device, self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the weights off; bring the output."""
        return torch.compiler.disable(self._leave)(output) if torch.compiler.is_compiling() else self._leave(output)

    def _leave(self, output: Any) -> Any:
        if self.offload:
            self._release()
        if self.io_same_device and self.input_device is not None:
            output = _send(output, self.input_device, self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Take the weights off."""
        if self.offload and self._depth:
            self._release()

    def _load(self) -> None:
        """Put the values in place. Should one of them not come, all are taken off again by ``forward_failed``."""
        assert self.weights_map is not None
        device = "cpu" if self.execution_device is None else self.execution_device
        self._resting = [table[attribute] for _, table, attribute in self._slots]
        learns = torch.is_grad_enabled()
        for (name, table, attribute), old in zip(self._slots, self._resting, strict=True):
            value = self.weights_map[name]
            tied = self.tied_params_map
            address = value.data_ptr()
            if tied is not None and address in tied and device not in tied[address]:
                self._lent.append((address, device))
            table[attribute] = here = placed(old, value, device, old.dtype, tied)
            if learns and here.requires_grad and isinstance(here, nn.Parameter):
                here.register_post_accumulate_grad_hook(_warn_of_lost_gradient)

    def _release(self) -> None:
        self._depth -= 1
        if self._depth:
            return  # the module calls itself
        for (_, table, attribute), old in zip(self._slots, self._resting, strict=False):
            table[attribute] = old
        self._resting = []
        for address, device in self._lent:
            if self.tied_params_map is not None:
                self.tied_params_map.get(address, {}).pop(device, None)
        self._lent = []

    def values(self) -> Iterator[tuple[Tensor, dict[str, Any], str, Tensor]]:
        """For each offloaded weight: what stands for it, where it is in its module, its name there, its values."""
        assert self.weights_map is not None or not self._slots
        for name, table, attribute in self._slots:
            yield table[attribute], table, attribute, self.weights_map[name]  # type: ignore[index]


def _warn_of_lost_gradient(parameter: Tensor) -> None:
    get_notices("lockstep.offload").warning(
        "A gradient was computed for a weight that is offloaded, and is lost when its module is done: no optimizer "
        "sees it. Freeze offloaded parts (requires_grad_(False)), run under torch.no_grad(), or train a model that is "
        "not offloaded."
    )


def _device_of(tree: Any) -> torch.device | None:
    return next((leaf.device for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)), None)


def _send(tree: Any, device: Place, skip_keys: str | list[str] | None) -> Any:
    """Moved only where something has to be: putting a structure together anew takes longer than looking at it."""
    wanted = torch.device(device)
    leaves = flatten(tree)[0]
    there = all(
        leaf.device == wanted if isinstance(leaf, Tensor) else not hasattr(leaf, "to") or _is_plain(leaf)
        for leaf in leaves
    )
    return tree if there else send_to_device(tree, wanted, skip_keys=skip_keys)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device))


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook of a module that offloads its weights, where it has one."""
    for hook in hooks_of(module):
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return hook
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook of this very module offloads its weights."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Inside, a module's own parameters are where its forward would have them, or on the device that is given."""
    hook = offloading_hook(module)
    if hook is not None:
        if hook._depth:
            raise UsageError("align_module_device cannot be entered while the module's forward runs.")
        before = hook.execution_device
        hook.execution_device = before if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.execution_device = before
            hook.forward_failed(module)
        return
    if execution_device is None:
        yield
        return
    own = dict(module.named_parameters(recurse=False))
    for name in own:
        set_module_tensor_to_device(module, name, execution_device)
    try:
        yield
    finally:
        for name, old in own.items():
            now = parameters_of(module)[name]
            if now is not None and now is not old and not now.is_meta:
                old.data = now.detach().to(old.device)  # what was changed inside stays changed
            parameters_of(module)[name] = old


# ---------------------------------------------------------------- attaching it to whole models


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Place,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Make every module inside that has weights, and no hook yet, bring its inputs to this device."""
    if "_hf_hook" not in module.__dict__ and len(module.state_dict(keep_vars=True)) > 0:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for _, child in children(module):
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Add an ``AlignDevicesHook`` to every module inside that has weights of its own."""
    preload = offload and type(module).__name__ in (preload_module_classes or ())
    if preload or next(named_module_tensors(module), None) is not None:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=preload,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        if not (offload and offloading_hook(module)):  # one that is used under two names has it already
            add_hook_to_module(module, hook, append=True)
    if preload:
        return
    for name, child in children(module):
        path = f"{module_name}.{name}" if module_name else name
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            path,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Add the hooks that a model needs of which each block has a device, and is offloaded or not, by its name."""
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    nested: dict[str, Any] = {"preload_module_classes": preload_module_classes, **shared}
    stored: dict[str, Any] = {"weights_map": weights_map, "offload_buffers": offload_buffers, **nested}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(module, execution_device, True, module_name=module_name, **stored)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
            add_hook_to_module(module, hook)
        return
    keys = offload if isinstance(offload, Mapping) else execution_device
    assert isinstance(keys, Mapping)
    devices: Mapping[str, Any] = (
        execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(keys, execution_device)
    )
    waits: Mapping[str, bool] = offload if isinstance(offload, Mapping) else dict.fromkeys(keys, offload)
    root = not module_name
    if module_name in devices and module_name in waits:
        device = devices[module_name]
        if waits[module_name]:
            attach_align_device_hook(module, device, True, module_name=module_name, **stored)
            hooks = [hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook)]
            if not hooks:
                add_hook_to_module(module, AlignDevicesHook(device, io_same_device=root, **shared))
            elif root:
                hooks[0].io_same_device = True
        else:
            hook = AlignDevicesHook(device, io_same_device=root, place_submodules=True, **shared)
            add_hook_to_module(module, hook)
        attach_execution_device_hook(module, device, **nested)
    elif root:
        hook = AlignDevicesHook(devices.get(""), io_same_device=True, **shared)
        hook.only = frozenset(name for name, value in named_module_tensors(module) if not value.is_meta)
        add_hook_to_module(module, hook)
    for name, child in children(module):
        path = f"{module_name}.{name}" if module_name else name
        attach_align_device_hook_on_blocks(child, devices, waits, module_name=path, **stored)
