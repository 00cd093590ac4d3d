"""Many ranks in few words."""

from __future__ import annotations

from collections.abc import Iterable


def name_ranks(ranks: Iterable[int], most: int | None = None) -> str:
    """ "rank 3", "ranks 0-2, 5"; with ``most``, no more than so many runs: "ranks 0, 2, 4, … (2048 in all)"."""
    chosen = sorted(set(ranks))
    return f"rank{'' if len(chosen) == 1 else 's'} {number_ranks(chosen, most)}"


def number_ranks(ranks: Iterable[int], most: int | None = None) -> str:
    """The same without the word: "3", "0-2, 5"."""
    chosen = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in chosen:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    cut = most is not None and len(runs) > most
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in (runs[:most] if cut else runs))
    return f"{text}, … ({len(chosen)} in all)" if cut else text
