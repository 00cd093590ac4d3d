"""Prepared loaders on real ranks: the audit, resuming on another number of ranks, states of streams, uneven ends."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, random_split

from lockstep import Accelerator, DataError, DataLoaderConfiguration
from lockstep.testing import run_ranks
from tests.datasets import Numbers, SizedStream
from tests.ranks import in_soak


class Remembering(IterableDataset[Tensor]):
    """A stream that can say where it is, and go there without reading what comes before."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.place = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < self.count:
            self.place += 1
            self.read.append(self.place - 1)
            yield torch.tensor(self.place - 1)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@contextlib.contextmanager
def notices() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("lockstep")
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)


# --- the audit ---------------------------------------------------------------------------------------------------


def audited(case: str) -> str:
    accelerator = Accelerator()
    rank, world_size = accelerator.process_index, accelerator.num_processes
    data: Any = Numbers(20)
    options: dict[str, Any] = {"shuffle": True}
    if case == "presharded":
        options = {"sampler": DistributedSampler(data, world_size, rank)}
    if case in ("own split", "same split"):
        seed = rank if case == "own split" else 0
        data, _ = random_split(data, [12, 8], generator=torch.Generator().manual_seed(seed))
    if case == "own share":
        data = torch.utils.data.Subset(data, range(rank, 20, world_size))
    if case == "padded":
        data = Numbers(19)
    if case == "by names":
        data = torch.utils.data.Subset({"a": 1, "b": 2, "c": 3, "d": 4}, ["a", "b", "c", "d"])  # type: ignore[arg-type]
    loader = accelerator.prepare(DataLoader(data, batch_size=2, **options))
    with notices() as text:
        for _ in range(2):
            for _batch in loader:
                pass
    return text.getvalue()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fine", ""),
        ("same split", ""),
        ("by names", ""),
        ("padded", "1 samples were repeated"),
        ("presharded", "10 of 20 samples were never seen"),
        ("own split", "The dataset differs between ranks (other samples on each rank)"),
        ("own share", "The dataset differs between ranks (other samples on each rank)"),
    ],
)
def test_the_audit_logs_what_is_wrong_once_for_the_job(case: str, words: str) -> None:
    logged = "".join(run_ranks(audited, 2, case))
    assert logged.count("end of the first epoch") == (1 if words else 0), logged
    assert words in logged


