"""Debug mode: do all ranks mean the same collective? Asked before any data is used.

Every collective of ours first exchanges one frame of constant size, whatever the operation, so that ranks which call
*different* operations are caught too. Data that is small enough travels in the same frame, so that most collectives are
still one. On a difference the ranks tell each other what each of them meant, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.blackbox import sites
from lockstep.comm import trees
from lockstep.comm.all_gather import all_gather, gather_host
from lockstep.guard.mismatch import refusal, summarize, understand_boxes
from lockstep.guard.remedies import CauseAndFix, different_arguments
from lockstep.process_group.group import Group

_FRAME = 8192
_HEAD = 16
"""Bytes of a frame before its data: what the rank means, as a number, and how many bytes of data follow."""
ROOM = _FRAME - _HEAD
"""Bytes of data that travel with the question."""
_RECORD = 32768
_TEXT = 600
"""Characters that each of the eight texts of a record may have; with escapes they always fit."""


@dataclass(frozen=True, kw_only=True)
class CollectiveSignature:
    """What a rank is about to do."""

    operation: str
    """Its name."""
    tree: Any = None
    """What it is done with."""
    extra: str = ""
    """What else must agree."""
    free_dim: int | None = None
    """A dimension in which the ranks may differ."""

    def key(self) -> int:
        """A number that is the same on ranks that mean the same."""
        parts = [self.operation, self.extra, *(part for _, _, part in self._parts())]
        return int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:8], "little", signed=True)

    def record(self) -> dict[str, str]:
        """The same for people."""
        parts = self._parts()
        return {
            "op": self.operation,
            "extra": self.extra,
            "shapes": ", ".join(shape for shape, _, _ in parts),
            "dtypes": ", ".join(dtype for _, dtype, _ in parts),
            "site": sites.spell_site(sites.find_user_frame(sys._getframe(1), {})),
        }

    def _parts(self) -> list[tuple[str, str, str]]:
        """Of each tensor: its shape and dtype for people, and what of them must agree."""
        parts = []
        for path, leaf in trees.walk_paths(self.tree) if self.tree is not None else ():
            if not isinstance(leaf, Tensor):
                continue
            shape = list(leaf.shape)
            must_agree = [
                "any" if self.free_dim is not None and place == self.free_dim % max(leaf.ndim, 1) else size
                for place, size in enumerate(shape)
            ]
            dtype = str(leaf.dtype).removeprefix("torch.")
            parts.append((f"{path}: {shape}" if path else str(shape), dtype, f"{path}{must_agree}{leaf.dtype}"))
        return parts


class HandshakeBuffers:
    """The memory that frames travel in; the same for every operation."""

    def __init__(self, group: Group) -> None:
        with torch.inference_mode(False):
            sent = torch.zeros(_FRAME, dtype=torch.uint8, device="cpu")
            received = torch.zeros((group.world_size, _FRAME), dtype=torch.uint8, device="cpu")
        self._group = group
        self._sent, self._received = sent, received.view(-1)
        self.data = sent[_HEAD:]
        """Where this rank's data go."""
        self.rows = received[:, _HEAD:]
        """Where those of all ranks arrive."""
        # Read and written one by one: an operation of numpy or torch on two numbers costs more than the loop.
        self._own = sent.numpy().data.cast("q")
        self._heads = received.view(-1).numpy().data.cast("q")

    def exchange(self, key: int, size: int, doing: str) -> bool | None:
        """Called on: all ranks. Whether all have sent ``size`` bytes of data; None when they mean different things."""
        own, heads, group = self._own, self._heads, self._group
        own[0], own[1] = key, size
        if group.talks_host:
            all_gather(group, self._received, self._sent, doing)
        else:
            self._received.copy_(gather_host(group, self._sent, doing).view(-1))
        together = size > 0
        for place in range(0, len(heads), _FRAME // 8):
            if heads[place] != key:
                return None
            # One rank may have its tensors on a device: then all send theirs apart.
            together = together and heads[place + 1] == size
        return together


def frames_of(group: Group) -> HandshakeBuffers:
    """The group's; the same for every operation."""
    if group.handshake is None:
        group.handshake = HandshakeBuffers(group)
    return group.handshake


def check(group: Group, meant: CollectiveSignature) -> None:
    """Called on: all ranks. Raise on all of them unless all mean the same."""
    if frames_of(group).exchange(meant.key(), 0, f"checking {meant.operation}") is None:
        refuse(group, meant)


def exchange(group: Group, meant: CollectiveSignature, data: Tensor | None) -> Tensor | None:
    """Called on: all ranks. The same, and every rank's bytes, a row for each; None when they have to travel apart.

    ``data`` is a flat host tensor of bytes, equally many on ranks that mean the same. The rows are used again by the
    next call.
    """
    frames = frames_of(group)
    size = data.numel() if data is not None and data.numel() <= ROOM else 0
    if size and data is not None:
        frames.data[:size].copy_(data)
    together = frames.exchange(meant.key(), size, f"checking {meant.operation}")
    if together is None:
        refuse(group, meant)
    return frames.rows[:, :size] if together else None


def refuse(group: Group, meant: CollectiveSignature) -> NoReturn:
    """Called on: all ranks. Tell each other what each one meant, and raise."""
    # Before the exchange, in which all ranks still are where they differ, and none has left yet.
    found = understand_boxes(group.boxes, group.rank)
    why = {} if found is None else {"cause": found.cause, "fix": found.fix, "lead": found.lead}
    said = {**meant.record(), **why}
    cut = {name: text if len(text) <= _TEXT else f"{text[:_TEXT]} …" for name, text in said.items()}
    text = json.dumps(cut, ensure_ascii=False).encode()
    source = torch.zeros(_RECORD, dtype=torch.uint8)
    source[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gather_host(group, source, f"checking {meant.operation}")
    records = [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in rows]
    group.box.refuse()  # on every rank: a script may catch the error and go on
    calls = {rank: (record["op"], record["site"]) for rank, record in enumerate(records)}
    what = "" if len({record["op"] for record in records}) > 1 else _what_differs(records)
    raise refusal(_describe(records), _why(records), summarize(calls, what))


def _what_differs(records: list[dict[str, str]]) -> str:
    return next((what for what in ("shapes", "dtypes") if len({record[what] for record in records}) > 1), "arguments")


def _why(records: list[dict[str, str]]) -> CauseAndFix | None:
    """Cause and fix as the first rank sees them that knows, so that all raise the same error.

    A rank sees the boxes of its node only; what differs between nodes shows in the records.
    """
    seen = next((record for record in records if record.get("cause")), None)
    if seen is not None:
        return CauseAndFix(cause=seen["cause"], fix=seen["fix"], lead=seen["lead"])
    name = records[0]["op"]
    if len({record["op"] for record in records}) > 1:
        return CauseAndFix(
            cause="The ranks took different ways through the script, or call the same ones in another order.",
            fix="Let every rank make the same calls in the same order; keep them out of code that depends on the rank.",
        )
    for what in ("shapes", "dtypes"):
        if len({record[what] for record in records}) > 1:
            return different_arguments(name, what)
    return None


def _describe(records: list[dict[str, str]]) -> list[str]:
    operations = {record["op"] for record in records}
    if len(operations) > 1:
        headline = "Cannot apply desired operation because the processes called different operations."
    elif len({record["shapes"] for record in records}) > 1:
        headline = "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."
    elif len({record["dtypes"] for record in records}) > 1:
        headline = "Cannot apply desired operation due to dtype mismatches. All dtypes across devices must be the same."
    else:
        headline = "Cannot apply desired operation because its arguments differ between the processes."
    lines = [headline, "", f"Operation: `{' / '.join(f'lockstep.{name}' for name in sorted(operations))}`"]
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
    return lines
