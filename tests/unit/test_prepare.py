"""prepare and its opposites, on one process."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lockstep import Accelerator, GradScalerKwargs, UsageError
from lockstep.data.loader import PreparedDataLoader
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler

pytestmark = pytest.mark.usefixtures("alone")

KINDS = {
    "model": nn.Module,
    "optimizer": PreparedOptimizer,
    "loader": PreparedDataLoader,
    "scheduler": PreparedScheduler,
}


def objects() -> dict[str, Any]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": DataLoader(torch.arange(4.0).view(4, 1), batch_size=2),
        "scheduler": LambdaLR(optimizer, lambda step: 0.5**step),
    }


def trains(accelerator: Accelerator, made: dict[str, Any]) -> None:
    """One epoch works, and the four belong together."""
    before = made["model"].weight.item()
    for batch in made["loader"]:
        with accelerator.accumulate(made["model"]):
            accelerator.backward(made["model"](batch).mean())
            made["optimizer"].step()
            made["scheduler"].step()
            made["optimizer"].zero_grad()
    assert made["model"].weight.item() != before
    assert made["optimizer"].param_groups[0]["lr"] == pytest.approx(0.25)


@pytest.mark.parametrize("order", list(itertools.permutations(KINDS)), ids="-".join)
def test_any_order_together(order: tuple[str, ...]) -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    made = dict(zip(order, accelerator.prepare(*(given[name] for name in order)), strict=True))
    for name, kind in KINDS.items():
        assert isinstance(made[name], kind)
    trains(accelerator, made)


@pytest.mark.parametrize("order", list(itertools.permutations(KINDS)), ids="-".join)
def test_any_order_one_by_one(order: tuple[str, ...]) -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    made = {name: accelerator.prepare(given[name]) for name in order}
    for name, kind in KINDS.items():
        assert isinstance(made[name], kind)
    trains(accelerator, made)


def test_by_their_own_methods() -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    made = {
        "scheduler": accelerator.prepare_scheduler(given["scheduler"]),
        "loader": accelerator.prepare_data_loader(given["loader"]),
        "optimizer": accelerator.prepare_optimizer(given["optimizer"]),
        "model": accelerator.prepare_model(given["model"]),
    }
    trains(accelerator, made)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_follows_its_optimizer_whichever_came_first(scheduler_first: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)])
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    schedulers = [LambdaLR(optimizer, lambda step: step + 1) for optimizer in optimizers]
    models = accelerator.prepare(*models)
    if scheduler_first:
        following = accelerator.prepare(*schedulers)
        stepping = accelerator.prepare(*optimizers)
    else:
        stepping = accelerator.prepare(*optimizers)
        following = accelerator.prepare(*schedulers)
    accelerator.backward(models[0](torch.ones(1)).mean() + models[1](torch.ones(1)).mean())
    models[0].weight.grad.fill_(float("inf"))
    for optimizer, scheduler in zip(stepping, following, strict=True):
        optimizer.step()
        scheduler.step()
    assert [optimizer.step_was_skipped for optimizer in stepping] == [True, False]
    assert [scheduler.last_epoch for scheduler in following] == [0, 1]


def test_twice_is_harmless() -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    once = accelerator.prepare(*given.values())
    again = accelerator.prepare(*once)
    assert all(left is right for left, right in zip(once, again, strict=True))
    raw = accelerator.prepare(given["model"], given["optimizer"], given["scheduler"])
    assert raw[0] is once[0]
    assert raw[1] is once[1]
    assert raw[2] is once[3]
    trains(accelerator, dict(zip(KINDS, again, strict=True)))


def test_what_it_does_not_know_passes_through() -> None:
    accelerator = Accelerator(cpu=True)
    strangers = [object(), "text", None, [1, 2], {"a": 1}, torch.ones(2), len]
    assert all(left is right for left, right in zip(accelerator.prepare(*strangers), strangers, strict=True))
    assert accelerator.prepare(strangers[3]) is strangers[3]
    assert accelerator.prepare() == ()
    model = nn.Linear(1, 1)
    first, second, third = accelerator.prepare("a", model, 3)
    assert (first, second, third) == ("a", model, 3)


def test_one_entry_of_device_placement_for_each_object() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="1 entries for 2 objects"):
        accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])


def test_what_another_accelerator_prepared_is_prepared_anew() -> None:
    """As when a cell of a notebook is run again."""
    given = objects()
    first = Accelerator(cpu=True).prepare(*given.values())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(*first)
    assert (model, optimizer.optimizer, scheduler.scheduler) == tuple(given[kind] for kind in KINDS if kind != "loader")
    assert accelerator.prepare(optimizer, loader, scheduler) == (optimizer, loader, scheduler)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batches = list(loader)
    assert len(batches) == len(given["loader"])
    for number, batch in enumerate(batches[:2]):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        same = [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        assert all(same) == (number == 0)  # in the window of the new one


def test_a_copy_of_another_accelerators_loader_is_an_error() -> None:
    loader = copy.deepcopy(Accelerator(cpu=True).prepare(objects()["loader"]))
    with pytest.raises(UsageError, match="a copy of one that another Accelerator"):
        Accelerator(cpu=True).prepare(loader)


def test_wrapped_objects_keep_their_type_and_attributes() -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    model, optimizer, loader, scheduler = accelerator.prepare(*given.values())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, DataLoader)
    assert model is given["model"]
    assert optimizer.state_dict() == given["optimizer"].state_dict()
    assert loader.batch_size == 2
    assert len(loader) == 2
    assert loader.dataset is given["loader"].dataset
    assert scheduler.get_last_lr() == [1.0]
    optimizer.param_groups[0]["lr"] = 7.0
    assert given["optimizer"].param_groups[0]["lr"] == 7.0
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing


def test_the_original_loader_is_untouched() -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    raw = given["loader"]
    before = dict(raw.__dict__)
    accelerator.prepare(raw)
    assert raw.__dict__ == before
    assert len(list(raw)) == 2


def test_a_prepared_optimizer_can_be_copied_and_pickled() -> None:
    accelerator, given = Accelerator(cpu=True), objects()
    optimizer = accelerator.prepare(given["optimizer"])
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 1.0
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("call", ["free_memory", "clear"])
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("window", [1, 2])
def test_freed_objects_are_gone(call: str, precision: str, window: int) -> None:
    gc.freeze()  # what other tests have left need not be gone through
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=window)
    given = objects()
    made = dict(zip(KINDS, accelerator.prepare(*given.values()), strict=True))
    for batch in made["loader"]:
        with accelerator.accumulate(made["model"]):
            accelerator.backward(made["model"](batch).mean())
            made["optimizer"].step()
            made["scheduler"].step()
            made["optimizer"].zero_grad()
    watched = [weakref.ref(item) for item in (*given.values(), *made.values())]
    names = list(KINDS)
    assert getattr(accelerator, call)(*(made[name] for name in names)) == [None] * 4
    del given, made, batch
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_a_dropped_accelerator_lets_go_of_everything() -> None:
    """Also of what the watch over unprepared optimizers knows."""
    from lockstep import current

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = objects()
    model, optimizer = accelerator.prepare(given["model"], given["optimizer"])
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
    watched = [weakref.ref(item) for item in (model, optimizer, given["optimizer"], accelerator)]
    current.reset()
    del accelerator, given, model, optimizer
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_training_goes_on_after_freeing() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16")
    for _ in range(2):
        given = objects()
        made = dict(zip(KINDS, accelerator.prepare(*given.values()), strict=True))
        with accelerator.accumulate(made["model"]):
            assert not accelerator.sync_gradients
            accelerator.backward(made["model"](torch.ones(1)).mean())
        accelerator.free_memory()


def test_unwrapping() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(2, 2)
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(2)).dtype is torch.float32
    kept = accelerator.unwrap_model(prepared)
    assert kept is model
    assert "forward" in kept.__dict__
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare is model
    assert "forward" not in bare.__dict__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bare(torch.ones(2)).dtype is torch.bfloat16
    plain = nn.Linear(1, 1)
    assert accelerator.unwrap_model(plain, keep_fp32_wrapper=False) is plain


def test_unwrapping_gives_back_a_forward_set_by_hand() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(1, 1)

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    model.forward = doubled
    accelerator.prepare(model)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False).forward is doubled


def test_device_maps() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(1, 1))
    assert accelerator.verify_device_map(model) is False
    model[0].hf_device_map = {"": "cpu"}
    assert accelerator.verify_device_map(model) is False
    model[0].hf_device_map = {"a": "cpu", "b": "disk"}
    assert accelerator.verify_device_map(model) is True


def test_a_name_of_a_later_release_says_so() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"lomo_backward is known from Accelerate.*does not have it yet"):
        _ = accelerator.lomo_backward
    assert not hasattr(accelerator, "no_such_thing")
