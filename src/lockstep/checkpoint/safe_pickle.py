"""What can be stored so that reading it runs nobody's code: tensors and plain values.

``torch.load(weights_only=True)`` reads these. Whatever else a state holds is refused when it is saved, while its owner
is there to be named, and not when it is loaded and all is lost.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.model_files import pickle_opcodes
from lockstep.model_files.parallel_read import LARGE, Outline, UnfitError
from lockstep.model_files.shared_tensors import view_key
from lockstep.model_files.torch_file import WriteAhead
from lockstep.storage.hashing import HashedFile
from lockstep.storage.open_files import Opener, open_regular

_PLAIN = (type(None), bool, int, float, complex, str)
_TORCH = (torch.dtype, torch.device, torch.Size)
_TAG = "__lockstep__"
_DEEPEST = 100
_DTYPE = re.compile(r"\|[bui]1|[<>]([ui][248]|f(2|4|8|16)|c(8|16|32))")
_MOST_DIMENSIONS = 32
"""Of an array, with any numpy."""


def pack(value: Any, what: str) -> Any:
    """The value in its safe form; CheckpointError that says where in ``what`` something cannot be stored."""
    return _pack(value, what, (), 0)


def _pack(value: Any, what: str, path: tuple[Any, ...], depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or kind in _TORCH:
        return value
    if kind is bytes:  # torch reads most bytes, but not all
        return {_TAG: "bytes", "data": _as_tensor(value)}
    if isinstance(value, Tensor):
        if value.layout is torch.strided and kind in (Tensor, torch.nn.Parameter) and not value.is_quantized:
            value = value.detach()
            # A few bytes that stand for many are not believed when they are read.
            return value.contiguous() if value.nbytes > value.untyped_storage().nbytes() else value
        raise _refusal(what, path, f"a tensor of the kind {kind.__name__} ({value.layout})")
    if depth > _DEEPEST:
        raise _refusal(what, path[:3], "nested too deeply, or holds itself")
    if kind in (list, tuple, set):
        return kind(_pack(item, what, (*path, place), depth + 1) for place, item in enumerate(value))
    if kind in (dict, OrderedDict, Counter):
        packed = [(_key(key, what, path), _pack(item, what, (*path, key), depth + 1)) for key, item in value.items()]
        return kind(dict(packed)) if kind is Counter else kind(packed)
    if isinstance(value, np.generic) and isinstance(value.item(), _PLAIN):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.kind not in "biufc" or value.ndim > _MOST_DIMENSIONS:
            raise _refusal(what, path, f"an array of {value.dtype}")
        data = _as_tensor(np.ascontiguousarray(value).tobytes())
        return {_TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    raise _refusal(what, path, f"a {kind.__module__}.{kind.__qualname__}")


def _key(key: Any, what: str, path: tuple[Any, ...]) -> Any:
    if isinstance(key, np.generic):
        return key.item()
    if type(key) in _PLAIN or (type(key) is tuple and all(type(item) in _PLAIN for item in key)):
        return key
    raise _refusal(what, path, f"a key that is a {type(key).__module__}.{type(key).__qualname__}")


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _refusal(what: str, path: tuple[Any, ...], found: str) -> CheckpointError:
    where = "".join(f"[{step!r}]" for step in path)
    return CheckpointError(
        f"The state of {what} cannot be saved: its state_dict(){where} is {found}. Only tensors, numpy arrays and "
        "plain values (None, bool, int, float, str, bytes; list, tuple, set, dict) can be read again without running "
        "code from the file. Have state_dict() give those."
    )


def unpack(value: Any, path: Path | str) -> Any:
    """The value that ``pack`` was given; CheckpointError that names the file when what stands for an array is none."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(unpack(item, path) for item in value)
    if isinstance(value, dict):
        if value.keys() in ({_TAG, "data"}, {_TAG, "dtype", "shape", "data"}):
            return _unpack_tagged(value, path)
        if kind is Counter:
            return Counter(value)
        return kind((key, unpack(item, path)) for key, item in value.items())
    return value


