"""Reading the weights that come next in a thread, while those before them are at work.

The order is learnt: after a weight comes what came after it the last time. What is read ahead and not yet fetched is
never more than the largest weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from lockstep.offload.disk_weight import SMALL, DiskWeight


class ReadAhead:
    """Hands out weights of which the next ones are being read."""

    def __init__(self, weights: Mapping[str, DiskWeight]) -> None:
        self._weights = weights
        self._room = max((weight.nbytes for weight in weights.values()), default=0)
        self._next: dict[str, str] = {}
        self._last: str | None = None
        self._reading: dict[str, Future[Tensor]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self.hits = 0
        """How many weights had been asked for before they were fetched."""

    def fetch(self, name: str) -> Tensor:
        """The values of a weight; those that usually follow are asked for."""
        weight = self._weights[name]
        if weight.nbytes <= SMALL:
            return weight.read()
        if os.getpid() != self._process:  # a forked child has no thread
            self._reading, self._pool, self._process = {}, None, os.getpid()
        if self._last is not None:
            self._next[self._last] = name
        self._last = name
        pending = self._reading.pop(name, None)
        if pending is None:
            self._reading.clear()  # it came otherwise than the last time
            values = weight.read()
        else:
            self.hits += 1
            values = pending.result()
            if not weight.unchanged():
                values = weight.read()
        self._read_on(name)
        return values

    def _read_on(self, name: str) -> None:
        waiting = sum(self._weights[other].nbytes for other in self._reading)
        seen = {name}
        while (name := self._next.get(name, name)) not in seen:
            seen.add(name)
            if name in self._reading:
                continue
            waiting += self._weights[name].nbytes
            if waiting > self._room:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="lockstep-read-ahead")
            self._reading[name] = self._pool.submit(self._weights[name].read)

    def close(self) -> None:
        """End the thread; what is asked for later is read when it is."""
        self._reading.clear()
        if self._pool is not None and os.getpid() == self._process:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def __deepcopy__(self, memo: object) -> ReadAhead:
        return ReadAhead(self._weights)

    def __reduce__(self) -> tuple[type[ReadAhead], tuple[Mapping[str, DiskWeight]]]:
        return ReadAhead, (self._weights,)
