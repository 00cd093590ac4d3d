"""One report for the job: who found a bad number first, what every rank knows about it, and who tells.

Everything here goes through the store, and only once something is wrong. So it costs nothing while all is well, and a
rank that found nothing is not waited for in a collective.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import TopologyError
from lockstep.job_store.signed_store import from_fields, from_text
from lockstep.process_group.group import Group

PATIENCE = timedelta(seconds=60)
"""How long the rank that tells waits for what the others have found: they run their batch once more meanwhile."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteFinding:
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
    first: int = group.store.claim(group.key(f"numerics/{name}/teller"), str(group.rank), int)
    return first


def put_together(group: Group, name: str, mine: NonFiniteFinding) -> tuple[str, bool]:
    """Called on: all ranks that found it. One text out of what all of them know; whether this rank is to tell it."""
    if group.world_size == 1:
        return compose([mine], 1), True
    store, place = group.store, group.key(f"numerics/{name}")
    store.set(f"{place}/{group.rank}", json.dumps(asdict(mine)))
    if claim(group, name) != group.rank:
        try:
            return store.get(f"{place}/told", from_text, PATIENCE + timedelta(seconds=10)), False
        except (dist.DistStoreError, TopologyError):
            return compose([mine], group.world_size), False
    keys = [f"{place}/{rank}" for rank in range(group.world_size)]
    read = functools.partial(from_fields, NonFiniteFinding)
    try:
        findings = store.gather(keys, read, PATIENCE)
    except (dist.DistStoreError, TopologyError):  # some rank has found nothing, or is gone: what there is will do
        findings = [found for key in keys if (found := store.peek(key, read)) is not None]
    text = compose(findings, group.world_size)
    store.set(f"{place}/told", text)
    return text, True


def forget(group: Group, name: str) -> None:
    """Remove what this rank has written about something that all ranks are done with."""
    if group.world_size > 1:
        group.store.delete_own(group.key(f"numerics/{name}/"))


def compose(findings: Sequence[NonFiniteFinding], ranks: int) -> str:
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
