"""Finding the model that ``lockstep estimate`` is asked about, without loading or downloading anything."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.limited_file import read_limited
from lockstep.errors import ConfigError
from lockstep.torch_internals.tensor import storage_key

SEQUENCE = 512
"""Tokens in a sample where neither the caller nor the model's configuration says less."""
_STORED = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool},
}
"""Names of types in a safetensors header."""
_LARGEST_HEADER = 100_000_000
"""Bytes of a header or an index; the format of safetensors allows no more."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids")
"""Ends of names that are buffers in every model known; a file does not tell them from parameters."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of a model."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Its type as it is built or stored."""
    trainable: bool
    """Whether it gets a gradient."""

    @property
    def count(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model, as far as it is known."""

    name: str
    """As it was asked for."""
    weights: tuple[Weight, ...]
    """All tensors, tied ones once."""
    layers: Mapping[str, int]
    """Numbers in each layer: the pieces that are never split between devices."""
    model: nn.Module | None
    """The model on the meta device; None when only its sizes are known."""
    batch: Callable[[int], Any] | None = None
    """From a batch size to a batch; None when nothing says what the model takes."""
    notes: tuple[str, ...] = ()
    """What the reader has to know about the figures."""


def find(name: str, *, sequence: int | None = None) -> FoundModel:
    """A folder with a model, or ``pkg.module:factory``."""
    if Path(name).is_dir():
        return _in_folder(name, Path(name), sequence)
    if ":" not in name:
        raise ConfigError(
            f"{name!r} is no folder (looked in {Path.cwd()}), and no Python path. Give a folder that holds config.json "
            "or safetensors files, or a function that makes the model, such as 'pkg.module:factory'. Nothing is "
            "downloaded."
        )
    return _of_module(name, _build(name, resolve(name)))


def resolve(path: str) -> Any:
    """The object behind ``pkg.module:name``, looked for from the working directory too."""
    module_name, _, rest = path.partition(":")
    if not module_name or not rest:
        raise ConfigError(f"{path!r} is no Python path. Write it as 'pkg.module:name'.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
        for part in rest.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path!r} cannot be found: {error}. It was looked for from {here} too.") from error
    return found


