"""One process is a world of one: every public method gives there what it gives on two, up to how the work is split.

The same program runs on one rank and on two. What a rank holds is its part of one whole, and what each method gives is
noted in terms of the whole: joined, summed over the ranks, or the same on all.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, DataLoaderConfiguration, utils
from lockstep.testing import run_ranks
from tests.datasets import Numbers, Stream
from tests.distributed.test_lone_calls import NEED_ALL

NOT_COMPARED = {
    **dict.fromkeys(("check_breakpoint", "set_breakpoint"), "other names of check_trigger and set_trigger"),
    "autocast": "talks to nobody and knows no rank",
    "profile": "writes one trace for each rank",
    "unscale_gradients": "nothing without fp16, which has tests of its own on 1 and 2 ranks",
    "verify_device_map": "looks at one model",
    "wait_for_checkpoint": "gives nothing",
    "wait_for_everyone": "gives nothing",
    "end_training": "leaves the job",
    **dict.fromkeys(
        ("get_tracker", "init_trackers", "log"), "the main process alone; tests/distributed/test_tracking_ranks.py"
    ),
    "register_load_state_pre_hook": "gives a handle; when hooks run is tested with load_state",
    "register_save_state_pre_hook": "gives a handle; when hooks run is tested with save_state",
    "join_uneven_inputs": "for ranks that end apart, of which one process has none",
    "free_memory": "gives its arguments back, emptied",
    "clear": "the same",
    "prepare_model": "through prepare",
    "prepare_optimizer": "through prepare",
    "prepare_scheduler": "through prepare",
}
UTILS_NOT_COMPARED = {
    "find_executable_batch_size": "starts over until it fits; tested with real failures",
    "load_checkpoint_in_model": "reads files on each rank",
    "synchronize_rng_state": "changes generators, gives nothing",
    "synchronize_rng_states": "changes generators, gives nothing",
    "wait_for_everyone": "gives nothing",
    "estimate_memory": "for a terminal",
    "write_basic_config": "for a terminal",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


class World:
    """The accelerator of one rank, and its part of a whole."""

    def __init__(self, seed: int, folder: str) -> None:
        self.random = torch.Generator().manual_seed(seed)
        # Batches are cut, so that one process and two see the same ones.
        options = DataLoaderConfiguration(split_batches=True, dispatch_batches=False)
        self.accelerator = Accelerator(cpu=True, dataloader_config=options, step_scheduler_with_optimizer=False)
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.folder = Path(folder)

    def whole(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randint(0, 5, shape, generator=self.random).to(dtype)

    def mine(self, whole: Any) -> Any:
        """Equal parts, one after the other."""
        size = len(whole) // self.ranks
        return whole[self.rank * size : (self.rank + 1) * size]

    def joined(self, value: list[Any]) -> list[Any]:
        """The ranks' lists as one, by a way of its own."""
        return [item for part in self.all(value) for item in part]

    def all(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        each: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(each, value)
        return each


def noted(value: Any) -> Any:
    """Comparable, with the dtype and the shape of tensors."""
    if isinstance(value, Tensor):
        return str(value.dtype), list(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: noted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[noted(item) for item in value]]
    return value


# --- collectives -------------------------------------------------------------------------------------------------


def gather(w: World) -> Any:
    found = []
    for dtype in DTYPES:
        whole = {"a": w.whole(4, 3, dtype=dtype), "b": (w.whole(2, dtype=dtype), [w.whole(6, 0, dtype=dtype)])}
        mine = {"a": w.mine(whole["a"]), "b": (w.mine(whole["b"][0]), [w.mine(whole["b"][1][0])])}
        found += [w.accelerator.gather(mine), utils.gather(mine["a"])]
        assert noted(found[-2]) == noted(whole)
    # A tensor without dimensions is one value for each rank, and stays as it is on one (as on Accelerate).
    scalar = w.accelerator.gather(torch.tensor(2.0))
    assert scalar.shape == (() if w.ranks == 1 else (2,))
    return [*found, scalar.mean()]


def reduce(w: World) -> Any:
    found = []
    for dtype in (torch.float32, torch.float64):
        whole = {"a": w.whole(2, 4, 3, dtype=dtype), "b": [w.whole(2, 2, dtype=dtype)]}
        part = w.mine(whole["a"]), w.mine(whole["b"][0])
        sums = {"a": part[0].sum(0), "b": [part[1].sum(0)]}
        means = {"a": part[0].mean(0), "b": [part[1].mean(0)]}
        largest = {"a": part[0].amax(0), "b": [part[1].amax(0)]}
        for method in (w.accelerator.reduce, utils.reduce):
            found += [method(sums, "sum"), method(sums, reduction="sum", scale=0.5)]
            found += [method(means, "mean"), method(means, "mean", 3.0), method(largest, "max")]
        found.append(w.accelerator.reduce(sums))
        assert torch.equal(found[-1]["a"], whole["a"].sum(0))
    counts = w.mine(w.whole(4, 2, dtype=torch.int64)).sum(0)
    found.append(w.accelerator.reduce(counts))
    # Its mean is a float on two; one process keeps the dtype (as on Accelerate).
    found.append(w.accelerator.reduce(counts * w.ranks, "mean").double())
    return found


def pad_across_processes(w: World) -> Any:
    whole = w.whole(5, 2) + 1
    start = 0 if w.rank == 0 else 3
    mine = whole if w.ranks == 1 else whole[start : start + 3]
    found = []
    for pad in (w.accelerator.pad_across_processes, utils.pad_across_processes):
        for first in (False, True):
            rows = w.accelerator.gather({"x": pad({"x": mine}, dim=0, pad_index=-1, pad_first=first)["x"]})["x"]
            found.append(rows[rows[:, 0] != -1])
            assert noted(found[-1]) == noted(whole)
    return [*found, pad(torch.tensor(1.0)), pad(mine[:, :1], dim=1).shape[1]]


def broadcast(w: World) -> Any:
    whole = {"a": w.whole(3), "b": [w.whole(2, 2, dtype=torch.int64)]}
    mine = utils.recursively_apply(lambda leaf: leaf.clone() * (w.rank == 0), whole)
    found = utils.broadcast(mine)
    assert found is mine
    assert noted(found) == noted(whole)
    return found


def broadcast_object_list(w: World) -> Any:
    mine = ["a", {"b": 1}] if w.rank == 0 else [None, None]
    found = utils.broadcast_object_list(mine)
    assert found is mine
    return found


def gather_object(w: World) -> Any:
    whole = [{"name": f"item {number}"} for number in range(6)]
    found = utils.gather_object(w.mine(whole))
    assert found == whole
    return found


def check_trigger(w: World) -> Any:
    found = [w.accelerator.check_trigger()]
    if w.accelerator.is_last_process:
        w.accelerator.set_trigger()
    return [*found, w.accelerator.check_trigger(), w.accelerator.check_trigger()]


def agree(w: World) -> Any:
    def fails() -> None:
        if w.accelerator.is_last_process:
            raise OSError("no")

    well, ill = w.accelerator.agree(lambda: "done"), w.accelerator.agree(fails)
    return [
        well.ok,
        well.value,
        ill.ok,
        ill.value,
        [str(one).replace(f"ank {w.ranks - 1}", "") for one in ill.failures],
    ]


# --- loaders and metrics -----------------------------------------------------------------------------------------


def gather_for_metrics(w: World) -> Any:
    gather, found = w.accelerator.gather_for_metrics, {}
    for data, size in ((Numbers, 10), (Stream, 10), (Numbers, 8), (Numbers, 3), (Numbers, 5)):
        loader = w.accelerator.prepare(DataLoader(data(size), batch_size=4))
        seen: dict[str, list[Any]] = {}
        for batch in loader:
            share = 4 // w.ranks
            answers = {
                "rows": gather(batch),
                "nested": gather({"a": (batch, [batch.float().view(-1, 1)])}),
                "repeated": gather(torch.ones(()).repeat(share)),
                "repeated objects": gather(["x"] * share),
                "objects": gather([f"sample {number}" for number in batch.tolist()]),
                "tensors as objects": gather(list(batch), use_gather_object=True),
                "columns": gather((batch.tolist(), [str(number) for number in batch.tolist()])),
                "mixed": gather({"names": [str(number) for number in batch.tolist()], "rows": batch}),
            }
            if size >= 4:
                answers["two for each"] = gather(batch.repeat_interleave(2))
            for name, value in answers.items():
                seen.setdefault(name, []).append(noted(value))
        assert sum(len(rows) for _, _, rows in seen["repeated"]) == size
        found[f"{data.__name__} {size}"] = seen
    found["outside"] = {"rows": noted(gather(w.mine(torch.arange(4)))), "objects": gather(w.mine(["a", "b"]))}
    return found


def prepare_data_loader(w: World) -> Any:
    loader = w.accelerator.prepare_data_loader(DataLoader(Numbers(10), batch_size=4))
    batches = [[w.joined(batch.tolist()), loader.end_of_dataloader, loader.remainder] for batch in loader]
    skipped = [w.joined(batch.tolist()) for batch in w.accelerator.skip_first_batches(loader, 1)]
    # What fills the last batch on two is not there on one: each sample once.
    plain = [sorted(set(batch)) if last else batch for batch, last, _ in batches]
    kept = [set(range(8, 10)) <= set(skipped[-1]), skipped[:-1]]
    return [len(loader), loader.total_batch_size, plain[:2], set(plain[2]) >= {8, 9}, batches[-1][1:], kept]


def split_between_processes(w: World) -> Any:
    found = []
    for length in (0, 1, 2, 5):
        for padding in (False, True):
            items = [f"item {number}" for number in range(length)]
            with w.accelerator.split_between_processes({"a": items}, apply_padding=padding) as part:
                found.append(list(dict.fromkeys(w.joined(part["a"]))))
            with w.accelerator.split_between_processes(torch.arange(length), apply_padding=padding) as rows:
                found.append(list(dict.fromkeys(w.joined(rows.tolist()))))
                assert type(rows) is Tensor
    return found


# --- training ----------------------------------------------------------------------------------------------------


def trained(w: World) -> Any:
    """Through prepare, accumulate, no_sync, backward, clipping, microbatches, states and files."""
    a = w.accelerator
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer, loader, scheduler = a.prepare(
        net,
        optimizer := torch.optim.AdamW(net.parameters(), lr=0.05),
        DataLoader(w.whole(12, 2), batch_size=4),  # type: ignore[arg-type]
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    norms = []
    for number, batch in enumerate(loader):
        with a.accumulate(model):
            a.backward(model(batch).square().mean())
            norms.append(float(a.clip_grad_norm_(model.parameters(), 0.1)))
            a.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 1:
            a.save_state(str(w.folder / "state"))
    with a.no_sync(model):
        a.backward(model(batch).square().mean())
    with a.trigger_sync_in_backward(model):
        a.backward(model(batch).square().mean())
    norms.append(float(a.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.zero_grad()
    loss = a.auto_microbatch(batch, lambda part: model(part).square().mean())
    norms.append(float(a.clip_grad_norm_(model.parameters(), 1.0)))
    optimizer.zero_grad()
    final = {name: value.clone() for name, value in a.get_state_dict(model).items()}
    a.wait_for_everyone()
    a.load_state(str(w.folder / "state"))
    restored = [w.joined(batch[:, 0].tolist()) for batch in loader]
    a.save_model(model, str(w.folder / "model"))
    a.save(final, str(w.folder / "final.pt"))
    a.wait_for_everyone()
    assert list(torch.load(w.folder / "final.pt")) == list(final)
    assert a.unwrap_model(model) is net
    files = sorted(path.name for path in (w.folder / "model").iterdir())
    lasts = [float(value.mean()) for value in a.get_state_dict(model).values()]
    means = [float(value.mean()) for value in final.values()]
    rounded = [
        [round(number, 5) for number in numbers]
        for numbers in (norms, means, lasts, a.reduce(loss, "mean").reshape(1).tolist())
    ]
    return [rounded, scheduler.get_last_lr(), restored, files, sorted(final)]


def register_for_checkpointing(w: World) -> Any:
    counter = nn.Linear(1, 1)
    w.accelerator.register_for_checkpointing(counter)
    w.accelerator.save_state(str(w.folder / "extra"))
    w.accelerator.wait_for_everyone()
    return [path.name for path in sorted((w.folder / "extra").iterdir()) if path.name.startswith("custom")]


# --- who does what -----------------------------------------------------------------------------------------------


def once(w: World) -> Any:
    """Each of these runs on one rank of the job."""
    a, ran = w.accelerator, []
    last = w.ranks - 1
    for name, run in {
        "main": a.on_main_process(lambda: "ran"),
        "local main": a.on_local_main_process(lambda: "ran"),
        "last": a.on_last_process(lambda: "ran"),
        "process": a.on_process(lambda: "ran", process_index=last),
        "local process": a.on_local_process(lambda: "ran", local_process_index=last),
    }.items():
        ran.append([name, w.all(run()).count("ran")])
    return ran


def printed(w: World) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as caught:
        w.accelerator.print("a line")
    return "".join(w.all(caught.getvalue()))


def first(w: World) -> Any:
    order = []
    for context in (w.accelerator.main_process_first, w.accelerator.local_main_process_first):
        with context():
            order.append("in")
    return order


COMPARED: dict[str, Callable[[World], Any]] = {
    **{each.__name__: each for each in (gather, reduce, pad_across_processes, agree, gather_for_metrics)},
    **{each.__name__: each for each in (prepare_data_loader, split_between_processes, register_for_checkpointing)},
    **dict.fromkeys(("check_trigger", "set_trigger"), check_trigger),
    "skip_first_batches": prepare_data_loader,
    **dict.fromkeys(
        ("prepare", "accumulate", "no_sync", "trigger_sync_in_backward", "backward", "auto_microbatch"), trained
    ),
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_value_", "get_state_dict", "unwrap_model"), trained),
    **dict.fromkeys(("save", "save_model", "save_state", "load_state"), trained),
    **{f"on_{who}process": once for who in ("", "main_", "last_", "local_", "local_main_")},
    **dict.fromkeys(("main_process_first", "local_main_process_first"), first),
    "print": printed,
}
UTILS_COMPARED: dict[str, Callable[[World], Any]] = {
    **{each.__name__: each for each in (gather, reduce, pad_across_processes, broadcast)},
    **{each.__name__: each for each in (broadcast_object_list, gather_object)},
}
SCENARIOS = {each.__name__: each for each in (*COMPARED.values(), *UTILS_COMPARED.values())}


def test_no_public_method_is_left_out() -> None:
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    methods = {name for name in public if inspect.isroutine(getattr(Accelerator, name))}
    assert methods == COMPARED.keys() | NOT_COMPARED.keys()
    assert NEED_ALL["utils"] == UTILS_COMPARED.keys() | UTILS_NOT_COMPARED.keys()
    assert not COMPARED.keys() & NOT_COMPARED.keys()


def results(seed: int, folder: str) -> dict[str, Any]:
    world = World(seed, folder)
    return {name: noted(scenario(world)) for name, scenario in SCENARIOS.items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_one_process_gives_what_two_give(seed: int) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        (alone,) = run_ranks(results, 1, seed, one)
        for rank, found in enumerate(run_ranks(results, 2, seed, two)):
            for name, value in found.items():
                assert value == alone[name], f"{name}, rank {rank} of 2"
