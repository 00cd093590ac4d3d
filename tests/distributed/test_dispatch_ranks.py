"""Batches that rank 0 read: each rank gets its own, whole, in order, in two collectives a round at most."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lockstep.comm import tensors
from lockstep.data.dispatch import Delivery, RankBatch, dispatch
from lockstep.data.global_batch import GlobalBatch
from lockstep.errors import DataError, DistributedOperationException, PeerFailure, UsageError
from lockstep.process_group.group import Group
from lockstep.testing import run_ranks
from lockstep.topology.topology import Topology
from tests.ranks import in_soak, join

LIMIT = 60.0
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Sample:
    inputs: Any
    label: Any


@dataclass(frozen=True)
class Tag:
    name: str


class Graph:
    """A batch of a class that nobody knows as a container."""

    def __init__(self, nodes: Tensor, name: str) -> None:
        self.nodes = nodes
        self.name = name


def run(fn: Any, world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(fn, world_size, *args, timeout=LIMIT, **kwargs)


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that any rank can make: whole numbers, exact in every dtype."""
    found = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed))
    return (found % 2).bool() if dtype == torch.bool else found.to(dtype)


def make(kind: str, n: int) -> Any:
    """Share ``n`` of a source; its shapes differ from those of its neighbours."""
    rows = 1 + n % 3
    x = numbers(n, (rows, 4))
    if kind == "tensor":
        return x
    if kind == "tuple":
        return x, numbers(n, (rows,), torch.int64)
    if kind == "dict":
        return {"x": x, 7: numbers(n, (rows,), torch.bool), "name": f"share {n}"}
    if kind == "mappings":
        return OrderedDict(a=x, b=UserDict(c=-x, note=n))
    if kind == "dataclass":
        return Sample(inputs=Pair(x, [x + 1, (x + 2,)]), label={"y": torch.tensor(n)})
    if kind == "objects":
        return ["text", None, n, 2.5, b"raw", Tag(f"{n}"), {"set": {n}}, np.arange(n), range(n), x]
    if kind == "no tensors":
        return {"text": [f"line {n}"] * rows, "more": None}
    if kind == "changing":
        return [x, (x,), {"x": x}, None, Pair(x, "y"), torch.tensor(n), "plain"][n % 7]
    if kind == "dtypes":
        return [numbers(n + k, (rows, k), dtype) for k, dtype in enumerate(DTYPES)] + [
            numbers(n, (), dtype) for dtype in DTYPES
        ]
    if kind == "packed":
        return pack_sequence([numbers(n, (3,)), numbers(n + 1, (2,))])
    if kind == "graph":
        return Graph(x, f"graph {n}")
    if kind == "large":
        return {"x": numbers(n, (rows, 5_000), torch.float64), "y": numbers(n, (rows,), torch.bfloat16)}
    if kind == "one large":
        return (numbers(n, (20_000 if n % 3 == 1 else 2,)), f"share {n}")
    if kind == "large header":
        return {"text": "é" * 5_000 * (n % 3), "x": numbers(n, (3, 7), torch.uint8), "y": numbers(n, (9,))}
    raise AssertionError(kind)


SMALL = [
    "tensor",
    "tuple",
    "dict",
    "mappings",
    "dataclass",
    "objects",
    "no tensors",
    "changing",
    "dtypes",
    "packed",
    "graph",
]
LARGE = ["large", "one large", "large header"]


