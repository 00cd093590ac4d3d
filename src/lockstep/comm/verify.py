"""Debug mode: do all ranks mean the same collective? Asked before any data moves.

Every collective of ours first exchanges one record of constant size, whatever the operation, so that ranks which
call *different* operations are caught too. On a difference every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor

from lockstep.blackbox import sites
from lockstep.comm import trees
from lockstep.comm.wire import gather_host
from lockstep.errors import DistributedOperationException
from lockstep.topology.group import Group

_RECORD = 8192
_ROOM = 600
"""Characters that each of the six texts of a record may have; with escapes they always fit."""


def check(group: Group, operation: str, tree: Any = None, *, extra: str = "", free_dim: int | None = None) -> None:
    """Called on: all ranks. Raise on all of them unless operation, structure, shapes and dtypes agree."""
    mine = _record(operation, tree, extra, free_dim)
    records = _exchange(group, mine)
    if all(record["key"] == mine["key"] for record in records):
        return
    group.box.refuse()  # on every rank: a script may catch the error and go on
    raise DistributedOperationException(_describe(records))


def _record(operation: str, tree: Any, extra: str, free_dim: int | None) -> dict[str, str]:
    shapes, dtypes, key = [], [], [operation, extra]
    for path, leaf in trees.walk_paths(tree) if tree is not None else ():
        if not isinstance(leaf, Tensor):
            continue
        shape = list(leaf.shape)
        must_agree = [
            "any" if free_dim is not None and place == free_dim % max(leaf.ndim, 1) else size
            for place, size in enumerate(shape)
        ]
        shapes.append(f"{path}: {shape}" if path else str(shape))
        dtypes.append(str(leaf.dtype).removeprefix("torch."))
        key.append(f"{path}{must_agree}{leaf.dtype}")
    return {
        "key": hashlib.sha256("|".join(key).encode()).hexdigest(),
        "op": operation,
        "extra": extra,
        "shapes": ", ".join(shapes),
        "dtypes": ", ".join(dtypes),
        "site": sites.spell_site(sites.find_user_frame(sys._getframe(1), {})),
    }


def _exchange(group: Group, mine: dict[str, str]) -> list[dict[str, str]]:
    cut = {name: text if len(text) <= _ROOM else f"{text[:_ROOM]} …" for name, text in mine.items()}
    text = json.dumps(cut, ensure_ascii=False).encode()
    source = torch.zeros(_RECORD, dtype=torch.uint8)
    source[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gather_host(group, source, f"checking {mine['op']}")
    return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in rows]


def _describe(records: list[dict[str, str]]) -> str:
    operations = {record["op"] for record in records}
    if len(operations) > 1:
        headline = "Cannot apply desired operation because the processes called different operations."
    elif len({record["shapes"] for record in records}) > 1:
        headline = "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."
    elif len({record["dtypes"] for record in records}) > 1:
        headline = "Cannot apply desired operation due to dtype mismatches. All dtypes across devices must be the same."
    else:
        headline = "Cannot apply desired operation because its arguments differ between the processes."
    lines = ["", "", headline, "", f"Operation: `{' / '.join(f'lockstep.{name}' for name in sorted(operations))}`"]
    lines.append("Input shapes:")
    lines += [f"  - Process {rank}: {record['shapes'] or 'no tensors'}" for rank, record in enumerate(records)]
    if len({record["dtypes"] for record in records}) > 1:
        lines.append("Input dtypes:")
        lines += [f"  - Process {rank}: {record['dtypes']}" for rank, record in enumerate(records)]
    if len({record["extra"] for record in records}) > 1:
        lines.append("Arguments:")
        lines += [f"  - Process {rank}: {record['extra']}" for rank, record in enumerate(records)]
    lines.append("Called at:")
    lines += [f"  - Process {rank}: {record['op']} at {record['site']}" for rank, record in enumerate(records)]
    return "\n".join(lines)
