"""Folders that somebody has damaged or forged: each kind changes a copy of a checkpoint and gives the file to blame.

Whoever forges a file can forge its hash too: unless a kind is about the manifest, ``sign`` makes a valid one for it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.storage import hashing, manifest
from lockstep.storage.manifest import Manifest, ManifestEntry

Kind = Callable[[Path], str]
"""Damages a folder; the name of the file that an error has to name."""
KINDS: dict[str, Kind] = {}

FILES = [
    "model.safetensors",
    "optimizer.bin",
    "scheduler.bin",
    "dl_state_dict.bin",
    "custom_checkpoint_0.pkl",
    "random_states_0.pkl",
    "gradients_0.bin",
    "lockstep_state.json",
    manifest.NAME,
]
"""Of each kind one."""


VARIANTS: set[str] = set()
"""Kinds that differ from another one in the file alone, or that take long."""


def kind(make: Kind) -> Kind:
    KINDS[make.__name__] = make
    return make


def sign(folder: Path) -> None:
    """A manifest that fits whatever is in the folder."""
    about = manifest.read(folder).about
    files = {}
    for path in folder.iterdir():
        if path.name != manifest.NAME:
            size, chunks = hashing.hash_file(path)
            files[path.name] = ManifestEntry(size=size, chunks=chunks)
    (folder / manifest.NAME).write_bytes(Manifest(files=files, about=about).dump())


def forged(name: str, content: bytes) -> Kind:
    """The file has this content, and the manifest agrees."""

    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        sign(folder)
        return name

    return make


# ---------------------------------------------------------------- what is no file


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address has at most 108 letters
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _folder(path: Path) -> None:
    path.mkdir()


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _terminal(path: Path) -> None:
    path.symlink_to("/dev/stdin")


def _put(name: str, what: Callable[[Path], None]) -> Kind:
    def make(folder: Path) -> str:
        (folder / name).unlink()
        what(folder / name)
        return name

    return make


def _linked(name: str) -> Kind:
    """The very file, by a link: what is behind it may be another one at the next look."""

    def make(folder: Path) -> str:
        (folder / name).rename(folder.parent / f"{folder.name}-{name}")
        (folder / name).symlink_to(folder.parent / f"{folder.name}-{name}")
        return name

    return make


_ODD = (_pipe, _device, _socket, _folder, _zeros, _dangling, _loop, _terminal)
for _number, _name in enumerate(FILES):
    for _place, _what in enumerate(_ODD):
        KINDS[f"{_name} is a{_what.__name__}"] = _put(_name, _what)
        if _number % len(_ODD) != _place:
            VARIANTS.add(f"{_name} is a{_what.__name__}")
    KINDS[f"{_name} is a link"] = _linked(_name)


# ---------------------------------------------------------------- safetensors

WEIGHTS = "model.safetensors"
_DEEP = 20_000


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _weight(**change: Any) -> dict[str, Any]:
    return {"0.bias": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24], **change}}


_TWICE = json.dumps(_weight())[:-1] + "," + json.dumps(_weight())[1:]
HEADERS = {
    "of no bytes": b"",
    "that ends in its length": b"\x10\0\0\0",
    "of 2**63 bytes": safetensors(b"{}", length=2**63),
    "of 99 MB in a short file": safetensors(b"{}", length=99_000_000),
    "that is deep": safetensors(b"[" * _DEEP),
    "that is a deep table": safetensors(b'{"a":' * _DEEP),
    "of many empty lists": safetensors(b'{"a":[' + b"[]," * 1_500_000 + b"[]]}"),
    "of many numbers": safetensors(b'{"a":[' + b"0," * 2_000_000 + b"0]}"),
    "of many blanks": safetensors(b"{" + b" " * 40_000_000 + b"}"),
    "with a name twice": safetensors(_TWICE.encode(), bytes(24)),
    "that overlaps": safetensors({**_weight(), "0.x": _weight()["0.bias"]}, bytes(24)),
    "that leaves a gap": safetensors(_weight(data_offsets=[8, 32]), bytes(32)),
    "that points behind the end": safetensors(_weight(data_offsets=[2**40, 2**40 + 24]), bytes(24)),
    "that points before the start": safetensors(_weight(data_offsets=[-24, 0]), bytes(24)),
    "with a negative size": safetensors(_weight(shape=[-6]), bytes(24)),
    "with two negative sizes": safetensors(_weight(shape=[-2, -3]), bytes(24)),
    "with a fraction as size": safetensors(_weight(shape=[6.0]), bytes(24)),
    "with a truth value as size": safetensors(_weight(shape=[True, 6]), bytes(24)),
    "with sizes that overflow": safetensors(_weight(shape=[2**32, 2**32, 6]), bytes(24)),
    "with a huge shape of nothing": safetensors(_weight(shape=[0] * 10_000, data_offsets=[0, 0])),
    "with a long number": safetensors(b'{"a":{"shape":[' + b"9" * 5000 + b"]}}"),
    "with an unknown dtype": safetensors(_weight(dtype="F31"), bytes(24)),
    "with a wrong shape": safetensors(_weight(shape=[3], data_offsets=[0, 12]), bytes(12)),
    "with metadata of lists": safetensors({"__metadata__": {"a": []}, **_weight()}, bytes(24)),
    "of another encoding": safetensors('{"ä":1}'.encode("latin-1")),
    "that is null": safetensors(b"null"),
    "of other names": safetensors({"other": _weight()["0.bias"]}, bytes(24)),
}
for _text, _content in HEADERS.items():
    KINDS[f"a header {_text}"] = forged(WEIGHTS, _content)


# ---------------------------------------------------------------- JSON

COUNTERS = "lockstep_state.json"


def _counters(**change: Any) -> Kind:
    def make(folder: Path) -> str:
        state = json.loads((folder / COUNTERS).read_bytes())
        window = {**state["window"], **change.pop("window", {})}
        return forged(COUNTERS, json.dumps({**state, "window": window, **change}).encode())(folder)

    return make


for _name, _value in {
    "a world of 1e9": 10**9, "a world of 1e300": 1e300, "a world of 2**70": 2**70, "a world of 0": 0,
    "a world of -1": -1, "a world of true": True, "a world of text": "2",
}.items():  # fmt: skip
    KINDS[_name] = _counters(world_size=_value)
KINDS |= {
    "2**80 updates": _counters(updates=2**80),
    "-1 updates": _counters(updates=-1),
    "half an update": _counters(updates=0.5),
    "2**50 loaders": _counters(loaders=2**50),
    "2**50 optimizers": _counters(optimizers=2**50),
    "models of text": _counters(models="1"),
    "no schedulers": _counters(schedulers=None),
    "a window of 2**70 steps": _counters(window={"step": 2**70}),
    "a window that is filled with text": _counters(window={"filled": "much"}),
    "a window divided by 0": _counters(window={"divisor": 0}),
    "a scale of text": _counters(window={"item_scale": []}),
    "counters that are deep": forged(COUNTERS, b"[" * _DEEP),
    "counters that are huge": forged(COUNTERS, b"[" + b"[]," * 1_500_000 + b"[]]"),
    "counters that are null": forged(COUNTERS, b"null"),
    "counters that are twice there": forged(COUNTERS, b'{"window":{},"window":{}}'),
    "counters that are no JSON": forged(COUNTERS, b"\xff\xfe\0"),
    "counters of nothing": forged(COUNTERS, b""),
}


# ---------------------------------------------------------------- the manifest


def _manifest(change: Callable[[dict[str, Any]], Any], checksum: bool = True) -> Kind:
    def make(folder: Path) -> str:
        body = json.loads((folder / manifest.NAME).read_bytes())
        del body["checksum"]
        change(body)
        if checksum:
            body["checksum"] = manifest._checksum(body)
        (folder / manifest.NAME).write_text(json.dumps(body))
        return manifest.NAME

    return make


def _listed(name: str) -> Kind:
    """The manifest lists a further file, which exists where the name leads."""

    def make(folder: Path) -> str:
        (folder.parent / "outside.bin").write_bytes(b"")
        entry = {"size": 0, "chunks": [hashing.Digests().finish()[0]]}
        return _manifest(lambda body: body["files"].__setitem__(name, entry))(folder)

    return make


for _name in ("../outside.bin", "sub/../../outside.bin", "/etc/passwd", "a\0b", "a\\b", ".", "", "./x", "a//b",
              "x" * 2000, "\x1b[2J", manifest.NAME):  # fmt: skip
    KINDS[f"a manifest that lists {_name[:30]!r}"] = _listed(_name)


def _content(text: bytes) -> Kind:
    def make(folder: Path) -> str:
        (folder / manifest.NAME).write_bytes(text)
        return manifest.NAME

    return make


KINDS |= {
    "a manifest of nothing": _content(b""),
    "a manifest that is deep": _content(b"[" * _DEEP),
    "a manifest of many lists": _content(b"[" + b"[]," * 4_000_000 + b"[]]"),
    "a manifest of many numbers": _content(b"[" + b"0," * 8_000_000 + b"0]"),
    "a manifest of 20 MB": _content(b" " * 20_000_000),
    "a manifest with a name twice": _content(b'{"version": 1, "version": 1}'),
    "a manifest without its checksum": _manifest(lambda body: None, checksum=False),
    "a manifest of no files": _manifest(lambda body: body.update(files={})),
    "a manifest of the future": _manifest(lambda body: body.update(version=2)),
    "a manifest of version true": _manifest(lambda body: body.update(version=True)),
    "a manifest of another hash": _manifest(lambda body: body.update(algorithm="md5")),
    "a manifest of chunks of 0": _manifest(lambda body: body.update(chunk=0)),
    "a manifest of chunks of 1": _manifest(lambda body: body.update(chunk=1)),
    "a manifest of chunks of 2**70": _manifest(lambda body: body.update(chunk=2**70, files={"a": {}})),
    "a manifest of a negative size": _manifest(lambda body: body["files"][WEIGHTS].update(size=-1)),
    "a manifest of size true": _manifest(lambda body: body["files"][WEIGHTS].update(size=True)),
    "a manifest of 2**62 bytes": _manifest(lambda body: body["files"][WEIGHTS].update(size=2**62)),
    "a manifest with too many hashes": _manifest(lambda body: body["files"][WEIGHTS].update(chunks=["0" * 32] * 2)),
    "a manifest of hashes of lists": _manifest(lambda body: body["files"][WEIGHTS].update(chunks=[[]])),
    "a manifest without counters": _manifest(lambda body: body["files"].pop(COUNTERS)),
}


@kind
def a_manifest_of_a_wrong_size(folder: Path) -> str:
    _manifest(lambda body: body["files"][WEIGHTS].update(size=3))(folder)
    return WEIGHTS


@kind
def a_manifest_of_another_hash_of_a_file(folder: Path) -> str:
    _manifest(lambda body: body["files"][WEIGHTS].update(chunks=["0" * 32]))(folder)
    return WEIGHTS


@kind
def a_manifest_without_the_model(folder: Path) -> str:
    """The file is there: whatever is not listed is not read."""
    _manifest(lambda body: body["files"].pop(WEIGHTS))(folder)
    return WEIGHTS


@kind
def a_manifest_that_writes_the_model_in_capitals(folder: Path) -> str:
    (folder / WEIGHTS).rename(folder / WEIGHTS.upper())
    sign(folder)
    return WEIGHTS


@kind
def a_lost_manifest(folder: Path) -> str:
    (folder / manifest.NAME).unlink()
    return manifest.NAME


@kind
def a_lost_manifest_and_a_trace_of_ours(folder: Path) -> str:
    """Never read as a folder of Accelerate's."""
    (folder / manifest.NAME).unlink()
    (folder / COUNTERS).rename(folder / "lockstep_other")
    return manifest.NAME


