"""Files written by ``torch.save`` that hold a state dict. Only tensors and plain values are ever unpickled."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.sharing import id_tensor_storage, view_key
from lockstep.checkpoint.sink import PLAIN, Opened, Sink
from lockstep.checkpoint.stored import InFile, open_regular
from lockstep.errors import CheckpointError


class _ForTorch:
    """An opened file with what else ``torch.save`` asks of one."""

    def __init__(self, file: Opened) -> None:
        self.write = file.write

    def flush(self) -> None:
        """Nothing: who opened the file closes it."""


def write(state: Mapping[str, Any], path: Path, sink: Sink = PLAIN) -> None:
    """Write the state dict; tensors that share memory in it do so again in the file."""
    with sink.open(path) as file:
        torch.save(_compact(state), _ForTorch(file))  # type: ignore[arg-type]  # has what torch uses of a file


def _compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same on the host, so that it loads on any machine; a part of a large storage without the rest of it."""
    sharers: dict[Any, set[Any]] = {}
    for value in state.values():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            sharers.setdefault(id_tensor_storage(value), set()).add(view_key(value))
    made: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        host = tensor.detach().cpu()
        alone = len(sharers[id_tensor_storage(tensor)]) == 1
        return host.clone() if alone and host.untyped_storage().nbytes() > host.nbytes else host

    result = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            key = view_key(value)
            if key not in made:
                made[key] = copy(value)
            value = made[key]
        result[name] = value
    return result


@dataclass(frozen=True)
class TorchTensor(InFile):
    """One tensor of a file."""

    file: TorchFile = field(repr=False)
    """The file that it is in."""

    def read(self) -> Tensor:
        """A view of the mapped file; changing it changes memory only."""
        return self.file.state()[self.name]

    def read_into(self, target: Tensor) -> None:
        """Copy from the mapped file."""
        target.copy_(self.read())


class TorchFile:
    """A file that has been read as a state dict, mapped into memory where its format allows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_regular(path)
        try:
            self._modern = self._check_archive(descriptor)
        finally:
            os.close(descriptor)
        self._state: Mapping[str, Any] | None = None
        self.entries: dict[str, Any] = {
            name: TorchTensor(name, tuple(value.shape), value.dtype, self) if isinstance(value, Tensor) else value
            for name, value in self.state().items()
        }

    def state(self) -> Mapping[str, Any]:
        """What the file holds; read again where it was let go of."""
        if self._state is None:
            self._state = self._load()
        return self._state

    def rest(self) -> None:
        """Hold no memory until something is read again."""
        self._state = None

    close = rest

    def _load(self) -> Mapping[str, Any]:
        path = self.path
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=self._modern)
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

    def _check_archive(self, descriptor: int) -> bool:
        """Whether it is an archive, as torch writes them since 1.6. Torch itself does not look at their checksums."""
        with open(descriptor, "rb", closefd=False) as file:
            if not zipfile.is_zipfile(file):
                return False
            try:
                with zipfile.ZipFile(file) as archive:
                    if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                        raise CheckpointError(f"{self.path} is a compressed archive, which torch does not write.")
                    bad = archive.testzip()
            except CheckpointError:
                raise
            except Exception as error:  # zipfile raises many kinds for a damaged archive
                raise CheckpointError(f"{self.path} is damaged: {_first_line(error)}") from None
        if bad is not None:
            raise CheckpointError(
                f"{self.path} is damaged: the checksum of {bad} does not hold (nor would it, if the file was written "
                "with torch.serialization.set_crc32_options(False))."
            )
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
