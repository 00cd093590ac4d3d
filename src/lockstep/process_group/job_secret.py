"""Whether all ranks have the same secret for the job's store: else each would ignore what the others write there."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistStoreError

from lockstep.config import env
from lockstep.errors import TopologyError
from lockstep.job_store.signed_store import VARIABLE, SignedStore, describe_difference, fingerprint, read_secret
from lockstep.rundir.format_ranks import name_ranks


def compare(store: SignedStore, rank: int, world_size: int, timeout: timedelta) -> None:
    """Called on: all ranks. Raise where they have different secrets: rank 0 looks at all of them, the others at its."""
    if world_size == 1:
        return
    # Not signed: it is what tells whether signatures fit.
    mine = fingerprint(read_secret(env.snapshot()))
    store.raw.set(_key(store, rank), mine)
    keys = [_key(store, other) for other in range(world_size if rank == 0 else 1)]
    try:
        store.raw.wait(keys, timeout)
    except DistStoreError:
        absent = [other for other, key in enumerate(keys) if not store.raw.check([key])]
        raise TopologyError(
            f"Rank {rank} waited {timeout.total_seconds():.0f} s for {name_ranks(absent)} of {world_size} to join: "
            "still starting, busy before the first Accelerator() or PartialState(), or ended. Its own output tells."
        ) from None
    found = [text.decode(errors="replace") for text in store.raw.multi_get(keys)]
    other = next((other for other, theirs in enumerate(found) if theirs != mine), None)
    if other is not None:
        raise TopologyError(
            f"The ranks have different secrets for the job's store: rank {rank} "
            f"{describe_difference(mine, found[other])}, rank {other} {describe_difference(found[other], mine)}. Set "
            f"{VARIABLE} to the same value for all ranks, or for none."
        )


def _key(store: SignedStore, rank: int) -> str:
    return store.full(f"secret/{rank}")