@kind
def a_damaged_manifest_and_no_counters(folder: Path) -> str:
    (folder / manifest.NAME).write_bytes(b"{")
    (folder / COUNTERS).unlink()
    return manifest.NAME


# ---------------------------------------------------------------- archives

OPTIMIZER, CUSTOM = "optimizer.bin", "custom_checkpoint_0.pkl"


def archive(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, data in {"version": b"3\n", "byteorder": b"little", **records}.items():
            made.writestr(f"archive/{name}", data)
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def saved_before_1_6(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def _twice_a_name() -> bytes:
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as made:
            for _ in range(2):
                made.writestr("archive/data.pkl", pickle.dumps({}, 2))
        return file.getvalue()


def _edited(place: int, layout: str, *values: int, content: bytes = b"") -> bytes:
    """An archive whose end, or last entry, has been written over from there on."""
    data = bytearray(content or archive({"data.pkl": pickle.dumps({}, 2)}))
    struct.pack_into(layout, data, place % len(data), *values)
    return bytes(data)


_END = 22
_GOOD = archive({"data.pkl": pickle.dumps({}, 2)})
_DIRECTORY = _GOOD.index(b"PK\1\2")
_WIDE = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2**40, 2**40, 2**50, 2**50)
_LOCATED = struct.pack("<4sLQL", b"PK\6\7", 0, len(_GOOD) - _END, 1)


def call(name: str, *arguments: bytes) -> bytes:
    """A pickle that calls what has this name, as torch's own reader would have it written."""
    module, _, function = name.rpartition(".")
    return b"\x80\x02c" + f"{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR."


def integer(value: int) -> bytes:
    data = value.to_bytes(10, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


_LAUGHS = (
    b"\x80\x02](K\x01K\x01eq\x01" + b"".join(b"0](h%bh%beq%b" % (b"\x01", b"\x01", b"\x01") for _ in range(60)) + b"."
)
_IN_ITSELF = b"\x80\x02]q\x01h\x01a."
PICKLES = {
    "an empty pickle": b"",
    "a pickle that ends early": b"\x80\x02}q",
    "a pickle that calls os.system": call("os.system", b"X\x04\0\0\0true"),
    "a pickle that calls eval": call("builtins.eval", b"X\x01\0\0\x001"),
    "a pickle that calls getattr": call("builtins.getattr", b"X\x01\0\0\x001", b"X\x01\0\0\x001"),
    "a pickle that makes a bytearray": call("builtins.bytearray", integer(2**33)),
    "a pickle that makes an old bytearray": call("__builtin__.bytearray", integer(2**33)),
    "a pickle that makes a storage": call("torch.storage.UntypedStorage", integer(2**40)),
    "a pickle that makes a tensor": call("torch.FloatTensor", integer(2**40)),
    "a pickle of empty tables": b"\x80\x02" + b"}" * 3_000_000 + b".",
    "a pickle of empty sets": b"\x80\x02" + b"\x8f" * 1_500_000 + b".",
    "a pickle of sets in a list": b"\x80\x02](" + b"\x8f" * 1_500_000 + b"e.",
    "a pickle that doubles 60 times": _LAUGHS,
    "a pickle that holds itself": _IN_ITSELF,
    "a pickle that is deep": b"\x80\x02" + b"]" * _DEEP + b"a" * (_DEEP - 1) + b".",
    "a pickle of protocol 5": pickle.dumps({"a": bytearray(b"1")}, 5),
}
ARCHIVES = {
    "an archive of 50 MB in 50 kB": archive({"data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED),
    "an archive with a compressed tensor": archive(
        {"data.pkl": pickle.dumps({}, 2), "data/0": bytes(10_000_000)}, zipfile.ZIP_DEFLATED
    ),
    "an archive with bzip2": archive({"data.pkl": bytes(10_000_000)}, zipfile.ZIP_BZIP2),
    "an archive with a name twice": _twice_a_name(),
    "an archive with something behind it": _GOOD + b"more",
    "an archive without its end": _GOOD[:-_END],
    "an archive of no records": b"PK\3\4" + b"\0" * 30 + b"PK\5\6" + bytes(18),
    "an archive of 65535 records": _edited(-_END + 8, "<2H", 65535, 65535),
    "an archive of two disks": _edited(-_END + 4, "<H", 1),
    "an archive with its directory elsewhere": _edited(-_END + 16, "<L", 2**31),
    "an archive with a directory of 4 GB": _edited(-_END + 12, "<L", 2**32 - 1),
    "an archive with a record behind the end": _edited(_DIRECTORY + 42, "<L", 2**31),
    "an archive with a record of 4 GB": _edited(_DIRECTORY + 20, "<2L", 2**32 - 2, 2**32 - 2),
    "an archive with records over each other": _edited(_GOOD.rindex(b"PK\1\2") + 42, "<L", 0),
    "an archive that is encrypted": _edited(_DIRECTORY + 8, "<H", 1),
    "an archive whose wide end lies": _GOOD[:-_END] + _WIDE + _LOCATED + _GOOD[-_END:],
    "an archive whose wide end is elsewhere": _GOOD[:-_END] + _LOCATED + _GOOD[-_END:],
    "no archive": b"PK\3\4" + b"\0" * 1000,
    "text": b"no such thing",
}
for _name, _data in PICKLES.items():
    KINDS[_name] = forged(CUSTOM, archive({"data.pkl": _data}))
    if len(_data) < 1_000_000:
        KINDS[f"{_name}, in the optimizer"] = forged(OPTIMIZER, archive({"data.pkl": _data}))
        KINDS[f"{_name}, without an archive"] = forged(CUSTOM, _data)
for _name, _data in ARCHIVES.items():
    KINDS[_name] = forged(OPTIMIZER, _data)


class Call:
    """What unpickling must never run."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("lockstep-was-fooled",)


KINDS |= {
    "a file before 1.6 that calls things": forged(OPTIMIZER, saved_before_1_6({"a": Call()})),
    "an optimizer that calls things": forged(OPTIMIZER, saved({"a": Call()})),
    "a rank's file that calls things": forged("random_states_0.pkl", saved({"a": Call()})),
}


# ---------------------------------------------------------------- tensors that lie


def _rebuilt(size: bytes, stride: bytes, offset: int = 0, numel: int = 4, key: bytes = b"0") -> bytes:
    """An archive with one tensor of four numbers, of which the pickle says something else."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + key + b"X\x03\0\0\0cpu" + integer(numel) + b"tQ"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(offset) + size + stride
    text = b"\x80\x02" + rebuild + b"\x89ccollections\nOrderedDict\n)RtR."
    return archive({"data.pkl": text, "data/0": bytes(16)})


def _tuple(*values: int) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


LIES = {
    "a tensor of 2**40 numbers in 16 bytes": _rebuilt(_tuple(2**40), _tuple(1)),
    "a tensor of 2**62 numbers in 16 bytes": _rebuilt(_tuple(2**62), _tuple(1)),
    "a tensor of 2**40 times one number": _rebuilt(_tuple(2**40), _tuple(0)),
    "a tensor of 2**60 times one number": _rebuilt(_tuple(2**30, 2**30), _tuple(0, 0)),
    "a tensor with a wide stride": _rebuilt(_tuple(2), _tuple(2**40)),
    "a tensor with a negative stride": _rebuilt(_tuple(2), _tuple(-1)),
    "a tensor with a negative size": _rebuilt(_tuple(-2), _tuple(1)),
    "a tensor behind its storage": _rebuilt(_tuple(4), _tuple(1), offset=2**40),
    "a tensor before its storage": _rebuilt(_tuple(4), _tuple(1), offset=-4),
    "a storage of 2**40 numbers": _rebuilt(_tuple(4), _tuple(1), numel=2**40),
    "a storage of a few more numbers": _rebuilt(_tuple(8), _tuple(1), numel=8),
    "a storage of a negative number": _rebuilt(_tuple(4), _tuple(1), numel=-4),
    "a storage that is not there": _rebuilt(_tuple(4), _tuple(1), key=b"7"),
}
for _name, _data in LIES.items():
    KINDS[f"{_name}, of a rank"] = forged("random_states_0.pkl", _data)
    KINDS[f"{_name}, of the window"] = forged("gradients_0.bin", _data)


def packed(dtype: Any = "<f8", shape: Any = (2,), data: Any = None) -> dict[str, Any]:
    flat = torch.zeros(16, dtype=torch.uint8) if data is None else data
    return {"__lockstep__": "ndarray", "dtype": dtype, "shape": shape if shape != (2,) else [2], "data": flat}


_ARRAYS: dict[str, Any] = {
    "of objects": packed("|O"), "of texts": packed("<U4"), "of records": packed("f8,f8"), "of times": packed("<M8[s]"),
    "of no dtype": packed(None), "of a deep dtype": packed("(9999999,)f8"), "of a table as dtype": packed({"f8": 1}),
    "of a negative shape": packed(shape=[-1]), "of too large a shape": packed(shape=[2**40]),
    "of a shape that overflows": packed(shape=[2**32, 2**32, 2**32]), "of a shape of truth": packed(shape=[True, 2]),
    "of a shape that is a tensor": packed(shape=torch.tensor([2])), "of a shape of fractions": packed(shape=[2.0]),
    "of 100 dimensions": packed(shape=[1] * 99 + [2]), "of numbers": packed(data=torch.zeros(2, dtype=torch.float64)),
    "of a matrix": packed(data=torch.zeros(4, 4, dtype=torch.uint8)), "of nothing": packed(data=7),
    "of 2**30 times a byte": packed(shape=[2**27], data=torch.zeros(1, dtype=torch.uint8).expand(2**30)),
    "of every other byte": packed(data=torch.zeros(32, dtype=torch.uint8)[::2]),
    "of an unknown kind": {"__lockstep__": "ndarray2", "data": torch.zeros(2, dtype=torch.uint8)},
    "of bytes that are numbers": {"__lockstep__": "bytes", "data": torch.zeros(2)},
    "of bytes that are a text": {"__lockstep__": "bytes", "data": "text"},
}  # fmt: skip
for _name, _value in _ARRAYS.items():
    KINDS[f"an array {_name}"] = forged(CUSTOM, saved({"value": [_value], "count": 1}))
    KINDS[f"an array {_name}, in the schedule"] = forged("scheduler.bin", saved({"last_epoch": _value}))


# ---------------------------------------------------------------- values that do not fit


def _changed(name: str, change: Callable[[Any], Any]) -> Kind:
    def make(folder: Path) -> str:
        value = torch.load(folder / name, weights_only=True)
        return forged(name, saved(change(value)))(folder)

    return make


def _with(**more: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda value: {**value, **more}


def _moments(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        value["state"][0]["exp_avg"] = torch.zeros(shape)
        return value

    return change


RANK, SCHEDULE, WINDOW = "random_states_0.pkl", "scheduler.bin", "gradients_0.bin"
for _name, (_file, _change) in {
    "an optimizer without groups": (OPTIMIZER, lambda value: {"state": {}}),
    "an optimizer that is a list": (OPTIMIZER, lambda value: [value]),
    "an optimizer that is a tensor": (OPTIMIZER, lambda value: torch.ones(1)),
    "an optimizer of groups of text": (OPTIMIZER, _with(param_groups=["a", "b"])),
    "an optimizer of no parameters": (OPTIMIZER, _with(param_groups=[{"params": 3}, {"params": None}])),
    "an optimizer of parameters in lists": (OPTIMIZER, _with(param_groups=[{"params": [[0]]}, {"params": [[1]]}])),
    "an optimizer of another model": (OPTIMIZER, _moments((7, 7))),
    "an optimizer whose state is a list": (OPTIMIZER, _with(state=[])),
    "an optimizer whose state is of numbers": (OPTIMIZER, _with(state={0: 1, 1: 2})),
    "an optimizer of lists in lists": (OPTIMIZER, lambda value: [[value]]),
    "a schedule that is a list": (SCHEDULE, lambda value: [1, 2]),
    "a schedule that is a number": (SCHEDULE, lambda value: 3),
    "a rank without generators": (RANK, lambda value: {"step": 1}),
    "a rank with a short generator": (RANK, _with(torch_manual_seed=torch.zeros(3, dtype=torch.uint8))),
    "a rank with a generator of zeros": (RANK, _with(torch_manual_seed=torch.zeros(5056, dtype=torch.uint8))),
    "a rank with a generator of floats": (RANK, _with(torch_manual_seed=torch.zeros(5056))),
    "a rank with no state of Python's": (RANK, _with(random_state=(3, (1, 2), None))),
    "a rank with a wide state of numpy's": (RANK, _with(numpy_random_seed=("MT19937", torch.zeros(9), 1, 0, 0.0))),
    "a rank with items of text": (RANK, _with(items=["a"])),
    "a rank without its loaders": (RANK, _with(loaders=[])),
    "a rank with loaders of numbers": (RANK, _with(loaders=7)),
    "a rank at a place of text": (RANK, lambda value: {**value, "loaders": [{**value["loaders"][0], "places": ["a"]}]}),
    "a rank at a place before 0": (RANK, lambda value: {**value, "loaders": [{**value["loaders"][0], "places": [-5]}]}),
    "a rank in epoch 2**70": (RANK, lambda value: {**value, "loaders": [{**value["loaders"][0], "epoch": 2**70}]}),
    "a rank with a sampler of zeros": (
        RANK, lambda value: {**value, "loaders": [{**value["loaders"][0], "generator": torch.zeros(7)}]}
    ),
    "gradients of another shape": (WINDOW, lambda value: [torch.ones(1)] * len(value)),
    "gradients of another dtype": (WINDOW, lambda value: [gradient.long() for gradient in value]),
    "gradients of text": (WINDOW, lambda value: ["a"] * len(value)),
    "gradients of a table": (WINDOW, lambda value: {}),
    "too few gradients": (WINDOW, lambda value: value[1:]),
    "an object that is refused": (CUSTOM, lambda value: {"other": 1}),
    "an object that is a number": (CUSTOM, lambda value: 4),
}.items():  # fmt: skip
    KINDS[_name] = _changed(_file, _change)


@kind
def a_place_that_is_a_list(folder: Path) -> str:
    """It is read where the rank has no place of its own."""
    _changed(RANK, _with(loaders=[{}]))(folder)
    return _changed("dl_state_dict.bin", lambda value: [])(folder)


# ---------------------------------------------------------------- models in several files, or in torch's format

INDEX = "model.safetensors.index.json"
TORCH = "pytorch_model.bin"


def _index(content: bytes) -> Kind:
    """The model is divided, says a file that the manifest lists."""

    def make(folder: Path) -> str:
        (folder.parent / "outside.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
        (folder / WEIGHTS).unlink()
        return forged(INDEX, content)(folder)

    return make


def _map(place: Any) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {"0.weight": place}}).encode()


for _place in ("../outside.safetensors", "/etc/passwd", "..", "", "a/b", "a\\b", "a\0b", 7, None, ["a"]):
    KINDS[f"an index that names {_place!r}"] = _index(_map(_place))
KINDS |= {
    "an index that is deep": _index(b"[" * _DEEP),
    "an index of many lists": _index(b"[" + b"[]," * 2_000_000 + b"[]]"),
    "an index of many names": _index(b"{" + b'"":"",' * 2_000_000 + b'"":""}'),
    "an index of nothing": _index(b""),
}


@kind
def an_index_that_names_a_planted_file(folder: Path) -> str:
    (folder / WEIGHTS).rename(folder / "planted.safetensors")
    forged(INDEX, _map("planted.safetensors"))(folder)
    _manifest(lambda body: body["files"].pop("planted.safetensors"))(folder)
    return "planted.safetensors"


def _torch_model(content: bytes) -> Kind:
    def make(folder: Path) -> str:
        (folder / WEIGHTS).unlink()
        return forged(TORCH, content)(folder)

    return make


def _nan() -> Tensor:
    return torch.full((6,), torch.nan)


for _name, _data in {
    "that is compressed": ARCHIVES["an archive of 50 MB in 50 kB"],
    "with a name twice": ARCHIVES["an archive with a name twice"],
    "of a bytearray": archive({"data.pkl": PICKLES["a pickle that makes a bytearray"]}),
    "that calls things": saved({"0.bias": Call()}),
    "that is a list": saved([torch.ones(1)]),
    "with numbers as names": saved({1: torch.ones(1)}),
    "with a number as a weight": saved({"0.bias": 3}),
    "of other shapes": saved({"0.bias": torch.ones(10**6)}),
    "of a few names": saved({"0.bias": _nan()}),
    "of an array": saved({"0.bias": np.zeros(6)}),
    "that lies": LIES["a tensor of 2**40 numbers in 16 bytes"],
    "of nothing": b"",
}.items():
    KINDS[f"torch's model {_name}"] = _torch_model(_data)


VARIANTS |= {
    name
    for name in KINDS
    if name.endswith((", in the optimizer", ", without an archive", ", of the window", ", in the schedule"))
    or name
    in ("a header of many blanks", "a pickle of empty tables", "a pickle of sets in a list", "a header of many numbers")
}