def _build(path: str, factory: Any) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ConfigError(f"{path!r} is of type {type(factory).__name__}. It must be a function that makes the model.")
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        # A factory is the user's code: whatever it raises is the answer.
        raise ConfigError(
            f"{path!r} failed when it was called, without arguments, on the meta device, where tensors have no data: "
            f"{type(error).__name__}: {error}. A model that needs data to be built can be measured from Python, by "
            "lockstep.utils.estimate_memory."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{path!r} gave an object of type {type(model).__name__}, not a torch.nn.Module.")
    return model


def _of_module(name: str, model: nn.Module, batch: Callable[[int], Any] | None = None) -> FoundModel:
    return FoundModel(name=name, weights=tuple(_weights(model)), layers=layers(model), model=model, batch=batch)


def _weights(model: nn.Module) -> Iterator[Weight]:
    for trained, named in ((True, model.named_parameters()), (False, model.named_buffers())):
        for key, tensor in named:
            trainable = trained and tensor.requires_grad
            yield Weight(name=key, shape=tuple(tensor.shape), dtype=tensor.dtype, trainable=trainable)


def layers(model: nn.Module) -> dict[str, int]:
    """Numbers in each layer: a module without children, or one that says it must not be split; tied weights in each."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    found: dict[str, int] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        children = dict(module.named_children())
        if not children or type(module).__name__ in whole:
            found[prefix] = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
            return
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found[f"{prefix}.{key}".lstrip(".")] = tensor.numel()
        for key, child in children.items():
            visit(child, f"{prefix}.{key}".lstrip("."))

    visit(model, "")
    return found


# --- folders ---------------------------------------------------------------------------------------------------------


def _in_folder(name: str, folder: Path, sequence: int | None) -> FoundModel:
    stored = tuple(_stored(folder))
    config = folder / "config.json"
    if not stored and not config.is_file():
        raise ConfigError(
            f"{name!r} holds neither config.json nor *.safetensors or *.bin files. Give the folder that a model was "
            "saved in."
        )
    model, note = _from_config(folder) if config.is_file() else (None, "There is no config.json.")
    notes = [f"Activations are not known: {note}"] if model is None else []
    if model is None and not stored:
        raise ConfigError(f"{name!r} holds no weights, and its config.json cannot be used: {note}")
    if model is not None and not stored:
        return _of_module(name, model, _batch_for(model, sequence))
    packed = [weight.name for weight in stored if not weight.dtype.is_floating_point and len(weight.shape) > 1]
    if packed:
        notes.append(
            f"{len(packed)} tensors, such as {packed[0]!r}, hold whole numbers: if the files are quantised, "
            "the model has more weights than is counted here."
        )
    if model is not None:
        notes += _compare(stored, model)
    return FoundModel(
        name=name,
        weights=stored,
        layers=_layers_of(stored) if model is None else layers(model),
        model=model,
        batch=None if model is None else _batch_for(model, sequence),
        notes=tuple(notes),
    )


def _compare(stored: Sequence[Weight], model: nn.Module) -> list[str]:
    in_files = sum(weight.count for weight in stored)
    built = sum(weight.count for weight in _weights(model))
    if abs(in_files - built) <= 0.01 * built:
        return []
    return [
        f"The files hold {in_files:,} numbers, the model of config.json {built:,}: sizes are those of the files, "
        "activations and peak those of config.json."
    ]


def _layers_of(stored: Sequence[Weight]) -> dict[str, int]:
    found: dict[str, int] = {}
    for weight in stored:
        layer = weight.name.rpartition(".")[0]
        found[layer] = found.get(layer, 0) + weight.count
    return found


def _stored(folder: Path) -> Iterator[Weight]:
    """The tensors in the files of a folder; safetensors go before bin files, which may hold the same once more."""
    for kind, read in (("safetensors", _safetensors_header), ("bin", _bin_shapes)):
        files = _files(folder, kind)
        if files:
            seen: set[str] = set()
            for file in files:
                for key, shape, dtype in read(file):
                    if key not in seen:
                        seen.add(key)
                        trainable = dtype.is_floating_point and not key.endswith(_STATISTICS)
                        yield Weight(name=key, shape=shape, dtype=dtype, trainable=trainable)
            return


def _files(folder: Path, kind: str) -> list[Path]:
    """The files that belong to the model: those of an index where there is one, else all of the kind."""
    for index in sorted(folder.glob(f"*.{kind}.index.json")):
        try:
            if not index.is_file():  # a link to one is, in the cache of Hugging Face
                raise ValueError("it is not a file")
            parts = sorted(set(json.loads(read_limited(index, _LARGEST_HEADER))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{index} cannot be read: {error!r}. It must be JSON with a weight_map.") from error
        missing = [part for part in parts if not (folder / part).is_file()]
        if missing:
            raise ConfigError(
                f"{index} names {len(missing)} of {len(parts)} files that are not there, such as {missing[0]!r}. "
                "Fetch them; their headers say how large the tensors are."
            )
        return [folder / part for part in parts]
    whole = folder / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    ours = {"safetensors": "*.safetensors", "bin": "*model*.bin"}[kind]
    return [whole] if whole.is_file() else sorted(file for file in folder.glob(ours) if file.is_file())


def _safetensors_header(file: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Only the header is read: eight bytes of length, then that much JSON."""
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 0 < length <= min(file.stat().st_size - 8, _LARGEST_HEADER):
                raise ValueError(f"the header would be {length} bytes, the file has {file.stat().st_size}")
            header = json.loads(stream.read(length))
        for key, entry in header.items():
            if key != "__metadata__":
                yield key, tuple(map(int, entry["shape"])), _STORED[entry["dtype"]]
    except KeyError as error:
        raise ConfigError(f"{file} holds a tensor of a type that is not known: {error}.") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ConfigError(f"{file} is not a safetensors file that can be read: {error}.") from error


def _bin_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    try:
        held = torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{file} cannot be read as weights: {type(error).__name__}: {error}") from error
    seen: set[tuple[Any, ...]] = set()  # weights that are tied are in the file under each of their names
    for key, tensor in held.items():
        place = (storage_key(tensor.untyped_storage()), tensor.storage_offset()) if isinstance(tensor, Tensor) else None
        if place is not None and place not in seen:
            seen.add(place)
            yield key, tuple(tensor.shape), tensor.dtype


# --- transformers ----------------------------------------------------------------------------------------------------


def _from_config(folder: Path) -> tuple[nn.Module | None, str]:
    """The model of a transformers configuration, on the meta device; or why there is none."""
    if util.find_spec("transformers") is None:
        return None, "transformers, which could build the model from its config.json, is not installed."
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        with torch.device("meta"):
            if named and named[0] is not None:
                return named[0](config).train(), ""
            return transformers.AutoModel.from_config(config, trust_remote_code=False).train(), ""
    except Exception as error:
        # Whatever goes wrong inside another library, the sizes of the files are still an answer.
        return None, f"transformers cannot build the model of config.json: {type(error).__name__}: {error}"


def _batch_for(model: Any, sequence: int | None) -> Callable[[int], Any] | None:
    """What a transformers model takes, as far as its configuration says it."""
    config = model.config
    taken = getattr(model, "main_input_name", None)
    labelled = type(model).__name__.rpartition("For")[2]
    if taken == "input_ids":
        longest = getattr(config, "max_position_embeddings", None) or SEQUENCE
        length = sequence or min(SEQUENCE, longest)

        def tokens(size: int) -> dict[str, Tensor]:
            batch = {"input_ids": torch.zeros(size, length, dtype=torch.int64)}
            if labelled in ("CausalLM", "MaskedLM", "ConditionalGeneration") or labelled.endswith("LMHeadModel"):
                batch["labels"] = torch.zeros(size, length, dtype=torch.int64)
            elif labelled == "SequenceClassification":
                batch["labels"] = torch.zeros(size, dtype=torch.int64)
            return batch

        return tokens
    if taken == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        channels, side = getattr(config, "num_channels", 3), config.image_size

        def images(size: int) -> dict[str, Tensor]:
            batch = {"pixel_values": torch.zeros(size, channels, side, side)}
            return batch | (
                {"labels": torch.zeros(size, dtype=torch.int64)} if labelled == "ImageClassification" else {}
            )

        return images
    return None
