"""Damages model files in many ways and loads them; run in a process of its own, which nothing may end.

``python -m tests.integration.checkpoint.fuzz FOLDER SEED COUNT``: the model is either loaded, bit for bit as the
safetensors library reads the files, or left as it is with a CheckpointError. Memory is limited to little more than what
is in use, so that believing a header that lies is fatal, and every file that is opened is looked at.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep import CheckpointError
from lockstep.model_files.weights import load_weights, write_weights
from tests.unit.checkpoint.small_models import bits

INDEX = "model.safetensors.index.json"
HEADROOM = 256 * 2**20
ODD = [
    0,
    1,
    -1,
    2**31,
    2**32,
    2**62,
    2**63,
    2**64,
    10**30,
    1.5,
    True,
    None,
    "",
    "F32",
    "BF16",
    "..",
    "a\0",
    [],
    {},
    [0, 4],
    "é",
]
ODD_NAMES = [
    "../outside.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "sub/../x",
    "/dev/zero",
    "/dev/stdin",
    "link",
    "\0",
]


class Watch:
    """Which files are opened, and how, while it is on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on, self.strayed = str(folder), False, Counter[str]()
        sys.addaudithook(self.look)

    def look(self, event: str, arguments: tuple) -> None:
        if (
            self.on
            and not isinstance(arguments[0] if arguments else 0, int)
            and event in ("open", "os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "os.system")
        ):
            path, flags = str(arguments[0]), arguments[2] if event == "open" else 0
            if event != "open" or not path.startswith(self.folder + "/") or (isinstance(flags, int) and flags & 3):
                self.strayed[f"{event} {path}"] += 1


def mutated_json(chance: random.Random, value: Any) -> Any:
    """The value with something in it changed, near the leaves more often than near the root."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        how = chance.random()
        if how < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if how < 0.2:
            return {(f"{key}x" if name == key else name): item for name, item in value.items()}
        return {**value, key: mutated_json(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], mutated_json(chance, value[place]), *value[place + chance.randrange(2) :]]
    if isinstance(value, int) and chance.random() < 0.5:
        return value + chance.choice([-8, -4, -1, 1, 4, 8, 2**32])
    if isinstance(value, str) and chance.random() < 0.5:
        return chance.choice(ODD_NAMES)
    return chance.choice(ODD)


def mutated_bytes(chance: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = chance.randrange(len(data) + 1)
        how = chance.randrange(5)
        if how == 0:
            del data[place:]
        elif how == 1:
            data[place:place] = chance.randbytes(chance.choice([1, 8, 100]))
        elif how == 2:
            data[place : place + 8] = chance.choice([0, 2**63, 2**64 - 1, 10**8, len(content)]).to_bytes(8, "little")
        elif place < len(data):
            data[place] ^= 1 << chance.randrange(8)
    return bytes(data)


def damage(chance: random.Random, name: str, content: bytes) -> bytes:
    if chance.random() < 0.3:
        return mutated_bytes(chance, content)
    if name == INDEX:
        return json.dumps(mutated_json(chance, json.loads(content))).encode()
    length = int.from_bytes(content[:8], "little")
    text = json.dumps(mutated_json(chance, json.loads(content[8 : 8 + length]))).encode()
    said = len(text) if chance.random() < 0.9 else chance.choice([0, len(text) + 1, 2**40, 2**63])
    return said.to_bytes(8, "little") + text + content[8 + length :]


def as_the_library_reads(folder: Path) -> dict[str, torch.Tensor]:
    table = json.loads((folder / INDEX).read_bytes())
    places = table.get("weight_map", table)
    return {name: load_file(folder / file)[name] for name, file in places.items()}


def model() -> nn.ParameterDict:
    return nn.ParameterDict({"a": torch.zeros(3, 2), "b": torch.zeros(4), "c": torch.zeros(2, dtype=torch.bfloat16)})


def main(folder: Path, seed: int, count: int) -> dict[str, int]:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    source = model()
    with torch.no_grad():
        for value in source.values():
            value.uniform_()
    (folder.parent / "outside.safetensors").write_bytes(b"secret")
    names = write_weights(source.state_dict(), folder, max_shard_size=16)
    good = {name: (folder / name).read_bytes() for name in names}
    before = {name: bits(value) for name, value in model().items()}
    watch = Watch(folder)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM, -1))
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        name = chance.choice(names)
        (folder / name).write_bytes(damage(chance, name, good[name]))
        target = model()
        watch.on = True
        try:
            load_weights(target, folder, strict=False)
            outcome = "loaded"
        except CheckpointError as error:
            outcome = "refused" if str(folder) in str(error) else f"refused without naming the file: {error}"
        finally:
            watch.on = False
        if outcome != "loaded":
            assert {key: bits(value) for key, value in target.items()} == before, "the model was touched"
        else:
            theirs = as_the_library_reads(folder)  # which raises for what it would not accept
            for key in set(theirs) & set(before):
                assert bits(target[key]) == bits(theirs[key].to(target[key].dtype)), key
        outcomes[f"{'index' if name == INDEX else 'header'} {outcome}"] += 1
        (folder / name).write_bytes(good[name])
    assert not watch.strayed, watch.strayed
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return dict(outcomes)


if __name__ == "__main__":
    try:
        print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
    except SafetensorError as error:
        sys.exit(f"accepted here and not by the library: {error}")
