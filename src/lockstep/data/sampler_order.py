"""The order of an epoch, read from any place in it.

Torch's own samplers are asked for their whole order at once, as one tensor, so that a place far into an epoch costs no
more than its start. Any other sampler is walked: indices are passed over, the samples they stand for are never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from lockstep.data.sampler import SeedableRandomSampler

_AT_ONCE = 4096
"""Indices that are taken out of a tensor together: one call for many batches costs far less than one for each."""


class IndexOrder:
    """An order that is known from one end to the other."""

    def __init__(self, indices: Tensor | Sequence[int], place: int, sampler: RandomSampler | None = None) -> None:
        self._indices = indices
        self._place = min(place, len(indices))
        self._sampler = sampler

    def rounds(self, size: int, begin: int, count: int) -> Iterator[list[Any]]:
        """Of each full round of ``size`` indices, the ``count`` from ``begin`` on."""
        indices, place = self._indices, self._place
        number = (len(indices) - place) // size
        self._place = place + number * size
        if not isinstance(indices, Tensor):
            for start in range(place + begin, self._place, size):
                yield list(indices[start : start + count])
            return
        parts = indices[place : self._place].view(number, size)[:, begin : begin + count]
        step = max(1, _AT_ONCE // count)
        for first in range(0, number, step):
            yield from parts[first : first + step].tolist()

    def rest(self) -> list[Any]:
        """What was left when there was no full round any more."""
        return self._slice(self._place, len(self._indices))

    def head(self, count: int) -> list[Any]:
        """The first indices of the epoch; fewer when it has not so many."""
        return self._slice(0, count)

    def close(self) -> None:
        """Leave the sampler as if it had been iterated."""
        sampler = self._sampler
        if isinstance(sampler, SeedableRandomSampler):
            sampler.epoch += 1
        elif sampler is not None and sampler.generator is not None:
            # Torch draws once more for the part that is left over when more samples are asked for than there are.
            _shuffled(len(self._indices), sampler.generator)

    def _slice(self, begin: int, end: int) -> list[Any]:
        part = self._indices[begin:end]
        return part.tolist() if isinstance(part, Tensor) else list(part)


class IterOrder:
    """An order that only its sampler knows."""

    def __init__(self, indices: Iterable[Any], place: int, keep: int) -> None:
        self._rest: Iterator[Any] = iter(indices)
        self._head = list(itertools.islice(self._rest, keep))
        """Kept from the start: what a short last round is filled with."""
        self._left: list[Any] = []
        if place <= len(self._head):
            self._rest = itertools.chain(self._head[place:], self._rest)
        else:
            next(itertools.islice(self._rest, place - len(self._head), place - len(self._head)), None)

    def rounds(self, size: int, begin: int, count: int) -> Iterator[list[Any]]:
        """Of each full round, its part."""
        rest, end = self._rest, begin + count
        found = list(itertools.islice(rest, size))
        while len(found) == size:
            yield found if count == size else found[begin:end]
            found = list(itertools.islice(rest, size))
        self._left = found

    def rest(self) -> list[Any]:
        """What was left."""
        return self._left

    def head(self, count: int) -> list[Any]:
        """The first indices."""
        return self._head[:count]

    def close(self) -> None:
        """Nothing: the sampler has seen its end itself."""


def open_order(
    sampler: Any, place: int, keep: int, state: Tensor | None
) -> tuple[IndexOrder | IterOrder, Tensor | None]:
    """The order of a sampler's next epoch from ``place`` on, and the state of the generator that it comes from.

    ``state`` is that of an earlier epoch to be read once more; ``keep`` is how much of the head may be asked for.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return IndexOrder(range(len(sampler)), place), None
    if kind in (RandomSampler, SeedableRandomSampler) and not sampler.replacement:
        count = len(sampler.data_source)
        if sampler.num_samples == count:
            generator = _generator(sampler, state)
            state = generator.get_state()
            return IndexOrder(_shuffled(count, generator), place, sampler), state
    own = getattr(sampler, "generator", None)
    if not isinstance(own, torch.Generator):
        indices, state = draw_globally(sampler, state)
        return IterOrder(indices, place, keep), state
    if state is not None:
        own.set_state(state)
    state = own.get_state()
    return IterOrder(sampler, place, keep), state


def draw_globally(sampler: Iterable[Any], state: Tensor | None) -> tuple[Iterable[Any], Tensor]:
    """What a sampler gives that may draw from torch's own generator, and the state of that when it began.

    With a state of an earlier epoch it draws what it drew then. Samplers draw an epoch, or a seed for it, at its start:
    for so long the generator has that state.
    """
    now = torch.get_rng_state()
    if state is None:
        return sampler, now
    torch.set_rng_state(state)
    try:
        indices = iter(sampler)
        first = list(itertools.islice(indices, 1))
    finally:
        torch.set_rng_state(now)
    return itertools.chain(first, indices), state


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    """Torch's permutation; in half the memory the same numbers are drawn in half the time."""
    return torch.randperm(count, generator=generator, dtype=torch.int32 if count < 2**31 else torch.int64)


def _generator(sampler: RandomSampler, state: Tensor | None) -> torch.Generator:
    """What a random sampler draws from in the epoch that begins; the global generator is used as torch would."""
    generator: torch.Generator | None = sampler.generator
    if generator is None:
        generator = torch.Generator()
        if state is None:
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    elif isinstance(sampler, SeedableRandomSampler):
        generator.manual_seed(sampler.seed + sampler.epoch)
        return generator
    if state is not None:
        generator.set_state(state)
    return generator
