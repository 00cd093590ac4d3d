"""In which order pairs of ranks are measured, so that none disturbs another. The same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Pair = tuple[int, int]


def rounds(hosts: Mapping[int, str], pairs: Iterable[Pair] | None = None) -> list[list[Pair]]:
    """The pairs in rounds in which no node is used twice: those of one round can be measured at the same time.

    ``hosts`` has the machine of each rank. Pairs of ranks on one node use that machine alone.
    """
    left = list(combinations(sorted(hosts), 2)) if pairs is None else list(pairs)
    made: list[list[Pair]] = []
    while left:
        busy: set[str] = set()
        now: list[Pair] = []
        later: list[Pair] = []
        for pair in left:
            needs = {hosts[pair[0]], hosts[pair[1]]}
            if needs & busy:
                later.append(pair)
            else:
                now.append(pair)
                busy |= needs
        made.append(now)
        left = later
    return made


def fewer(hosts: Mapping[int, str], pairs: Sequence[Pair], most: int) -> list[Pair]:
    """All pairs, unless they are more than ``most``: then, between nodes, only those of each one's first rank."""
    if len(pairs) <= most:
        return list(pairs)
    first = {host: min(rank for rank in hosts if hosts[rank] == host) for host in hosts.values()}
    return [(a, b) for a, b in pairs if hosts[a] == hosts[b] or (first[hosts[a]] == a and first[hosts[b]] == b)]


def together(count: int, broken: Iterable[Pair]) -> list[int]:
    """Ranks of which every pair can talk: found by leaving out, again and again, the one with most broken pairs."""
    foes: dict[int, set[int]] = {rank: set() for rank in range(count)}
    for a, b in broken:
        foes[a].add(b)
        foes[b].add(a)
    while foes:
        worst = max(foes, key=lambda rank: (len(foes[rank]), rank))
        if not foes[worst]:
            break
        for other in foes.pop(worst):
            foes[other].discard(worst)
    return sorted(foes)
