"""Files written by ``torch.save`` that hold a state dict. Only tensors and plain values are ever unpickled."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.model_files import pickle_opcodes
from lockstep.model_files.parallel_read import Outline, UnfitError
from lockstep.model_files.shared_tensors import id_tensor_storage, view_key
from lockstep.model_files.tensor_entry import InFile
from lockstep.model_files.writer import PLAIN, Opened, Sink
from lockstep.storage.open_files import Opener, open_regular

_WORTH_A_THREAD = 1 << 18
"""Bytes."""


class WriteAhead:
    """An opened file for ``torch.save``: while torch computes the checksum of a record, the one before is written.

    ``kept``: tensors that stay in memory until the region ends. Whatever else torch passes on is written at once.
    """

    def __init__(self, file: Opened, kept: Iterable[Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in kept if tensor.device.type == "cpu")
        self._kept = {storage.data_ptr() for storage in storages if storage.nbytes() >= _WORTH_A_THREAD}
        self._file, self._pending = file, Future[object]()
        self._pending.set_result(None)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lockstep-write-ahead")

    def write(self, data: bytes | memoryview) -> int:
        """Write these bytes after those before them, or raise what these have met."""
        view = memoryview(data)
        self.flush()
        if len(view) >= _WORTH_A_THREAD and np.frombuffer(view, np.uint8).ctypes.data in self._kept:
            self._pending = self._pool.submit(self._file.write, view)
        else:
            self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Wait until all is written."""
        self._pending.result()

    def __enter__(self) -> WriteAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def write(state: Mapping[str, Any], path: Path, sink: Sink = PLAIN) -> None:
    """Write the state dict; tensors that share memory in it do so again in the file."""
    compact = _compact(state)
    kept = (value for value in compact.values() if isinstance(value, Tensor) and value.layout == torch.strided)
    with sink.open(path) as file, WriteAhead(file, kept) as ahead:
        torch.save(compact, ahead)  # type: ignore[arg-type]  # has what torch uses of a file


def _compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same on the host, so that it loads on any machine; a part of a large storage without the rest of it."""
    keys, sharers = {}, dict[Any, set[Any]]()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            keys[name] = storage, view = id_tensor_storage(value), view_key(value)
            sharers.setdefault(storage, set()).add(view)
    made: dict[Any, Tensor] = {}
    result = dict(state)
    for name, (storage, view) in keys.items():
        if view not in made:
            host = state[name].detach().cpu()
            alone = len(sharers[storage]) == 1
            made[view] = host.clone() if alone and host.untyped_storage().nbytes() > host.nbytes else host
        result[name] = made[view]
    return result


@dataclass(frozen=True)
class TorchTensor(InFile):
    """One tensor of a file."""

    file: TorchFile = field(repr=False)

    def read(self) -> Tensor:
        """A view of the mapped file; changing it changes memory only."""
        return self.file.state()[self.name]

    def read_into(self, target: Tensor) -> None:
        """Copy from the mapped file."""
        target.copy_(self.read())


class TorchFile:
    """A file that has been read as a state dict, mapped into memory where its format allows."""

    def __init__(self, path: Path, opener: Opener = open_regular, *, hashed: bool = False) -> None:
        """``hashed``: the caller compares the whole file with its hash, so that its own checksums need not hold."""
        self.path = path
        self._file = open(opener(path), "rb")  # noqa: SIM115  # closed by close()
        self._state: Mapping[str, Any] | None = None
        try:
            self._archive = pickle_opcodes.check_file(self._file, path)
            if self._archive is not None and not hashed:
                self._archive.check_sums()
            self.entries: dict[str, Any] = {
                name: TorchTensor(name, tuple(value.shape), value.dtype, self) if isinstance(value, Tensor) else value
                for name, value in self.state().items()
            }
        except BaseException:
            self.close()
            raise

    def state(self) -> Mapping[str, Any]:
        """What the file holds; read again where it was let go of."""
        if self._state is None:
            self._state = self._load()
        return self._state

    def rest(self) -> None:
        """Hold no memory until something is read again."""
        self._state = None

    def close(self) -> None:
        """Let go of the file; tensors that were read from it stay valid."""
        self.rest()
        self._file.close()

    def _load(self) -> Mapping[str, Any]:
        path = self.path
        try:
            state = self._value()
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, or is damaged, and nothing else is loaded from it "
                f"({_first_line(error)})."
            ) from None
        except Exception as error:  # whatever torch's reader makes of a file that is none of its own
            raise CheckpointError(f"{path} cannot be read by torch: {_first_line(error)}") from None
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict.")
        return state

    def _value(self) -> Any:
        with suppress(UnfitError, NotImplementedError):  # quantized tensors cannot be told of without their values
            return Outline(self._file, self._archive, mapped=True).value
        self._file.seek(0)
        return torch.load(self._file, map_location="cpu", weights_only=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