def _unpack_tagged(value: dict[Any, Any], path: Path | str) -> Any:
    data, kind, name, shape = (value.get(key) for key in ("data", _TAG, "dtype", "shape"))
    if isinstance(data, Tensor) and data.dtype is torch.uint8 and data.ndim == 1 and data.is_contiguous():
        if kind == "bytes":
            return data.numpy().tobytes()
        if kind == "ndarray" and isinstance(name, str) and _DTYPE.fullmatch(name) and _is_shape(shape):
            dtype = np.dtype(name)
            if math.prod(shape) * dtype.itemsize == data.numel():
                return np.frombuffer(data.numpy().tobytes(), dtype=dtype).reshape(shape).copy()
    raise CheckpointError(f"{path} is damaged: it holds an array or bytes whose type, shape and size contradict.")


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    whole = isinstance(value, list) and all(type(length) is int and 0 <= length < 2**63 for length in value)
    return whole and len(value) <= _MOST_DIMENSIONS


def write(value: Any, file: HashedFile) -> None:
    """Write a packed value as torch does; an error of the disk comes out as it is."""
    try:
        with WriteAhead(file, tensors(value)) as ahead:
            torch.save(value, ahead)  # type: ignore[arg-type]  # has what torch uses of a file
    except RuntimeError:
        if file.error is not None:  # torch makes an error of its own of it
            raise file.error from None
        raise


Fill = Callable[[Path, Outline], None]
"""Reads a file into the tensors of its outline."""


def read(path: Path, *, trusted: bool = False, fill: Fill | None = None, opener: Opener = open_regular) -> Any:
    """A value from a file; CheckpointError that names the file when it holds anything but safe values.

    ``trusted`` reads whatever was pickled there, which can run any code. ``fill`` is asked to read large files.
    """
    with open(opener(path), "rb") as file:
        file.seek(0)
        try:
            if trusted:
                return torch.load(file, map_location="cpu", weights_only=False)
            size = os.fstat(file.fileno()).st_size
            with torch.serialization.safe_globals(_numpy_parts()):
                value = _load(file, path, fill if size >= LARGE else None)
            pickle_opcodes.check_value(value, path, size)
            return value
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            hint = "" if trusted else " " + pickle_opcodes.HINT
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, or is damaged ({_first_line(error)}).{hint}"
            ) from None
        except Exception as error:  # whatever torch's reader makes of a file that is none of its own
            raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from None


def _load(file: BinaryIO, path: Path, fill: Fill | None) -> Any:
    archive = pickle_opcodes.check_file(file, path)
    if fill is not None:
        with suppress(UnfitError, NotImplementedError):
            outline = Outline(file, archive)
            fill(path, outline)
            return outline.value
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _numpy_parts() -> list[Any]:
    """What Accelerate's random states are made of besides tensors: a plain array of numbers."""
    from numpy.dtypes import UInt32DType

    reconstruct = np.empty(0).__reduce__()[0]
    return [reconstruct, np.ndarray, np.dtype, UInt32DType]


def _first_line(error: BaseException) -> str:
    """What went wrong, without the advice that torch puts around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = [line.partition("WeightsUnpickler error:")[2].strip() for line in lines if "WeightsUnpickler error:" in line]
    return (said or lines)[0][:300]


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a packed value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(part)


def copy_to_host(value: Any) -> Any:
    """A packed value with tensors of its own in host memory."""
    made: dict[Any, Tensor] = {}  # what was one tensor under two names stays one

    def copy(part: Any) -> Any:
        if isinstance(part, Tensor):
            key = view_key(part)
            if key not in made:
                made[key] = part.detach().to("cpu", copy=True)
            return made[key]
        if isinstance(part, Mapping):
            return type(part)((key, copy(item)) for key, item in part.items())  # type: ignore[call-arg]
        if type(part) in (list, tuple):
            return type(part)(copy(item) for item in part)
        return part

    return copy(value)