def same(left: Any, right: Any) -> bool:
    """Equal in types, structure, dtypes, shapes and every value."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, (dict, UserDict)):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left):
        return all(same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))
    if isinstance(left, Graph):
        return same(vars(left), vars(right))
    return bool(left == right)


def test_same_tells_differences() -> None:
    for kind in SMALL + LARGE:
        assert same(make(kind, 4), make(kind, 4)), kind
        assert not same(make(kind, 4), make(kind, 5)), kind


def shares(count: int, kind: str = "tuple") -> Iterator[RankBatch]:
    """Share n has 1 + n % 3 rows and starts where the one before it ends; the first is at 100."""
    start = 100
    for n in range(count):
        rows = 1 + n % 3
        yield RankBatch(batch=make(kind, n), start=start, rows=rows, real=rows, ids=range(start, start + rows))
        start += rows


def expected(count: int, rank: int, world_size: int, even: bool) -> list[tuple[int, GlobalBatch, bool]]:
    """What a rank should get, computed apart: (number of the share, round, last)."""
    all_shares = list(shares(count, "no tensors"))
    found = []
    for first in range(0, count, world_size):
        there = list(range(first, min(first + world_size, count)))
        real = [all_shares[n].rows for n in there]
        missing = world_size - len(there)
        if even:
            given = [k % min(world_size, count) for k in range(len(there), world_size)]
            there += given
            rows = [all_shares[n].rows for n in there]
        else:
            rows = real + [0] * missing
        if rank < len(there):
            share = all_shares[there[rank]]
            row = GlobalBatch(all_shares[first].start, tuple(rows), tuple(real + [0] * missing), share.ids)
            found.append((there[rank], row, False))
    return [(n, row, place == len(found)) for place, (n, row, _) in enumerate(found, 1)]


def right(got: list[Delivery], kind: str, count: int, group: Group, even: bool) -> None:
    wanted = expected(count, group.rank, group.world_size, even)
    assert len(got) == len(wanted), (kind, count, even, got)
    for (batch, row, last), (n, wanted_row, wanted_last) in zip(got, wanted, strict=True):
        where = (kind, count, even, group.rank, n)
        assert same(batch, make(kind, n)), (where, batch)
        assert row == wanted_row, (where, row)
        assert list(row.ids) == list(wanted_row.ids), (where, row)
        assert last is wanted_last, where


def counted(group: Group, source: Iterator[RankBatch] | None, even: bool) -> tuple[list[Delivery], list[int]]:
    """What a rank gets, and the collectives that each of it took; last those of the end."""
    got, used = [], []
    batches = dispatch(group, source, even=even)
    before = group.pg._get_sequence_number_for_group()
    while (found := next(batches, None)) is not None:
        got.append(found)
        now = group.pg._get_sequence_number_for_group()
        used.append(now - before)
        before = now
    used.append(group.pg._get_sequence_number_for_group() - before)
    return got, used


def in_step(group: Group) -> None:
    """Called on: all ranks. A collective that only works when none of them is still in another."""
    found = tensors.gather(group, torch.tensor([group.rank]))
    assert found.tolist() == list(range(group.world_size))


# --- what is in a batch ------------------------------------------------------------------------------------------


def deliver(kinds: list[str], counts: list[int], debug: bool = False) -> dict[str, set[int]]:
    group = join(debug)
    found: dict[str, set[int]] = {}
    for kind in kinds:
        for count in counts:
            for even in (False, True):
                source = shares(count, kind) if group.rank == 0 else None
                got, used = counted(group, source, even)
                right(got, kind, count, group, even)
                found.setdefault(kind, set()).update(used)
                in_step(group)
    return found


@pytest.mark.parametrize("world_size", [3, *in_soak(2, 4)])
def test_every_kind_of_batch_arrives_whole(world_size: int) -> None:
    for used in run(deliver, world_size, SMALL + LARGE, [9, 4 * world_size]):
        for kind in SMALL:
            assert used[kind] <= {0, 1}, kind
        for kind in LARGE:
            assert max(used[kind]) == 2, kind


def test_in_debug_mode_too() -> None:
    run(deliver, 2, ["dataclass", "large"], [3, 4], debug=True)


def one_meant_something_else() -> str:
    group = join(debug=True)
    batches = dispatch(group, shares(4) if group.rank == 0 else None, even=True)
    next(batches)
    with pytest.raises(DistributedOperationException, match="different operations") as raised:
        next(batches) if group.rank == 0 else tensors.gather(group, torch.ones(2))
    return str(raised.value)


def test_debug_mode_tells_who_does_not_ask_for_a_batch() -> None:
    for text in run(one_meant_something_else, 2):
        assert "lockstep.dispatch_batches" in text
        assert "lockstep.gather" in text


def sizes_around_a_frame() -> None:
    """Texts and tensors, byte by byte around where a frame is full."""
    group = join()
    for text in (True, False):
        wanted = list(range(3_500, 4_200))
        made = ("x" * n if text else torch.arange(n).to(torch.uint8) for n in wanted for _ in range(group.world_size))
        source = (RankBatch((batch, torch.tensor(1 + 2j)), 0, 1, 1) for batch in made)
        got, used = counted(group, source if group.rank == 0 else None, True)
        for n, (batch, _, _) in zip(wanted, got, strict=True):
            assert same(batch, ("x" * n if text else torch.arange(n).to(torch.uint8), torch.tensor(1 + 2j))), n
        assert used[0] == 1
        assert used[-2:] == [2, 0]
        assert used[:-1] == sorted(used[:-1])
        in_step(group)


def test_no_size_falls_between_frame_and_payload() -> None:
    run(sizes_around_a_frame, 2)


def odd_tensors() -> None:
    group = join()

    def odd() -> dict[str, Any]:
        image = numbers(1, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
        base = numbers(2, (6, 8))
        marked = numbers(3, (2,))
        marked.note = "mine"  # type: ignore[attr-defined]
        return {
            "image": image,
            "turned": base.T,
            "cut": base[1::2, 2:5],
            "wide": torch.ones(1, 3).expand(500, 3),
            "conjugate": numbers(4, (3,), torch.complex64).conj() * 1,
            "lazy conjugate": torch.tensor([1 + 2j]).conj(),
            "gradient": torch.ones(2, requires_grad=True),
            "computed": torch.ones(2, requires_grad=True) * 2,
            "sparse": torch.eye(3).to_sparse(),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "marked": marked,
            "empty": [torch.empty(0), torch.empty(2, 0, 3, dtype=torch.int8), torch.empty(0, dtype=torch.int64)],
            "twice": (base, base),
        }

    source = (RankBatch(odd(), 0, 2, 2) for _ in range(2 * group.world_size)) if group.rank == 0 else None
    for batch, _, _ in dispatch(group, source, even=True):
        if group.rank == 0:
            continue
        wanted = odd()
        for name in ("image", "turned", "cut", "wide", "conjugate", "lazy conjugate", "gradient", "computed", "empty"):
            assert same(batch[name], wanted[name]), name
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        assert batch["turned"].stride() == wanted["turned"].stride()
        assert batch["wide"].untyped_storage().nbytes() == 500 * 3 * 4
        assert batch["gradient"].requires_grad
        assert not batch["image"].requires_grad
        assert batch["computed"].is_leaf
        assert torch.equal(batch["sparse"].to_dense(), torch.eye(3))
        assert type(batch["parameter"]) is torch.nn.Parameter
        assert batch["marked"].note == "mine"
        assert batch["twice"][0] is batch["twice"][1]


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_tensors_of_every_layout(world_size: int) -> None:
    run(odd_tensors, world_size)


def kept_and_changed() -> None:
    """Batches stay what they are when others follow, and each tensor has memory of its own."""
    group = join()
    kept = []
    for batch, _, _ in dispatch(group, shares(6 * group.world_size, "large") if group.rank == 0 else None, even=True):
        kept.append(batch)
        batch["y"].add_(1)
        if group.rank != 0:
            for tensor in batch.values():
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    for place, batch in enumerate(kept):
        wanted = make("large", place * group.world_size + group.rank)
        wanted["y"].add_(1)
        assert same(batch, wanted), place


def test_what_arrived_is_its_own_and_can_be_written_to() -> None:
    run(kept_and_changed, 2)


def in_and_out_of_inference_mode(kind: str) -> None:
    group = join()
    batches = dispatch(group, shares(8, kind) if group.rank == 0 else None, even=True)
    for place in range(4):
        with torch.inference_mode(place % 2 == 0):
            batch, _, _ = next(batches)
            assert same(batch, make(kind, 2 * place + group.rank))
    assert next(batches, None) is None


@pytest.mark.parametrize("kind", ["large", "large header"])
def test_in_and_out_of_inference_mode(kind: str) -> None:
    run(in_and_out_of_inference_mode, 2, kind)


# --- the end of the data -----------------------------------------------------------------------------------------


def ends(world_size: int) -> dict[tuple[int, bool], list[int]]:
    group = join()
    found = {}
    for count in range(3 * world_size + 1):
        for even in (False, True):
            got, used = counted(group, shares(count) if group.rank == 0 else None, even)
            right(got, "tuple", count, group, even)
            in_step(group)
            found[count, even] = used
    return found


@pytest.mark.parametrize("world_size", [3, *in_soak(2, 4)])
def test_every_end_and_what_it_costs(world_size: int) -> None:
    for rank, found in enumerate(run(ends, world_size, world_size)):
        for (count, even), used in found.items():
            full, left = divmod(count, world_size)
            if count == 0:
                wanted = [1]  # all learn in one collective that there is nothing
            elif even:
                wanted = [1] * (full + (left > 0)) + [0]
            elif full:
                wanted = [1] * full + [0] * (rank < left) + [0]  # the uneven end came with the round before it
            else:
                wanted = [1, 0] if rank < left else [1]
            assert used == wanted, (rank, count, even)


def uneven_by_hand() -> list[tuple[list[int], GlobalBatch, bool]]:
    group = join()
    source = iter([RankBatch(torch.tensor([n]), 10 + n, 1, 1, [n]) for n in range(4)])
    return [
        (batch.tolist(), row, last)
        for batch, row, last in dispatch(group, source if not group.rank else None, even=False)
    ]


def test_without_even_ranks_end_before_the_others() -> None:
    zero, one, two = run(uneven_by_hand, 3)
    start = GlobalBatch(10, (1, 1, 1), (1, 1, 1))
    assert zero == [([0], start, False), ([3], GlobalBatch(13, (1, 0, 0), (1, 0, 0)), True)]
    assert one == [([1], start, True)]
    assert two == [([2], start, True)]
    assert zero[1][1].ids == [3]
    assert two[0][1].ids == [2]


def even_by_hand() -> list[tuple[list[int], GlobalBatch, bool]]:
    group = join()
    source = iter([RankBatch(torch.tensor([n] * (n + 1)), n, n + 1, n + 1) for n in range(4)])
    found = []
    for batch, row, last in dispatch(group, source if not group.rank else None, even=True):
        found.append((batch.tolist(), row, last))
        batch.fill_(99)  # what a rank does to its batch is not seen by who gets it again
    return found


def test_with_even_shares_of_the_first_round_come_again() -> None:
    zero, one, two = run(even_by_hand, 3)
    end = GlobalBatch(3, (4, 2, 3), (4, 0, 0))
    assert zero[1] == ([3] * 4, end, True)
    assert one[1] == ([1] * 2, end, True)
    assert two[1] == ([2] * 3, end, True)
    assert end.end == 7


def few_by_hand() -> list[tuple[list[int], GlobalBatch, bool]]:
    group = join()
    source = iter([RankBatch(torch.tensor([n]), n, 1, 1) for n in range(2)])
    return [
        (batch.tolist(), row, last)
        for batch, row, last in dispatch(group, source if not group.rank else None, even=True)
    ]


def test_with_fewer_shares_than_ranks_they_come_again_in_turn() -> None:
    ranks = run(few_by_hand, 4)
    for rank, found in enumerate(ranks):
        assert found == [([rank % 2], GlobalBatch(0, (1, 1, 1, 1), (1, 1, 0, 0)), True)]


def random_cases(cases: list[tuple[int, int, bool]]) -> list[list[tuple[int, int]]]:
    """For each case the shares that this rank got, with how many of their rows are real."""
    group = join()
    found = []
    for count, width, even in cases:
        made = (RankBatch((torch.full((width,), n), n), n, 1, 1) for n in range(count))
        got = []
        for place, ((x, n), row, last) in enumerate(dispatch(group, made if group.rank == 0 else None, even=even)):
            assert x.tolist() == [n] * width
            assert row.start == place * group.world_size
            assert not got or not got[-1][2]
            got.append((n, row.real[group.rank], last))
        assert not got or got[-1][2]
        found.append([(n, real) for n, real, _ in got])
    in_step(group)
    return found


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    world_size=st.integers(1, 4),
    cases=st.lists(st.tuples(st.integers(0, 17), st.sampled_from([0, 3, 600]), st.booleans()), min_size=5, max_size=30),
)
def test_every_real_share_is_delivered_once_and_in_order(world_size: int, cases: list[tuple[int, int, bool]]) -> None:
    for (count, _, even), *ranks in zip(cases, *run(random_cases, world_size, cases), strict=True):
        if even:
            assert {len(rank) for rank in ranks} == {-(-count // world_size)}
        rounds = max(map(len, ranks))
        dealt = [rank[place] for place in range(rounds) for rank in ranks if place < len(rank)]
        assert [n for n, real in dealt if real] == list(range(count))
        repeats = [n for n, real in dealt if not real]
        assert len(repeats) == (-count % world_size if even and count else 0)
        assert all(n < world_size for n in repeats)


def no_source() -> str:
    try:
        next(dispatch(join(), None, even=True))
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def test_rank_0_needs_a_source() -> None:
    assert "no source on rank 0" in run(no_source, 1)[0]


# --- one rank ----------------------------------------------------------------------------------------------------


class Alone(Group):
    """A rank that may not talk."""

    @property
    def pg(self) -> Any:
        raise AssertionError("talked to others")


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_alone_nothing_is_sent(count: int, even: bool) -> None:
    made = list(shares(count, "graph"))
    group = Alone(Topology(rank=0, world_size=1, device=torch.device("cpu"), backend=None))
    got = list(dispatch(group, iter(made), even=even))
    right(got, "graph", count, group, even)
    assert all(batch is share.batch for (batch, _, _), share in zip(got, made, strict=True))


# --- reading -----------------------------------------------------------------------------------------------------


def reading(even: bool) -> tuple[list[int], list[int]]:
    """How many shares had been read when each batch was handed out, and how many of them are still held."""
    group = join()
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    read = []

    def source() -> Iterator[RankBatch]:
        for n in range(12):
            batch = torch.full((3,), n)
            alive.add(batch)
            read.append(n)
            yield RankBatch(batch, n, 3, 3)
            del batch

    seen, held = [], []
    for batch, _, _ in dispatch(group, source() if group.rank == 0 else None, even=even):
        del batch
        gc.collect()
        seen.append(len(read))
        held.append(len(alive))
    return seen, held


def test_rank_0_reads_one_round_ahead_and_holds_no_more() -> None:
    seen, held = run(reading, 3, False)[0]
    assert seen == [6, 9, 12, 12]
    assert held == [4, 4, 4, 1]  # its own batch, and the round that was read ahead
    seen, held = run(reading, 3, True)[0]
    assert seen == [6, 9, 12, 12]
    assert held == [6, 7, 7, 4]  # and the first round


# --- failures ----------------------------------------------------------------------------------------------------


def source_fails(ticks: int) -> tuple[int, str, int | None, float]:
    """How many batches came, the error and the rank it names, and how long after the last batch it was raised."""
    group = join()
    for _ in range(ticks):
        group.advance()
    group.barrier()

    def source() -> Iterator[RankBatch]:
        yield from shares(3 * group.world_size)
        time.sleep(0.3)  # the others wait by now
        raise OSError("the disk is gone")

    got, since = 0, time.monotonic()
    try:
        for _ in dispatch(group, source() if group.rank == 0 else None, even=True):
            got, since = got + 1, time.monotonic()
    except OSError as error:
        group.abort(f"OSError: {error}", leaving=True)
        return got, str(error), None, time.monotonic() - since
    except PeerFailure as error:
        return got, str(error), error.rank, time.monotonic() - since
    return got, "nothing was raised", None, 0.0


@pytest.mark.parametrize("ticks", [0, 1])
@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_a_source_that_fails_frees_the_others(world_size: int, ticks: int) -> None:
    zero, *others = run(source_fails, world_size, ticks)
    assert zero[:2] == (2, "the disk is gone")
    for got, told, rank, seconds in others:
        assert got == 2
        assert "While receiving a batch" in told
        assert seconds < 5
        if ticks:  # at tick 0 nobody waits for the cause once the line is broken, so it may not be known
            assert told.startswith("Rank 0 failed: OSError: the disk is gone. ")
            assert rank == 0


class Held:
    """A batch that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def unsendable(place: str) -> str:
    group = join()
    group.advance()
    made: Any = {"dict": {"x": torch.ones(2), "deep": [1, Held()]}, "top": Held(), "lambda": (lambda: 1,)}[place]
    source = iter([RankBatch(torch.ones(1), 0, 1, 1), RankBatch(made, 1, 1, 1)]) if group.rank == 0 else None
    try:
        next(dispatch(group, source, even=True))
    except DataError as error:
        group.abort("DataError", leaving=True)
        return str(error)
    except PeerFailure as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("place", "named"),
    [("dict", "Held at batch['deep'][1]"), ("top", "Held at batch that"), ("lambda", "function at batch[0]")],
)
def test_what_cannot_be_sent_is_named(place: str, named: str) -> None:
    zero, one = run(unsendable, 2, place)
    assert named in zero
    assert "for rank 1" in zero
    assert "dispatch_batches=False" in zero
    assert one.startswith("Rank 0 failed: DataError")


def given_up() -> None:
    """Leaving an epoch on all ranks after the same batch leaves nothing behind that the next would meet."""
    group = join()
    for _ in range(2):
        batches = dispatch(group, shares(20, "large") if group.rank == 0 else None, even=True)
        for place in range(3):
            assert same(next(batches)[0], make("large", place * group.world_size + group.rank))
        in_step(group)


def test_an_epoch_can_be_given_up() -> None:
    run(given_up, 3)
