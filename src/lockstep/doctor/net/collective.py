"""What training will use: a process group on the devices. Right values first, then how fast.

Each wait is a poll with a limit, so that a collective that never ends is told, and not waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.doctor.net.results import Link, Point
from lockstep.doctor.net.schedule import Pair
from lockstep.doctor.net.store_channel import StoreChannel
from lockstep.doctor.net.units import amount
from lockstep.errors import first_line

LIMIT = 20.0
"""Seconds that one collective may take, beyond what its size needs."""
SIZES = tuple(1 << power for power in range(10, 29, 2))
"""1 KiB to 256 MiB, each four times the one before."""
QUICK_SIZES = SIZES[:7]


class Stuck(Exception):
    """A collective did not end, or ended wrongly."""


class Collective:
    """The ranks that can all talk to each other, as one process group."""

    def __init__(
        self, channel: StoreChannel, ranks: Sequence[int], device: torch.device, backend: str, repeats: int = 5
    ) -> None:
        self.channel = channel
        self.ranks = list(ranks)
        self.device = device
        self.backend = backend
        self.repeats = repeats
        self.size = len(self.ranks)
        self.number = self.ranks.index(channel.rank)
        self.stuck = False
        """Whether something is still under way, so that the group cannot be taken down in order."""

    def join(self) -> None:
        """Called on: the ranks of the group. Make the process group, as training would."""
        try:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device.index or 0)
            dist.init_process_group(
                self.backend,
                store=self.channel.torch_store("group"),
                rank=self.number,
                world_size=self.size,
                timeout=timedelta(seconds=LIMIT),
                device_id=self.device if self.device.type == "cuda" else None,
            )
        except Exception as error:
            self.stuck = True
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise Stuck(f"the process group ({self.backend}) could not be made: {first}") from error

    def check(self) -> None:
        """Called on: the ranks of the group. Memory on the device, a barrier, and sums that are known beforehand."""
        try:
            whole = torch.full((1024,), self.number + 1, dtype=torch.int64, device=self.device)
            part = torch.full((1024,), 0.5 * (self.number + 1), dtype=torch.float32, device=self.device)
        except RuntimeError as error:
            raise Stuck(f"no memory could be had on {self.device}: {first_line(error)}") from error
        self._end(dist.barrier(async_op=True), "the barrier")
        total = self.size * (self.size + 1) // 2
        for tensor, expected in ((whole, total), (part, 0.5 * total)):
            self._end(dist.all_reduce(tensor, async_op=True), "an all_reduce")
            wrong = int((tensor != expected).sum())
            if wrong:
                seen = tensor[tensor != expected][0].item()
                raise Stuck(
                    f"an all_reduce of {tensor.dtype} gave {seen} where {expected} is right, "
                    f"in {wrong} of {tensor.numel()} places"
                )

    def curve(self, sizes: Sequence[int], budget: float, log: Callable[[str], None]) -> Iterator[Point]:
        """Called on: the ranks of the group. An all-reduce of each size, as far as time and memory reach."""
        started = time.monotonic()
        last = 0.0
        reason = ""
        for step, size in enumerate(sizes):
            reason = reason or self._agree(step, size, last, budget - (time.monotonic() - started))
            if reason:
                yield Point(size=size, note=reason)
                continue
            log(f"all_reduce of {amount(size)}")
            last = self._time(size)
            yield Point(size=size, seconds=last, rate=size / last * 2 * (self.size - 1) / self.size)

    def _agree(self, step: int, size: int, last: float, left: float) -> str:
        """Why this size is left out, as the first rank says; all must do the same."""
        key = f"curve/{step}"
        mine = self._room(size)
        self.channel.send(f"{key}/room", mine)
        if self.number == 0:
            rooms = self.channel.receive(f"{key}/room", LIMIT, of=self.ranks)
            short = [rank for rank, has in rooms.items() if not has]
            text = ""
            if short:
                text = f"rank {short[0]} has too little memory"
            elif last * 4 * (self.repeats + 1) > left:
                text = "the time budget is used up"
            self.channel.send(f"{key}/go", text)
        return str(self._from_first(f"{key}/go"))

    def all_go_on(self, topic: str, mine: bool) -> bool:
        """Called on: the ranks of the group. What the first of them thinks: all must do the same."""
        if self.number == 0:
            self.channel.send(topic, mine)
        # It may be in the middle of something that takes long on a slow line.
        return bool(self._from_first(topic, 6 * LIMIT))

    def _from_first(self, topic: str, patience: float = LIMIT) -> Any:
        received = self.channel.receive(topic, patience, of=[self.ranks[0]])
        if self.ranks[0] not in received:
            self.stuck = True
            raise Stuck(f"rank {self.ranks[0]} was lost")
        return received[self.ranks[0]]

    def _room(self, size: int) -> bool:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return bool(free > 3 * size)
        if self.device.type != "cpu":
            return True
        import psutil

        # Every rank of the node needs as much, and gloo again as much.
        return bool(psutil.virtual_memory().available > 3 * size * self.size)

    def _time(self, size: int) -> float:
        tensor = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        times = []
        for _ in range(self.repeats + 1):
            self._end(dist.barrier(async_op=True), "the barrier")
            started = time.perf_counter()
            self._end(dist.all_reduce(tensor, async_op=True), f"an all_reduce of {amount(size)}", size)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])  # the first makes connections and buffers

    def pair(self, pair: Pair, size: int) -> Link | None:
        """Called on: the ranks of the group. Send and receive on the devices between two of them."""
        a, b = pair
        if self.channel.rank not in pair:
            return None
        other = self.ranks.index(b if self.channel.rank == a else a)
        first = self.channel.rank == a
        latency = self._there_and_back(torch.zeros(1, device=self.device), other, first, 10)
        seconds = self._there_and_back(torch.zeros(size // 4, device=self.device), other, first, 3)
        return Link(a=a, b=b, device_latency=latency / 2, device_rate=2 * size / seconds) if first else None

    def _there_and_back(self, tensor: torch.Tensor, other: int, first: bool, times: int) -> float:
        taken = []
        for _ in range(times + 1):
            started = time.perf_counter()
            for sends in (first, not first):
                work = dist.isend(tensor, other) if sends else dist.irecv(tensor, other)
                self._end(work, "a send or receive", tensor.numel() * 4)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])

    def _end(self, work: Any, what: str, size: int = 0) -> None:
        """Wait for it; `Stuck` when it does not end."""
        limit = LIMIT + size / 1e6  # even a megabyte a second is an answer
        try:
            if self.device.type == "cpu":
                work.wait(timedelta(seconds=limit))
                return
            deadline = time.monotonic() + limit
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise TimeoutError
            work.wait()
            torch.accelerator.synchronize()
        except (RuntimeError, TimeoutError) as error:
            self.stuck = True
            first = str(error).strip().splitlines()[0] if str(error).strip() else "no answer"
            raise Stuck(f"{what} did not end: {first[:200]}") from error

    def leave(self) -> None:
        """Called on: the ranks of the group. Take the group down, unless something hangs in it."""
        if not self.stuck and dist.is_initialized():
            dist.destroy_process_group()


def copy_rate(size: int = 1 << 26) -> float:
    """Bytes a second that this machine copies in memory: what no line inside it can be faster than."""
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return size / best
