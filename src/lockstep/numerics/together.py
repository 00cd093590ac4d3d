"""One report for the job: who found a bad number first, what every rank knows about it, and who tells.

Everything here goes through the store, and only once something is wrong. So it costs nothing while all is well, and a
rank that found nothing is not waited for in a collective.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lockstep.topology.group import Group

PATIENCE = timedelta(seconds=60)
"""How long the rank that tells waits for what the others have found: they run their batch once more meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rank knows about a bad number."""

    rank: int | None
    """None where there is only one."""
    what: str
    """What is bad there: "the loss is nan"; empty when only the common gradient is."""
    samples: str
    """The samples of its batch, in words."""
    report: str
    """Where it arose, in words."""
    own: bool
    """Whether it arose in this rank's own batch."""

    def headline(self) -> str:
        """In one line."""
        told = ", ".join(part for part in (self.what or "its own forward is finite", self.samples) if part)
        return told if self.rank is None else f"rank {self.rank}: {told}"


def claim(group: Group, name: str) -> int:
    """The rank that was first to claim the telling of something."""
    if group.world_size == 1:
        return group.rank
    return int(group.store.compare_set(_key(group, f"{name}/teller"), "", str(group.rank)))


def put_together(group: Group, name: str, mine: Finding) -> tuple[str, bool]:
    """Called on: all ranks that found it. One text out of what all of them know; whether this rank is to tell it."""
    if group.world_size == 1:
        return compose([mine], 1), True
    store = group.store
    store.set(_key(group, f"{name}/{group.rank}"), json.dumps(asdict(mine)))
    told = _key(group, f"{name}/told")
    if claim(group, name) != group.rank:
        try:
            store.wait([told], PATIENCE + timedelta(seconds=10))
            return store.get(told).decode(), False
        except dist.DistStoreError:
            return compose([mine], group.world_size), False
    keys = {rank: _key(group, f"{name}/{rank}") for rank in range(group.world_size)}
    try:
        store.wait(list(keys.values()), PATIENCE)
    except dist.DistStoreError:  # some rank has found nothing, or is gone: what there is will do
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    text = compose([Finding(**json.loads(store.get(key))) for key in keys.values()], group.world_size)
    store.set(told, text)
    return text, True


def compose(findings: Sequence[Finding], ranks: int) -> str:
    """The text for the job: the ranks whose own batch did it, the first of them in full."""
    guilty = [one for one in findings if one.own]
    if guilty:
        lines = [one.headline() for one in guilty]
        lines += [f"On rank {guilty[0].rank}:"] if len(guilty) > 1 else []
        return "\n".join([*lines, guilty[0].report])
    lines = [findings[0].headline()]
    if ranks > 1:
        lines = [f"The forwards and losses of {len(findings)} of {ranks} ranks are finite."]
    return "\n".join([*lines, *[one.report for one in findings if one.report][:1]])


def _key(group: Group, name: str) -> str:
    return f"numerics/{group.generation}/{name}"
