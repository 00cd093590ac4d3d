"""Models whose layers are frozen, unfrozen, added or swapped after they were prepared."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep import Accelerator, DistributedDataParallelKwargs, DistributedOperationException
from lockstep.testing import run_ranks
from tests.distributed.test_loader_ranks import notices

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.head: nn.Module = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)
        self.spare.requires_grad_(False)
        self.uses_spare = False
        self.reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = checkpoint(self.body, x.requires_grad_(), use_reentrant=True).tanh()
        else:
            x = self.body(x).tanh()
        x = self.middle(x).tanh()
        return self.head(x) + (self.spare(x) if self.uses_spare else 0)


def freeze(net: Net) -> None:
    net.body.requires_grad_(False)


def unfreeze(net: Net) -> None:
    net.body.requires_grad_(True)


def grow(net: Net) -> None:
    torch.manual_seed(8)
    net.head = nn.Sequential(net.head, nn.Linear(2, 2))


def swap(net: Net) -> None:
    torch.manual_seed(9)
    net.head = nn.Linear(4, 2)


def nothing(net: Net) -> None:
    pass


def freeze_all(net: Net) -> None:
    net.requires_grad_(False)


def tie(net: Net) -> None:
    net.middle.weight = net.body.weight


CHANGES: dict[str, tuple[Callable[[Net], None], Callable[[Net], None]]] = {
    "frozen": (nothing, freeze),
    "unfrozen": (freeze, unfreeze),
    "unfrozen, of a frozen model": (freeze_all, unfreeze),
    "grown": (nothing, grow),
    "swapped": (nothing, swap),
    "tied": (nothing, tie),
    "swapped and frozen": (nothing, lambda net: (freeze(net), swap(net))[0]),
}


def batches(rank: int, steps: int = STEPS, first: int = 0) -> Iterator[Tensor]:
    for step in range(first, first + steps):
        yield torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained or [torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.5)


def weights(net: nn.Module) -> dict[str, list[float]]:
    return {name: parameter.flatten().tolist() for name, parameter in net.named_parameters()}


def expected(change: str) -> dict[str, list[float]]:
    """What one process of plain torch comes to with the data of both ranks."""
    before, after = CHANGES[change]
    net = Net()
    for place, prepare in enumerate((before, after)):
        prepare(net)
        optimizer = optimizer_of(net)
        for pair in zip(*(batches(rank, first=STEPS * place) for rank in (0, 1)), strict=True):
            if any(parameter.requires_grad for parameter in net.parameters()):
                sum(net(batch).pow(2).mean() for batch in pair).div(2).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def train(accelerator: Accelerator, model: nn.Module, place: int) -> None:
    optimizer = accelerator.prepare(optimizer_of(model))
    for batch in batches(accelerator.process_index, first=STEPS * place):
        loss = model(batch).pow(2).mean()
        if loss.requires_grad:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def prepare_again(change: str, way: str, folder: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    before, after = CHANGES[change]
    net = Net()
    before(net)
    own = way == "a DDP of the script's" and change != "unfrozen, of a frozen model"
    model = accelerator.prepare(DistributedDataParallel(net) if own else net)
    old = weakref.ref(model)
    with notices() as text:
        train(accelerator, model, 0)
        after(net)
        model = accelerator.prepare(model if way == "the wrapper" else accelerator.unwrap_model(model))
        assert accelerator.prepare(model) is model is accelerator.prepare(accelerator.unwrap_model(model))
        train(accelerator, model, 1)
    gc.collect()
    accelerator.save_state(folder)
    return {
        "weights": weights(net),
        "models": len(accelerator._state.models),
        "is prepared": accelerator._state.models == [model] and accelerator.unwrap_model(model) is net,
        "old one left": old() is not None and old() is not net,
        "text": text.getvalue(),
        "watched": len(getattr(accelerator._state.monitor, "_models", [net])),
    }


@pytest.mark.parametrize(
    ("change", "way"),
    [
        *((change, "unwrapped") for change in CHANGES),
        ("grown", "the wrapper"),
        ("unfrozen", "a DDP of the script's"),
        *(
            pytest.param(change, way, marks=pytest.mark.soak)
            for change in CHANGES
            for way in ("the wrapper", "a DDP of the script's")
        ),
    ],
)
def test_a_changed_model_is_wrapped_anew(change: str, way: str, tmp_path: Any) -> None:
    wanted = expected(change)
    for seen in run_ranks(prepare_again, 2, change, way, str(tmp_path / "state")):
        assert seen["weights"].keys() == wanted.keys()
        for name, values in wanted.items():
            assert seen["weights"][name] == pytest.approx(values, abs=1e-6), name
        assert (seen["models"], seen["is prepared"], seen["old one left"]) == (1, True, False)
        assert seen["watched"] == 1
        assert "prepare" not in seen["text"]
    assert sorted(name for name in os.listdir(tmp_path / "state") if name.startswith("model")) == ["model.safetensors"]


# --- changed under the wrapper ------------------------------------------------------------------------------------

Options = dict[str, bool]
UNUSED: Options = {"find_unused_parameters": True}
STATIC: Options = {"static_graph": True}


def use_spare(net: Net) -> None:
    net.spare.requires_grad_(True)
    net.uses_spare = True


def unfreeze_reentrant(net: Net) -> None:
    unfreeze(net)
    net.reentrant = True


# Before prepare, after it; the options; what is reported.
WRONG: dict[str, tuple[Callable[[Net], None], Callable[[Net], None], Options, str]] = {
    "frozen": (nothing, freeze, {}, "body.weight, body.bias of Net were frozen or removed after prepare()"),
    "unfrozen": (freeze, unfreeze, {}, "body.weight, body.bias of Net were unfrozen or added after prepare()"),
    "unfrozen, unused found": (freeze, unfreeze, UNUSED, "body.weight, body.bias of Net were unfrozen or added"),
    "unfrozen inside a checkpoint": (freeze, unfreeze_reentrant, {}, "body.weight, body.bias of Net were unfrozen"),
    "of a frozen model": (freeze_all, unfreeze, {}, "body.weight, body.bias of Net were unfrozen or added"),
    "grown": (nothing, grow, {}, "head.1.weight, head.1.bias of Net were unfrozen or added"),
    "swapped": (nothing, swap, {}, "head.weight, head.bias of Net were frozen or removed"),
    "swapped, unused found": (nothing, swap, UNUSED, "head.weight, head.bias of Net were unfrozen or added"),
    "switched": (
        freeze,
        lambda net: (net.requires_grad_(False), unfreeze(net))[1],
        {},
        "body.weight, body.bias of Net were unfrozen or added",
    ),
    "spare part": (nothing, use_spare, {}, "spare.weight, spare.bias of Net were unfrozen or added"),
}


def change_under_wrapper(case: str, by_hand: bool) -> tuple[list[str], bool]:
    before, after, options, _ = WRONG[case]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    net = Net()
    before(net)
    model = accelerator.prepare(net)
    said = []
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.0))
    raised = False
    for step, batch in enumerate(batches(accelerator.process_index, 4)):
        if step == 2:
            after(net)
            optimizer.add_param_group(
                {"params": [item for item in net.parameters() if all(item is not x for x in optimizer.parameters())]}
            )
        with notices() as text:
            try:
                loss = model(batch).pow(2).mean()
                if loss.requires_grad:
                    loss.backward() if by_hand else accelerator.backward(loss)
                optimizer.step()
            except RuntimeError as error:
                raised = "finished reduction" in str(error)
                break
        optimizer.zero_grad()
        said.append("\n".join(line for line in text.getvalue().splitlines() if "after prepare()" in line))
    return said, raised


@pytest.mark.parametrize("case", list(WRONG))
def test_a_change_under_the_wrapper_is_reported_once(case: str) -> None:
    said, raised = run_ranks(change_under_wrapper, 2, case, False)[0]
    assert said[:2] == ["", ""]
    assert WRONG[case][3] in said[2]
    assert "model = accelerator.prepare(accelerator.unwrap_model(model))" in said[2]
    assert said[3:] == ([] if raised else [""])
    assert raised == ("frozen or removed" in said[2])


def test_it_is_reported_for_a_backward_of_the_scripts_own() -> None:
    said, _ = run_ranks(change_under_wrapper, 2, "unfrozen", True)[0]
    assert WRONG["unfrozen"][3] in said[2]


def toggle(case: str) -> tuple[str, bool]:
    """Programs that freeze and unfreeze, and are right."""
    options = {"unused found": UNUSED, "static graph": STATIC}.get(case, {})
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    generator, judge = Net(), nn.Linear(2, 1)
    net = generator
    if case == "saliency":
        freeze(net)
    model, critic = accelerator.prepare(net, judge)
    equal = True
    with notices() as text:
        for step, batch in enumerate(batches(accelerator.process_index, 6)):
            nn.Linear(2, 2)  # registering something elsewhere is not a change
            if case == "GAN":
                judge.requires_grad_(step % 2 == 0)
                made = model(batch)
                accelerator.backward(critic(made.detach() if step % 2 == 0 else made).mean())
            elif case == "unused found":
                net.body.requires_grad_(step % 2 == 0)
                net.middle.requires_grad_(step % 3 == 0)
                accelerator.backward(model(batch).pow(2).mean())
            elif case == "static graph":
                if step == 0:
                    freeze(net)
                accelerator.backward(model(batch).pow(2).mean())
            elif case == "reference without adapters":
                net.body.requires_grad_(False)
                with torch.no_grad():
                    model(batch)
                net.body.requires_grad_(True)
                accelerator.backward(model(batch).pow(2).mean())
            elif case == "unfrozen and not used":
                net.spare.requires_grad_(True)
                accelerator.backward(model(batch).pow(2).mean())
            elif case == "frozen after the forward":
                loss = model(batch).pow(2).mean()
                accelerator.backward(loss)
                freeze(net)
                unfreeze(net)
            elif case == "saliency":
                unfreeze(net)
                with accelerator.no_sync(model):
                    accelerator.backward(model(batch).pow(2).mean())
                net.zero_grad()
                freeze(net)
                accelerator.backward(model(batch).pow(2).mean())
            trained = [item for item in (*net.parameters(), *judge.parameters()) if item.grad is not None]
            for parameter in trained:
                first, second = accelerator.gather(parameter.grad.flatten()[None])  # type: ignore[union-attr]
                equal = equal and torch.equal(first, second)
            net.zero_grad()
            judge.zero_grad()
    return text.getvalue(), equal


TOGGLES = (
    "GAN",
    "unused found",
    "static graph",
    "reference without adapters",
    "unfrozen and not used",
    "frozen after the forward",
    "saliency",
)


@pytest.mark.parametrize("case", TOGGLES)
def test_toggling_that_is_right_is_left_alone(case: str) -> None:
    for text, equal in run_ranks(toggle, 2, case):
        assert "prepare" not in text
        assert equal


def use_both_wrappers() -> tuple[dict[str, list[float]], str]:
    accelerator = Accelerator(cpu=True)
    net = Net()
    freeze(net)
    part = accelerator.prepare(net)
    unfreeze(net)
    whole = accelerator.prepare(net)
    assert whole is not part
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.5))
    with notices() as text:
        for step, batch in enumerate(batches(accelerator.process_index, 6)):
            net.body.requires_grad_(step % 2 == 1)
            part(batch)  # a forward that is followed by none of its own backwards
            accelerator.backward((whole if step % 2 else part)(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return weights(net), text.getvalue()


def test_an_old_wrapper_that_is_still_held_can_be_used() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step, pair in enumerate(zip(batches(0, 6), batches(1, 6), strict=True)):
        net.body.requires_grad_(step % 2 == 1)
        sum(net(batch).pow(2).mean() for batch in pair).div(2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for values, text in run_ranks(use_both_wrappers, 2):
        for name, wanted in weights(net).items():
            assert values[name] == pytest.approx(wanted, abs=1e-6), name
        assert "prepare" not in text


def forget_the_new_wrapper() -> str:
    accelerator = Accelerator(cpu=True)
    net = Net()
    freeze(net)
    model = accelerator.prepare(net)
    unfreeze(net)
    new = accelerator.prepare(accelerator.unwrap_model(model))
    assert new is not model
    with notices() as text:
        accelerator.backward(model(torch.ones(1, 4)).mean())
    return text.getvalue()


def test_an_old_wrapper_that_is_trained_by_mistake_is_reported() -> None:
    assert (
        "body.weight, body.bias of Net were unfrozen or added after prepare()"
        in run_ranks(forget_the_new_wrapper, 2)[0]
    )


def share_a_part() -> tuple[str, bool]:
    """A frozen model that is prepared, and then trained as a part of another one."""
    accelerator = Accelerator(cpu=True)
    part = nn.Linear(4, 4).requires_grad_(False)
    accelerator.prepare(part)
    part.requires_grad_(True)
    whole = accelerator.prepare(nn.Sequential(part, nn.Linear(4, 1)))
    with notices() as text:
        accelerator.backward(whole(next(batches(accelerator.process_index))).mean())
    first, second = accelerator.gather(part.weight.grad[None])  # type: ignore[index]
    return text.getvalue(), torch.equal(first, second)


def test_a_part_that_another_model_averages_is_left_alone() -> None:
    for text, equal in run_ranks(share_a_part, 2):
        assert "prepare" not in text
        assert equal


def evaluate() -> tuple[bool, bool, bool, int]:
    accelerator = Accelerator(cpu=True)
    net = Net()
    first = accelerator.prepare_model(net, evaluation_mode=True)
    model = accelerator.prepare(net)
    again = accelerator.prepare_model(accelerator.unwrap_model(model), evaluation_mode=True)
    return first is net, isinstance(model, DistributedDataParallel), again is net, len(accelerator._state.models)


def test_a_model_for_evaluation_is_not_wrapped_until_it_is_trained() -> None:
    assert run_ranks(evaluate, 2) == [(True, True, True, 1)] * 2


def freeze_on_one_rank() -> str:
    accelerator = Accelerator(cpu=True)
    net = Net()
    if accelerator.process_index == 1:
        freeze(net)
    with pytest.raises(DistributedOperationException) as caught:
        accelerator.prepare(net)
    return str(caught.value)


def test_what_is_trained_must_be_the_same_on_all_ranks() -> None:
    for text in run_ranks(freeze_on_one_rank, 2):
        assert "rank 0 has body.weight [4, 4] torch.float32, trained, rank 1 has body.weight" in text
        assert "frozen" in text
