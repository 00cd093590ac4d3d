"""Entering a collective: noted in the black box, and compared with what other ranks of this machine have entered.

Each rank writes what it is about to do and then reads what its peers have written; the last of two that differ sees it,
and raises before any data moves. It costs about a microsecond, so it is always on. Ranks of other machines cannot be
seen like this: there it is debug mode (``verify``) that compares before, and the guard that finds a difference after.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from lockstep.blackbox.read import read_all
from lockstep.blackbox.snapshot import Op
from lockstep.comm import trees
from lockstep.errors import DistributedOperationException
from lockstep.guard.causes import what_differs
from lockstep.guard.diagnose import diagnose
from lockstep.guard.explain import understand
from lockstep.topology.group import Group

_MAX_TEXTS = 1024
_texts: dict[Any, str] = {}


def enter(group: Group, name: str, signature: Hashable = None) -> int:
    """Note that this rank enters a collective; the number to leave it by. Raises when a peer means another one."""
    number = group.box.enter(name, signature, 3)  # from the caller of whoever calls this
    # In debug mode all ranks compare with all, and all of them raise.
    if group.peers is not None and not group.debug:
        other = group.peers.compare(number)
        if other is not None:
            error = _mismatch(group, number, other)
            group.box.leave(number, refused=True)
            raise error
    return number


def spell(signature: tuple[Any, ...], free_dim: int | None = None) -> str:
    """What of a structure must agree between ranks: not the device, nor a dimension that may differ."""
    key = (signature, free_dim)
    text = _texts.get(key)
    if text is None:
        if len(_texts) >= _MAX_TEXTS:
            _texts.clear()
        text = _texts[key] = ", ".join(filter(None, (_part(part, free_dim) for part in signature)))
    return text


def _part(part: Any, free_dim: int | None) -> str:
    if isinstance(part, torch.device):
        return ""
    if isinstance(part, torch.Size):
        sizes: list[Any] = list(part)
        if free_dim is not None:
            if not -len(sizes) <= free_dim < len(sizes):
                return "[any]"  # a tensor without that dimension takes no part
            sizes[free_dim] = "any"
        return str(sizes).replace("'", "")
    if isinstance(part, type):
        return part.__name__
    return str(part).removeprefix("torch.")


def spell_tree(tree: Any, free_dim: int | None = None) -> str:
    """The same for who has not taken the structure apart yet."""
    return spell(trees.flatten(tree)[1], free_dim)


def _mismatch(group: Group, number: int, other: int) -> DistributedOperationException:
    """The error in the form of the guides, with what both ranks entered."""
    boxes = read_all(group.boxes) if group.boxes is not None else []
    mine = next((box for box in boxes if box.rank == group.rank and box.pid == os.getpid()), None)
    # Another job may have been given the same run directory.
    job = [box for box in boxes if mine is not None and box.attempt == mine.attempt]
    ops = {box.rank: op for box in job for op in box.history if op.seq == number and box.rank in (group.rank, other)}
    if len(ops) < 2:
        return DistributedOperationException(
            f"Rank {group.rank} and rank {other} have entered collective number {number} with different arguments."
        )
    lines = ["", "", _headline(ops[group.rank], ops[other]), ""]
    names = sorted({op.name for op in ops.values()})
    lines.append(f"Operation: `{' / '.join(f'lockstep.{name}' for name in names)}`")
    lines.append("Input shapes:")
    lines += [f"  - Process {rank}: {op.signature or 'no tensors'}" for rank, op in sorted(ops.items())]
    lines.append("Called at:")
    lines += [f"  - Process {rank}: {op.name} at {op.site}" for rank, op in sorted(ops.items())]
    found = diagnose(job, blocked_for=0.0)
    if found is not None:
        why = understand(found)
        lines += ["", f"Likely cause: {why.cause}", f"Fix: {why.fix}"]
    return DistributedOperationException("\n".join(lines))


def _headline(mine: Op, theirs: Op) -> str:
    if mine.name != theirs.name:
        return "Cannot apply desired operation because the processes called different operations."
    if mine.name == "backward":
        return (
            "Cannot average gradients because the processes are at different batches: one has skipped an update. "
            "Skip it on all ranks (agree with set_trigger and check_trigger) or on none."
        )
    what = what_differs([mine.signature, theirs.signature])
    if what == "dtypes":
        return "Cannot apply desired operation due to dtype mismatches. All dtypes across devices must be the same."
    if what == "structures":
        return "Cannot apply desired operation because its arguments differ between the processes."
    return "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."
