"""Collectives on structures between real ranks, each result compared with one computed apart."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.comm import objects, tensors, trees
from lockstep.comm.functional import gather as free_gather
from lockstep.comm.functional import reduce as free_reduce
from lockstep.errors import ConfigError, DistributedOperationException
from lockstep.testing import run_ranks
from tests.ranks import in_soak, join

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
SHAPES = ((), (1,), (3,), (0,), (2, 0, 3), (2, 3), (4, 1, 2))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Sample:
    inputs: Any
    label: Any


def made(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """A tensor that any rank can make for any other: small whole numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(7919 * seed + rank)
    numbers = torch.randint(0, 5, shape, generator=generator)
    return (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)


def same(left: Any, right: Any) -> None:
    """Equal in structure, types, dtypes, shapes and every value."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(left, right)
        return
    mine, theirs = list(trees.walk_paths(left)), list(trees.walk_paths(right))
    assert [path for path, _ in mine] == [path for path, _ in theirs]
    for (_, one), (_, other) in zip(mine, theirs, strict=True):
        same(one, other)


def joined(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts)


def summed(parts: list[Tensor]) -> Tensor:
    """The sum in the dtype of the parts; of booleans, how many were true."""
    total = torch.stack([part.long() if part.dtype == torch.bool else part for part in parts])
    return total.sum(0, dtype=total.dtype)


def greatest(parts: list[Tensor]) -> Tensor:
    """The largest values, in the dtype of the parts."""
    return torch.stack(parts).long().amax(0).to(parts[0].dtype)


def combine(how: Any, per_rank: list[Any]) -> Any:
    """The expected tree: leaf by leaf from the trees of all ranks."""
    columns = zip(*([leaf for _, leaf in trees.walk_paths(tree)] for tree in per_rank), strict=True)
    return trees.unflatten(per_rank[0], iter([how(list(column)) for column in columns]))


# --- every dtype and shape ---------------------------------------------------------------------------------------


def all_dtypes_and_shapes() -> None:
    group = join()
    everyone = range(group.world_size)
    for place, dtype in enumerate(DTYPES):
        for number, shape in enumerate(SHAPES):
            seed = place * len(SHAPES) + number
            parts = [made(shape, dtype, rank, seed) for rank in everyone]
            mine = parts[group.rank].clone()
            same(tensors.gather(group, mine), joined(parts))
            same(tensors.reduce(group, mine, "sum"), summed(parts))
            same(tensors.reduce(group, mine, "mean"), summed(parts) / group.world_size)
            if not dtype.is_complex:
                same(tensors.reduce(group, mine, "max"), greatest(parts))
            same(mine, parts[group.rank])
            root = seed % group.world_size
            received = tensors.broadcast(group, mine, root)
            assert received is mine
            same(mine, parts[root])


@pytest.mark.parametrize("world_size", [3, *in_soak(2, 4)])
def test_each_dtype_and_shape(world_size: int) -> None:
    run_ranks(all_dtypes_and_shapes, world_size)


def unusual_tensors() -> None:
    group = join()
    everyone = range(group.world_size)
    base = [torch.arange(12.0).view(3, 4) + 100 * rank for rank in everyone]
    mine = base[group.rank]
    for cut in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1], lambda t: t[:1].expand(3, 4)):
        parts = [cut(part) for part in base]
        same(tensors.gather(group, cut(mine)), torch.cat(parts))
        same(tensors.gather(group, [cut(mine), mine])[0], torch.cat(parts))
        same(tensors.reduce(group, cut(mine), "sum"), torch.stack(parts).sum(0))
    strided = mine.clone()
    tensors.broadcast(group, [strided.t(), strided.new_zeros(2)], 1)
    same(strided, base[1])

    tracked = mine.clone().requires_grad_()
    for result in (tensors.gather(group, tracked), tensors.reduce(group, tracked, "mean")):
        assert not result.requires_grad
    tensors.broadcast(group, tracked, 0)
    same(tracked.detach(), base[0])
    assert tracked.requires_grad
    assert tracked.is_leaf

    sparse = torch.eye(3).mul(group.rank + 1).to_sparse()
    same(tensors.gather(group, sparse), torch.cat([torch.eye(3) * (rank + 1) for rank in everyone]))
    same(tensors.gather(group, []), [])
    same(tensors.reduce(group, {}), {})
    same(
        tensors.gather(group, (torch.zeros(0), torch.zeros(2, 0))), (torch.zeros(0), torch.zeros(2 * len(everyone), 0))
    )


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_strides_gradients_sparse_and_nothing_at_all(world_size: int) -> None:
    run_ranks(unusual_tensors, world_size)


def through_inference_mode() -> None:
    """The same structures in and out of inference mode: what is remembered must serve both."""
    group = join()
    everyone = range(group.world_size)

    def tree(rank: int) -> dict[str, Tensor]:
        return {"a": torch.full((3,), float(rank)), "b": torch.tensor(rank), "c": torch.tensor([True, rank == 0])}

    gathered = combine(joined, [tree(rank) for rank in everyone])
    total = combine(summed, [tree(rank) for rank in everyone])
    with torch.inference_mode():
        born_inside = tree(group.rank)
    for _ in range(2):
        for inside in (True, False, True):
            for mine in (born_inside, tree(group.rank)):
                with torch.inference_mode(inside):
                    same(tensors.gather(group, mine), gathered)
                    same(tensors.gather(group, mine["a"]), gathered["a"])
                    same(tensors.reduce(group, mine, "sum"), total)
                    same(tensors.reduce(group, mine["a"], "sum"), total["a"])
                    objects.gather_object(group, [1])
                    tensors.pad_across_processes(group, mine["a"])
    for inside in (True, False):
        with torch.inference_mode():
            target = tree(group.rank)
        with torch.inference_mode(inside):
            tensors.broadcast(group, target, 1)
            tensors.broadcast(group, tree(group.rank), 1)
        same(target, tree(1))


def test_inference_mode_inside_and_outside() -> None:
    run_ranks(through_inference_mode, 2)


# --- structures --------------------------------------------------------------------------------------------------


def random_tree(rank: int, seed: int, large: bool = False) -> Any:
    """A structure that depends on the seed, with values that depend on the rank too."""
    choose = random.Random(seed)
    counter = iter(range(1, 1000))

    def grow(depth: int) -> Any:
        kind = choose.choice(["leaf", "list", "tuple", "dict", "named", "dataclass", "ordered"]) if depth else "leaf"
        if kind == "leaf":
            shape = (70_000, choose.randint(1, 3)) if large else choose.choice(SHAPES)
            return made(shape, choose.choice(DTYPES), rank, seed * 1000 + next(counter))
        size = choose.randint(0 if depth < 3 else 1, 3)
        if kind == "list":
            return [grow(depth - 1) for _ in range(size)]
        if kind == "tuple":
            return tuple(grow(depth - 1) for _ in range(size))
        if kind in ("dict", "ordered"):
            return (dict if kind == "dict" else OrderedDict)((f"key {i}", grow(depth - 1)) for i in range(size))
        return (Pair if kind == "named" else Sample)(grow(depth - 1), grow(depth - 1))

    return grow(3)


def random_trees(seeds: range, large: bool) -> int:
    group = join()
    leaves = 0
    kept: list[tuple[Any, Any]] = []
    for seed in seeds:
        everyone = [random_tree(rank, seed, large) for rank in range(group.world_size)]
        mine = random_tree(group.rank, seed, large)
        leaves += len(trees.flatten(mine)[0])
        expected = combine(joined, everyone)
        found = tensors.gather(group, mine)
        same(found, expected)
        kept.append((found, expected))
        total = combine(summed, everyone)
        found = tensors.reduce(group, mine, "sum")
        same(found, total)
        kept.append((found, total))
        same(tensors.reduce(group, mine, "mean"), trees.map_tensors(lambda t: t / group.world_size, total))
        real = trees.map_tensors(lambda leaf: leaf.real, mine)
        same(tensors.reduce(group, real, "max"), combine(lambda parts: greatest([p.real for p in parts]), everyone))
        same(mine, everyone[group.rank])
        root = seed % group.world_size
        tensors.broadcast(group, mine, root)
        same(mine, everyone[root])
    for found, expected in kept:  # none of the later calls has written into an earlier result
        same(found, expected)
    return leaves


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_random_structures(world_size: int) -> None:
    assert run_ranks(random_trees, world_size, range(60), False)[0] > 200


def test_structures_above_a_megabyte() -> None:
    run_ranks(random_trees, 2, range(100, 106), True)


def results_stand_alone() -> None:
    group = join()

    def tree(value: float) -> dict[str, Tensor]:
        return {"a": torch.full((4,), value), "b": torch.full((2,), int(value)), "c": torch.full((), value) > 1}

    for call in (tensors.gather, tensors.reduce):
        for part in (tree, lambda value: tree(value)["a"], lambda value: [torch.zeros(0), tree(value)["a"]]):
            first = call(group, part(1.0))
            copy = trees.map_tensors(torch.clone, first)
            second = call(group, part(5.0))
            same(first, copy)
            trees.map_tensors(lambda leaf: leaf.zero_(), second)
            same(first, copy)
            same(call(group, part(1.0)), copy)
    mine = tree(1.0 + group.rank)
    tensors.broadcast(group, mine)
    tensors.broadcast(group, tree(9.0))
    same(mine, tree(1.0))


def test_results_share_no_memory_with_later_calls() -> None:
    run_ranks(results_stand_alone, 2)


# --- reduce and pad ----------------------------------------------------------------------------------------------


def reductions() -> None:
    group = join()
    rank, size = group.rank, group.world_size
    mean = tensors.reduce(group, torch.tensor([rank, 1]), "mean")
    same(mean, torch.tensor([(size - 1) / 2, 1.0]))
    same(tensors.reduce(group, torch.tensor([True, rank == 0]), "sum"), torch.tensor([size, 1]))
    same(tensors.reduce(group, torch.tensor([True, rank == 0]), "mean"), torch.tensor([1.0, 1 / size]))
    own = torch.tensor([float(rank)])
    assert tensors.reduce(group, own, "none") is own
    same(tensors.reduce(group, own, "none", scale=3.0), own * 3)
    same(tensors.reduce(group, torch.tensor([2.0]), "sum", scale=0.5), torch.tensor([1.0 * size]))
    same(tensors.reduce(group, torch.tensor([2.0]), "mean", scale=0.5), torch.tensor([1.0]))
    same(tensors.reduce(group, torch.tensor([2]), "sum", scale=0.5), torch.tensor([1.0 * size]))
    same(tensors.reduce(group, torch.tensor([rank, -rank]), "max"), torch.tensor([size - 1, 0]))
    same(tensors.reduce(group, torch.tensor([False, rank == 0]), "max"), torch.tensor([False, True]))
    with pytest.raises(ConfigError, match="complex numbers have no order"):
        tensors.reduce(group, torch.tensor([1j]), "max")
    # A nan is told, whoever has it: gloo and NCCL lose one that is not on the first rank.
    for length in (1, 300_000):
        own = torch.zeros(size + 1).repeat(length)
        own[rank] = torch.nan
        found = tensors.reduce(group, own, "max")
        assert found[:size].isnan().all()
        assert not found[size:].any()
    # The function's default is the mean, the method's is the sum, as in Accelerate.
    same(free_reduce(torch.tensor(2.0)), torch.tensor(2.0))
    same(Accelerator(cpu=True).reduce(torch.tensor(2.0)), torch.tensor(2.0 * size))
    same(free_gather(torch.tensor(rank)), torch.arange(size))


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_means_counts_and_scales(world_size: int) -> None:
    run_ranks(reductions, world_size)


def padding() -> None:
    group = join()
    rank, size = group.rank, group.world_size
    mine = torch.arange(2.0 * (rank + 1)).view(rank + 1, 2) + 1
    rows = torch.cat([mine, torch.zeros(size - rank - 1, 2)])
    same(tensors.pad_across_processes(group, mine), rows)
    front = torch.cat([torch.full((size - rank - 1, 2), -1.0), mine])
    same(tensors.pad_across_processes(group, mine, pad_index=-1, pad_first=True), front)
    wide = torch.ones(2, rank + 1, dtype=torch.bfloat16)
    expected = torch.zeros(2, size, dtype=torch.bfloat16)
    expected[:, : rank + 1] = 1
    for dim in (1, -1):
        same(tensors.pad_across_processes(group, wide, dim=dim), expected)
    tree = {"a": mine, "scalar": torch.tensor(rank), "same": torch.ones(2), "flags": torch.ones(rank, dtype=torch.bool)}
    found = tensors.pad_across_processes(group, tree)
    flags = torch.arange(size - 1) < rank
    same(found, {"a": rows, "scalar": torch.tensor(rank), "same": torch.ones(2), "flags": flags})
    everyone = [torch.arange(2.0 * (r + 1)).view(r + 1, 2) + 1 for r in range(size)]
    padded = torch.cat([torch.cat([part, torch.zeros(size - len(part), 2)]) for part in everyone])
    same(tensors.gather(group, found)["a"], padded)
    assert tensors.pad_across_processes(group, []) == []


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_padding_to_the_longest(world_size: int) -> None:
    run_ranks(padding, world_size)


# --- objects -----------------------------------------------------------------------------------------------------


def python_objects() -> None:
    group = join()
    rank, size = group.rank, group.world_size
    for length in (0, 10, 4000, 4088, 4089, 5000, 300_000):
        mine = [rank, "x" * (length if rank == 1 else 3)]
        expected = [item for r in range(size) for item in (r, "x" * (length if r == 1 else 3))]
        assert objects.gather_object(group, mine) == expected
        for root in range(size):
            listed = [f"of {rank}", {"n": "y" * length, "rank": rank}]
            answer = objects.broadcast_object_list(group, listed, root)
            assert answer is listed
            assert listed == [f"of {root}", {"n": "y" * length, "rank": root}]
    assert objects.gather_object(group, []) == []
    assert objects.gather_object(group, (rank,)) == list(range(size))
    for wrong in ("text", b"bytes", 5, {"a": 1}):
        with pytest.raises(TypeError, match=re.escape("gather_object([value])")):
            objects.gather_object(group, wrong)
    with pytest.raises(ConfigError, match=f"from_process={size} is not a rank of this job. Allowed: 0 to {size - 1}."):
        objects.broadcast_object_list(group, [1], size)
    with pytest.raises(ConfigError, match="from_process=-1"):
        tensors.broadcast(group, torch.ones(1), -1)
    with pytest.raises(TypeError, match=re.escape("gather got a str at ['b'][1]")):
        tensors.gather(group, {"a": torch.ones(1), "b": [torch.ones(1), "no tensor"]})


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_objects_of_any_size(world_size: int) -> None:
    run_ranks(python_objects, world_size)


# --- how many collectives ----------------------------------------------------------------------------------------


def collectives_used() -> dict[str, int]:
    group = join()
    tree = {
        "a": torch.ones(3),
        "b": [torch.ones(2, dtype=torch.int64), torch.tensor(True)],
        "c": (torch.ones(1, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.uint8)),
    }
    plain = [torch.ones(300_000), torch.ones(5), torch.ones(())]
    calls = {
        "gather": lambda: tensors.gather(group, tree),
        "broadcast": lambda: tensors.broadcast(group, tree),
        "reduce mixed": lambda: tensors.reduce(group, tree, "mean"),
        "reduce one dtype, large": lambda: tensors.reduce(group, plain, "sum"),
        "pad": lambda: tensors.pad_across_processes(group, tree),
        "small object": lambda: objects.gather_object(group, [group.rank, "small"]),
        "small list": lambda: objects.broadcast_object_list(group, [group.rank, "small"]),
        "large object": lambda: objects.gather_object(group, ["x" * 10_000]),
        "none": lambda: tensors.reduce(group, tree, "none"),
    }
    used = {}
    for name, call in calls.items():
        for _ in range(2):  # the second time by a remembered plan
            before = group.pg._get_sequence_number_for_group()
            call()
            counted = group.pg._get_sequence_number_for_group() - before
            assert used.setdefault(name, counted) == counted
    return used


def test_a_structure_travels_in_one_collective() -> None:
    for used in run_ranks(collectives_used, 2):
        assert used.pop("none") == 0
        assert used.pop("large object") == 2
        assert used == dict.fromkeys(used, 1)
        assert len(used) == 7


# --- debug mode --------------------------------------------------------------------------------------------------

HEADLINE = "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."


def mismatch(case: str) -> tuple[str, int]:
    group = join(debug=True)
    odd = group.rank == 1
    calls = {
        "shape": lambda: tensors.gather(group, torch.ones(1, 6 if odd else 5)),
        "rank of the tensor": lambda: tensors.reduce(group, torch.ones((5, 1) if odd else (5,))),
        "dtype": lambda: tensors.gather(group, torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
        "key": lambda: tensors.gather(group, {("b" if odd else "a"): torch.ones(2)}),
        "leaves": lambda: tensors.gather(group, [torch.ones(2)] * (3 if odd else 2)),
        "operation": lambda: tensors.broadcast(group, torch.ones(2)) if odd else tensors.gather(group, torch.ones(2)),
        "reduction": lambda: tensors.reduce(group, torch.ones(2), "sum" if odd else "mean"),
        "object and tensor": lambda: objects.gather_object(group, [1]) if odd else tensors.gather(group, torch.ones(2)),
        "from_process": lambda: tensors.broadcast(group, torch.ones(2), 1 if odd else 0),
        "list from_process": lambda: objects.broadcast_object_list(group, [1], 1 if odd else 0),
        "padded dim": lambda: tensors.pad_across_processes(group, torch.ones(3, 6 if odd else 5)),
        "pad argument": lambda: tensors.pad_across_processes(group, torch.ones(3, 3), dim=1 if odd else 0),
    }
    try:
        calls[case]()
    except DistributedOperationException as error:
        text = str(error)
    else:
        text = "nothing was raised"
    same(tensors.gather(group, torch.tensor([group.rank])), torch.arange(group.world_size))
    return text, int(tensors.reduce(group, torch.tensor(1), "sum"))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("shape", [HEADLINE, "Operation: `lockstep.gather`", "  - Process 0: [1, 5]", "  - Process 1: [1, 6]"]),
        ("rank of the tensor", [HEADLINE, "reduce", "  - Process 0: [5]", "  - Process 1: [5, 1]"]),
        ("dtype", ["dtype mismatches", "  - Process 0: float32", "  - Process 1: float64"]),
        ("key", ["  - Process 0: ['a']: [2]", "  - Process 1: ['b']: [2]"]),
        ("leaves", ["  - Process 0: [0]: [2], [1]: [2]\n", "  - Process 1: [0]: [2], [1]: [2], [2]: [2]\n"]),
        ("operation", ["different operations", "lockstep.broadcast / lockstep.gather", "  - Process 0: [2]"]),
        ("reduction", ["reduce (mean)", "reduce (sum)"]),
        ("object and tensor", ["lockstep.gather / lockstep.gather_object", "  - Process 1: no tensors"]),
        ("from_process", ["arguments differ", "  - Process 0: from process 0", "  - Process 1: from process 1"]),
        ("list from_process", ["arguments differ", "broadcast_object_list", "  - Process 1: from process 1"]),
        ("padded dim", [HEADLINE, "pad_across_processes", "  - Process 0: [3, 5]", "  - Process 1: [3, 6]"]),
        ("pad argument", ["pad_across_processes (dim=0)", "pad_across_processes (dim=1)"]),
    ],
)
def test_debug_mode_tells_every_rank_what_differs(case: str, expected: list[str]) -> None:
    texts = []
    for text, together in run_ranks(mismatch, 3, case):
        assert together == 3
        for part in [*expected, "Operation: ", "Input shapes:\n"]:
            assert part in text
        # Every rank's own line of this file, so that a wrong branch can be found.
        called = text.partition("Called at:\n")[2].partition("\n\n")[0].splitlines()
        assert re.search(r"\nLikely cause: \S.*\nFix: \S", text)
        assert [line.partition(":")[0] for line in called] == [f"  - Process {rank}" for rank in range(3)]
        assert all(re.search(r"test_collectives\.py:\d+$", line) for line in called)
        texts.append(text)
    assert len(set(texts)) == 1
    if case == "operation":
        sites = [line.rpartition(":")[2] for line in called]
        assert sites[0] == sites[2]


def agreeing() -> None:
    group = join(debug=True)
    rank, size = group.rank, group.world_size
    same(tensors.gather(group, {"a": torch.tensor(rank)}), {"a": torch.arange(size)})
    same(tensors.reduce(group, torch.tensor(1), "sum"), torch.tensor(size))
    same(tensors.broadcast(group, torch.tensor(rank), 1), torch.tensor(1))
    assert tensors.pad_across_processes(group, torch.ones(rank + 1, 2)).shape == (size, 2)
    assert tensors.pad_across_processes(group, torch.ones(2, rank + 1), dim=-1).shape == (2, size)
    assert objects.gather_object(group, ["x" * rank]) == ["x" * r for r in range(size)]
    assert objects.broadcast_object_list(group, [rank, "a" * rank], 1) == [1, "a"]
    many = [torch.ones(3, 3) for _ in range(3000)]  # its description is far longer than a record
    assert len(tensors.gather(group, many)) == 3000


def test_debug_mode_lets_matching_calls_pass() -> None:
    run_ranks(agreeing, 2)


def different_models(case: str) -> str:
    accelerator = Accelerator(cpu=True)
    odd = accelerator.process_index == 1
    models = {
        "shape": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 if odd else 5)),
        "dtype": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4).to(torch.float64 if odd else torch.float32)),
        "count": lambda: nn.Sequential(nn.Linear(2, 3), *([nn.Linear(3, 3)] if odd else [])),
        "buffer": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=not odd)),
    }
    try:
        accelerator.prepare(models[case]())
    except DistributedOperationException as error:
        assert int(accelerator.reduce(torch.tensor(1))) == accelerator.num_processes
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("shape", "rank 0 has 1.weight [5, 3] torch.float32, rank 1 has 1.weight [4, 3] torch.float32"),
        ("dtype", "rank 0 has 1.weight [4, 3] torch.float32, rank 1 has 1.weight [4, 3] torch.float64"),
        ("count", "rank 0 has 2 parameters and buffers, rank 1 has 4"),
        ("buffer", "rank 0 has 7 parameters and buffers, rank 1 has 4"),
    ],
)
def test_models_that_differ_are_refused_on_every_rank(case: str, named: str) -> None:
    texts = run_ranks(different_models, 3, case)
    assert len(set(texts)) == 1
    assert named in texts[0]


def weights_of_rank_0() -> list[float]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    model[1].running_mean.fill_(float(accelerator.process_index))
    prepared = accelerator.prepare(model)
    return [float(tensor.double().sum()) for tensor in accelerator.unwrap_model(prepared).state_dict().values()]


def test_every_rank_starts_with_the_weights_of_rank_0() -> None:
    first, *others = run_ranks(weights_of_rank_0, 3)
    assert others == [first, first]


def many_shapes() -> list[tuple[int, float]]:
    group = join(debug=True)
    wrong = []
    for turn in range(2):
        for size in range(1, 301):  # more than are remembered
            value = float(1000 * turn + size)
            found = tensors.gather(group, torch.full((size,), value + group.rank))
            added = tensors.reduce(group, torch.full((size,), value), "sum")
            whole = torch.cat([torch.full((size,), value + rank) for rank in range(group.world_size)])
            if not torch.equal(found, whole) or not torch.equal(added, torch.full((size,), 2 * value)):
                wrong.append((size, value))
    return wrong


def test_debug_mode_is_right_for_more_shapes_than_it_remembers() -> None:
    assert run_ranks(many_shapes, 2) == [[], []]
