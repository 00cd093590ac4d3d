"""Why a generation of the process group ended, and the thread in which a rank hears of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import PeerFailure
from lockstep.host.threads import join
from lockstep.job_store.signed_store import SignedStore, from_fields


@dataclass(frozen=True, kw_only=True)
class AbortReason:
    """Why a generation ended."""

    rank: int
    """The rank that ended it."""
    tick: int
    """How far that rank had come."""
    what: str
    """What happened there, in one line."""
    leaving: bool = False
    """Whether that rank goes away for good, so that waiting for it is vain."""
    details: str = ""
    """Its traceback, where others should show it."""

    @classmethod
    def read(cls, data: bytes) -> AbortReason:
        """From the JSON that stands in the store."""
        cause: AbortReason = from_fields(cls, data)
        return cause

    def failure(self, doing: str) -> PeerFailure:
        """The error for a rank that is left ``doing`` something alone."""
        after = "it has left the job" if self.leaving else "this rank leaves too, so that all can go on together"
        trace = f"\n\nOn rank {self.rank}:\n{self.details.rstrip()}" if self.details else ""
        return PeerFailure(
            f"Rank {self.rank} failed: {self.what.rstrip('.')}. While {doing}, {after}.{trace}", rank=self.rank
        )


class AbortListener:
    """A thread that waits for its rank to be woken, on its own store connection."""

    def __init__(self, store: SignedStore, side: SignedStore, key: str, notify: Callable[[AbortReason], None]) -> None:
        self._store = store
        self._side = side
        self._key = key
        self._notify = notify
        self._thread = threading.Thread(target=self._run, name="lockstep-watcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                (cause,) = self._side.get(self._key, _read_reason, timedelta(days=1))
            except dist.DistStoreError:
                continue  # nothing happened for a day
            except RuntimeError:
                return  # the store's host has gone: nobody is left to tell us anything
            if cause is not None:
                self._notify(cause)
            return

    def stop(self) -> None:
        """End the thread by waking it with nothing to say."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key, "")
        join(self._thread, 5)


def _read_reason(data: bytes) -> tuple[AbortReason | None]:
    return (AbortReason.read(data) if data else None,)
