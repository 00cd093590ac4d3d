"""Parameters that a model uses under several names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.errors import ConfigError
from lockstep.logging import get_logger
from lockstep.model_files.device_map import covering


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """The groups of names, each sorted, that are one parameter of the model."""
    if kwargs:
        raise ConfigError(f"find_tied_parameters takes a model only, not {', '.join(kwargs)}.")
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make each group of names one parameter again: the first of them that has values."""
    for names in tied_params:
        owners = [_owner(model, name) for name in names]
        values = [getattr(module, attribute) for module, attribute in owners]
        there = next((value for value in values if value is not None and not value.is_meta), None)
        if there is not None:
            for module, attribute in owners:
                setattr(module, attribute, there)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a model of transformers says that it ties weights; False for others."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    words = bool(getattr(text, "tie_word_embeddings", False)) and model.get_output_embeddings() is not None  # type: ignore[operator]
    halves = bool(getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    return words or halves or any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of groups that a map puts on several devices, where each gets a copy of its own."""
    for names in tied_params:
        places = {name: device_map.get(covering(name, device_map)) for name in names}
        if len(set(places.values())) > 1:
            told = ", ".join(f"{name} on {place}" for name, place in places.items())
            get_logger(__name__).warning(
                f"Tied parameters are on different devices: {told}. Put their modules on one device, or use "
                'device_map="auto".'
            )