class Augmented(Numbers):
    """Draws from a generator that has nothing to do with the order."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.generator = torch.Generator()


def main_evaluates_alone(data: Any, shuffle: bool, options: dict[str, Any]) -> list[int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(data(20), batch_size=2, shuffle=shuffle))
    batches = []
    for _ in range(2):
        if accelerator.is_main_process:
            batches.append(sum(1 for _ in loader))
        accelerator.wait_for_everyone()
    return batches


@pytest.mark.parametrize(
    ("data", "shuffle", "options"),
    [
        (Numbers, False, {}),
        (Numbers, False, {"even_batches": False}),
        (Numbers, True, {"use_seedable_sampler": True, "data_seed": 3}),
        (Augmented, False, {}),
    ],
)
def test_the_main_process_may_evaluate_alone(data: Any, shuffle: bool, options: dict[str, Any]) -> None:
    assert run_ranks(main_evaluates_alone, 2, data, shuffle, options, timeout=20) == [[5, 5], []]


def loops_in_main_process_first(even: bool) -> tuple[list[int], str]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
    loader = accelerator.prepare(DataLoader(Numbers(19), batch_size=2))
    batches = []
    with notices() as text:
        for _ in range(2):
            with accelerator.main_process_first():
                batches.append(sum(1 for _ in loader))
    return batches, text.getvalue()


def test_one_process_after_the_other_may_loop_and_is_audited() -> None:
    (first, nothing), (second, logged) = run_ranks(loops_in_main_process_first, 2, True, timeout=20)
    assert first == second == [5, 5]
    assert nothing == ""
    assert "1 samples were repeated" in logged


def test_one_process_after_the_other_may_loop_over_uneven_batches() -> None:
    assert run_ranks(loops_in_main_process_first, 2, False, timeout=20) == [([5, 5], "")] * 2


def main_has_one_more() -> str:
    accelerator = Accelerator()

    def make(count: int) -> Any:
        return accelerator.prepare(DataLoader(Numbers(count), batch_size=2))

    extra = make(8) if accelerator.is_main_process else []
    train = make(20)
    padded = make(19)
    with notices() as text:
        for loader in (extra, train, padded):
            for _batch in loader:
                pass
    return text.getvalue()


def test_a_loader_that_one_rank_alone_has_prepared_is_not_taken_for_another() -> None:
    logged = "".join(run_ranks(main_has_one_more, 2))
    assert logged.count("end of the first epoch") == 1, logged
    assert "1 samples were repeated" in logged


def across_generations() -> str:
    """Rank 0 ends its first epoch before the process group is rebuilt, rank 1 after it; then both start over."""
    accelerator = Accelerator()
    rank = accelerator.process_index
    before = accelerator.prepare(DataLoader(Numbers(19), batch_size=2))

    def fail() -> None:
        if rank == 1:
            raise ValueError("on purpose")

    with notices() as text:
        if rank == 0:
            list(before)
        assert accelerator.agree(fail).failures
        if rank == 1:
            list(before)
        list(accelerator.prepare(DataLoader(Numbers(17), batch_size=2)))
    return text.getvalue()


def test_reports_of_two_generations_are_not_mixed_up() -> None:
    logged = "".join(run_ranks(across_generations, 2))
    assert logged.count("end of the first epoch") == 1, logged
    assert "3 samples were repeated" in logged


# --- going on ----------------------------------------------------------------------------------------------------


def some(options: dict[str, Any], kind: str, state: dict[str, Any] | None, rounds: int | None) -> dict[str, Any]:
    torch.manual_seed(40 + int(Accelerator().process_index))
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options), gradient_accumulation_steps=3)
    data: Any = Numbers(23) if kind == "map" else Remembering(23)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=kind == "map"))
    if state is not None:
        loader.load_state_dict(state)
    model = nn.Linear(1, 1)
    seen: list[int] = []
    saved = None
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):  # the state is taken in the middle of a window
            seen += accelerator.gather_for_metrics(batch).tolist()
            saved = loader.state_dict()
        if number + 1 == rounds:
            break
    after = [item for batch in loader for item in accelerator.gather_for_metrics(batch).tolist()] if not rounds else []
    return {"seen": seen, "state": saved, "after": after, "read": getattr(data, "read", [])}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_seedable_sampler": True, "data_seed": 4},
    {"dispatch_batches": True},
    {"use_stateful_dataloader": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_saved_on_two_ranks_it_goes_on_on_one_three_and_four(options: dict[str, Any]) -> None:
    first = run_ranks(some, 2, options, "map", None, 2)
    assert first[0]["seen"] == first[1]["seen"]
    afters = []
    for world_size in (1, 3, 4, 2):
        second = run_ranks(some, world_size, options, "map", first[0]["state"], 1)
        third = run_ranks(some, 2, options, "map", second[0]["state"], None)
        for result in third:
            together = first[0]["seen"] + second[0]["seen"] + result["seen"]
            assert sorted(together) == list(range(23)), (world_size, options)
            assert sorted(result["after"]) == list(range(23))
            assert result["after"] != together
        afters.append(third[0]["after"])
    assert all(after == afters[0] for after in afters), "the next epoch is not the next permutation"


def each_its_own(kind: str, stateful: bool) -> tuple[list[int], list[int], str]:
    options = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=stateful)
    accelerator = Accelerator(dataloader_config=options)
    data: Any = Numbers(23) if kind == "map" else Remembering(23)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=kind == "map"))
    left: list[int] = []
    state: dict[str, Any] = {}
    for number, batch in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
        elif number > 1:
            left += accelerator.gather_for_metrics(batch).tolist()
    others = accelerator.gather_for_metrics([state], use_gather_object=True)
    loader.load_state_dict(state)
    again = [item for batch in loader for item in accelerator.gather_for_metrics(batch).tolist()]
    try:
        loader.load_state_dict(others[-1])
    except DataError as error:
        return left, again, str(error)
    return left, again, ""


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_with_one_that_reads_each_goes_on_from_its_own_state(kind: str, stateful: bool) -> None:
    (left, again, refused), *others = run_ranks(each_its_own, 2, kind, stateful)
    assert again == left
    assert len(left) == 23 - 8
    assert others == [(left, left, "")]
    assert "Load the one that rank 0 gave" in refused  # only rank 0 knows where the data is


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_streams_go_on(dispatch: bool, stateful: bool) -> None:
    options = {"dispatch_batches": dispatch, "use_stateful_dataloader": stateful}
    first = run_ranks(some, 2, options, "stream", None, 3)
    assert first[0]["seen"] == list(range(12))
    for world_size in (2, 1, 3):
        rest = run_ranks(some, world_size, options, "stream", first[0]["state"], None)
        assert rest[0]["seen"] == list(range(12, 23)), (world_size, options)
        assert rest[0]["after"] == list(range(23))
        if stateful and world_size == 2:
            assert rest[0]["read"][0] == 12, "the stream was read again from its start"


def skipping(options: dict[str, Any]) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(Numbers(23), batch_size=2))
    found = []
    for one in (accelerator.skip_first_batches(loader, 2), loader):
        found.append([item for batch in one for item in accelerator.gather_for_metrics(batch).tolist()])
    return found


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"split_batches": True}], ids=str)
def test_skipping_on_ranks(options: dict[str, Any]) -> None:
    begin = 4 if options.get("split_batches") else 8
    for found in run_ranks(skipping, 2, options):
        assert found == [list(range(begin, 23)), list(range(23))]


# --- uneven ends -------------------------------------------------------------------------------------------------


def uneven(count: int, dispatch: bool) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch))
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Numbers(count), batch_size=2)
    )
    seen: list[int] = []
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch.float().unsqueeze(1)).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(batch).tolist()
    weight = accelerator.gather(accelerator.unwrap_model(model).weight.detach().reshape(1))
    return [seen, weight.tolist()]


@pytest.mark.parametrize("world_size", [3, *in_soak(2, 4)])
@pytest.mark.parametrize("dispatch", [False, True])
def test_uneven_ends_leave_nobody_waiting(world_size: int, dispatch: bool) -> None:
    for count in (1, 7, 9):
        results = run_ranks(uneven, world_size, count, dispatch, timeout=60)
        assert results[0][0] == list(range(count))
        for seen, weights in results:
            assert seen == list(range(len(seen)))
            assert len(set(weights)) == 1


def overridden() -> list[list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    model = accelerator.prepare(nn.Linear(1, 1))
    counts = [[sum(1 for _ in loader), len(loader)]]
    with accelerator.join_uneven_inputs([model], even_batches=False):
        counts.append([sum(1 for _ in loader), len(loader)])
    counts.append([sum(1 for _ in loader), len(loader)])
    return counts


def test_even_batches_can_be_overridden_for_a_while() -> None:
    results = run_ranks(overridden, 2, timeout=60)
    assert results[0] == [[2, 2], [2, 2], [2, 2]]
    assert results[1] == [[2, 2], [1, 1], [2, 2]]


# --- copies and several iterations -------------------------------------------------------------------------------


def copies(options: dict[str, Any]) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(Numbers(11), batch_size=2))
    found = []
    for one in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), loader):
        found.append([item for batch in one for item in accelerator.gather_for_metrics(batch).tolist()])
    return found


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=str)
def test_copies_work_on_ranks(options: dict[str, Any]) -> None:
    assert run_ranks(copies, 2, options) == [[list(range(11))] * 3] * 2


def several(kind: str, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Metrics and updates of a training loop in which other iterations come and go."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options), gradient_accumulation_steps=3)
    data: Any = Numbers(19) if kind == "map" else SizedStream(19)
    model = nn.Linear(1, 1)
    model, optimizer, loader, held_out = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(data, batch_size=2, num_workers=workers),
        DataLoader(Numbers(3), batch_size=2),
    )
    seen: list[int] = []
    evaluated: list[int] = []
    updates: list[int] = []
    kept = []
    for step, batch in enumerate(loader):
        if step in (0, 3):
            next(iter(loader))
            evaluated += [item for one in held_out for item in accelerator.gather_for_metrics(one).tolist()]
        if step == 1:
            kept.append(iter(held_out))
            next(kept[-1])
        if step == 2:
            evaluated += [item for one in loader for item in accelerator.gather_for_metrics(one).tolist()]
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float().reshape(-1, 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates.append(step)
        kept.clear()
        seen += accelerator.gather_for_metrics(batch).tolist()
    pairs = [[one.tolist(), other.tolist()] for one, other in zip(loader, loader)]  # noqa: B905
    return {"seen": seen, "evaluated": evaluated, "updates": updates, "pairs": pairs}


@pytest.mark.parametrize(
    ("kind", "options", "workers"),
    [
        ("map", {}, 0),
        ("map", {"dispatch_batches": True}, 0),
        ("stream", {}, 0),
        pytest.param("map", {}, 1, marks=pytest.mark.soak),
        pytest.param("stream", {"dispatch_batches": False}, 0, marks=pytest.mark.soak),
        pytest.param("stream", {}, 1, marks=pytest.mark.soak),
        pytest.param("map", {"split_batches": True}, 0, marks=pytest.mark.soak),
    ],
)
def test_other_iterations_change_neither_metrics_nor_updates(kind: str, options: dict[str, Any], workers: int) -> None:
    steps = 10 if options.get("split_batches") else 5
    for result in run_ranks(several, 2, kind, options, workers):
        assert result["seen"] == list(range(19))
        assert result["evaluated"] == [*range(3), *range(19), *range(3)]
        assert result["updates"] == sorted({*range(2, steps, 3), steps - 1})
        assert len(result["pairs"]) == steps
        assert all(one == other for one, other in result["pairs"])
