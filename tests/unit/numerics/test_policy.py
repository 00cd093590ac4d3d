"""The tier that is always on, in one process: what it sees, what it does, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lockstep import Accelerator, ConfigError, GradScalerKwargs, NumericsError
from lockstep.numerics.async_check import AsyncCheck
from lockstep.numerics.policy import gradient_screen

pytestmark = pytest.mark.usefixtures("alone")
Log = pytest.LogCaptureFixture


class Net(nn.Module):
    """Its ``middle`` divides by the input, so that a zero in the data gives an infinity there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.middle, self.drop = nn.Identity(), nn.Dropout(0.5)
        self.draws: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.draws.append(torch.rand(1))
        y = self.drop(self.norm(self.first(x)))
        return self.last(self.middle(y / (x != 0)))


def data(bad: int | None = 5) -> DataLoader[Any]:
    values = torch.arange(1.0, 13.0).view(-1, 1)
    if bad is not None:
        values[bad] = 0.0
    return DataLoader(values, batch_size=2)  # type: ignore[arg-type]


def train(policy: str | None, *, clip: bool = False, bad: int | None = 5, **options: Any) -> tuple[Net, list[bool]]:
    accelerator = Accelerator(nan_policy=policy, **options)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, data(bad), LambdaLR(optimizer, float))
    skipped = []
    for x in loader:
        accelerator.backward(model(x).square().mean())
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert schedule.last_epoch == len(skipped) - sum(skipped)
    return model, skipped


def finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def told(log: Log) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "lockstep.numerics"]


@pytest.mark.parametrize("policy", [None, "warn"])
def test_a_bad_loss_is_told_once_with_module_and_samples(policy: str | None, caplog: Log) -> None:
    model, skipped = train(policy)
    (line,) = told(caplog)
    assert line.startswith("Update 3, the loss is nan, samples 4, 5.\n")
    assert "in input[0] of middle (Identity)" in line
    assert "norm BatchNorm1d" in line
    assert "nan_policy='skip'" in line
    assert skipped == [False] * 6
    assert not finite(model)


@pytest.mark.parametrize("clip", [False, True])
def test_skip_drops_the_update(clip: bool, caplog: Log) -> None:
    model, skipped = train("skip", clip=clip)
    assert skipped == [False, False, True, False, False, False]
    assert finite(model)
    (line,) = told(caplog)
    assert "the update is dropped.\nthe loss is nan, samples 4, 5\n" in line
    assert "in input[0] of middle (Identity)" in line


def test_stop_raises_with_the_report() -> None:
    with pytest.raises(NumericsError, match=r"(?s)nan_policy='stop': .*update 3.*samples 4, 5.*middle \(Identity\)"):
        train("stop")


def test_off_says_and_does_nothing(caplog: Log) -> None:
    accelerator = Accelerator(nan_policy="off")
    model = accelerator.prepare(Net())
    assert not model._forward_pre_hooks
    assert accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))._gate is None
    accelerator.backward(model(torch.zeros(2, 1)).sum())
    assert told(caplog) == []


def test_a_healthy_run_is_the_same_under_every_policy(caplog: Log) -> None:
    weights = [train(policy, bad=None)[0].state_dict() for policy in ("off", "warn", "skip", "stop")]
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items())
    assert told(caplog) == []


def test_replaying_leaves_nothing_behind(caplog: Log) -> None:
    """The same numbers are drawn, and generators, buffers and gradients are as if nothing had happened."""

    def run(policy: str) -> tuple[Net, Tensor, Any]:
        torch.manual_seed(3)
        model, _ = train(policy)
        return model, torch.get_rng_state(), model.norm.num_batches_tracked.item()

    plain, state, tracked = run("off")
    watched, other_state, other_tracked = run("warn")
    assert len(told(caplog)) == 1
    assert torch.equal(state, other_state)
    assert tracked == other_tracked == 6
    assert len(watched.draws) == 7
    assert watched.draws[3] == watched.draws[2]  # the third batch, once more
    assert [draw for place, draw in enumerate(watched.draws) if place != 3] == plain.draws
    assert "weight" in dict(watched.first.named_parameters())


def gradient_only(policy: str, *, clip: bool = True) -> tuple[nn.Module, list[bool]]:
    """A finite loss whose gradient is not: the slope of a root at zero."""
    accelerator = Accelerator(nan_policy=policy)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(3):
        loss = model(torch.ones(1, 2)).sum()
        if step == 1:
            loss = loss + torch.sqrt(0.0 * model[0].weight.sum())
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return model, skipped


@pytest.mark.parametrize("clip", [False, True])
def test_a_bad_gradient_of_a_finite_loss_is_dropped_and_placed(clip: bool, caplog: Log) -> None:
    model, skipped = gradient_only("skip", clip=clip)
    assert skipped == [False, True, False]
    assert finite(model)
    (line,) = told(caplog)
    assert "0.weight is the last" in line


def test_warn_looks_at_the_norm_that_clipping_has_computed(caplog: Log) -> None:
    gradient_only("warn", clip=True)
    assert "the gradient norm is nan" in told(caplog)[0]
    caplog.clear()
    gradient_only("warn", clip=False)
    assert "the gradient norm" not in "".join(told(caplog))  # the next loss shows it
    assert "the loss is nan" in told(caplog)[0]


def test_what_goes_bad_inside_a_window_is_dropped_with_it(caplog: Log) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, nan_policy="skip")
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data(bad=4))
    skipped = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, True, False]
    assert finite(model)
    assert "samples 4, 5" in told(caplog)[0]  # of the micro-batch that did it, not of the one that closed the window


def test_an_infinite_loss_without_a_bad_gradient_is_dropped_too() -> None:
    accelerator = Accelerator(nan_policy="skip")
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.clone()
    accelerator.backward(model(torch.ones(1, 1)).sum() + math.inf)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)


def test_a_model_that_refuses_to_run_again_is_said_to(caplog: Log) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.ran = nn.Linear(1, 1), False

        def forward(self, x: Tensor) -> Tensor:
            if self.ran:
                raise RuntimeError("only once")
            self.ran = True
            return self.part(x) * math.nan

    accelerator = Accelerator()
    model = accelerator.prepare(Once())
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert "Running the batch once more failed (RuntimeError: only once)" in told(caplog)[0]


def test_the_loss_function_is_named_when_the_model_is_finite(caplog: Log) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(torch.log(model(torch.ones(1, 1)).sum() * 0 - 1))
    assert "the forward of the model is finite: the loss made it" in told(caplog)[0]


def test_a_compiled_model_is_not_hooked(caplog: Log) -> None:
    accelerator = Accelerator(dynamo_backend="eager")
    model = accelerator.prepare(nn.Linear(1, 1))
    assert not accelerator.unwrap_model(model)._forward_pre_hooks
    accelerator.backward(model(torch.ones(1, 1)).sum() * math.nan)
    assert "Compiled models are not followed" in told(caplog)[0]


def test_copies_and_pickles_carry_nothing_of_it() -> None:
    accelerator = Accelerator(nan_policy="skip")
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = pickle.loads(pickle.dumps(accelerator.unwrap_model(model)))
    assert b"lockstep" not in pickle.dumps(accelerator.unwrap_model(model)).replace(b"_lockstep_owner", b"")
    other(torch.ones(1, 1))
    copy.deepcopy(model)(torch.ones(1, 1))
    assert len(accelerator._state.monitor._recent) == 0
    assert copy.deepcopy(optimizer)._gate is None
    accelerator.free_memory()
    assert not model._forward_pre_hooks


# ---------------------------------------------------------------- as on accelerators


def unread(policy: str, steps: list[str], **options: Any) -> tuple[nn.Module, list[bool]]:
    """The way of accelerators, where no loss is read at once; what it does runs on the CPU as well."""
    accelerator = Accelerator(nan_policy=policy, **options)
    accelerator._state.monitor._async_check = AsyncCheck(torch.device("cpu"))
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    skipped = []
    for step in steps:
        loss = model(torch.ones(1, 1)).sum()
        accelerator.backward(loss + math.inf if step == "inf" else loss * math.nan if step == "nan" else loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return model, skipped


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_an_unread_loss_is_dropped_and_named(bad: str, precision: str, caplog: Log) -> None:
    handlers = [GradScalerKwargs(init_scale=1.0)]
    model, skipped = unread("skip", ["", bad, "", ""], mixed_precision=precision, kwargs_handlers=handlers)
    assert skipped == [False, True, False, False]
    assert finite(model)
    (line,) = told(caplog)
    assert f"the loss is {bad}" in line


def test_an_unread_loss_is_told_a_step_late(caplog: Log) -> None:
    unread("warn", ["", "nan", ""])
    assert told(caplog)[0].startswith("Update 2, the loss was nan a step ago.\n")


# ---------------------------------------------------------------- fp16


def half(policy: str, bad: list[bool]) -> list[bool]:
    accelerator = Accelerator(
        mixed_precision="fp16", nan_policy=policy, kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)]
    )
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    skipped = []
    for one in bad:
        accelerator.backward(model(torch.ones(1, 1)).sum() * (1e38 if one else 1e-12))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return skipped


@pytest.mark.parametrize("policy", ["warn", "skip", "stop"])
def test_what_the_loss_scaler_drops_is_normal_until_20_in_a_row(policy: str, caplog: Log) -> None:
    assert half(policy, [True] * 19 + [False] + [True] * 19) == [True] * 19 + [False] + [True] * 19
    assert told(caplog) == []
    if policy == "stop":
        with pytest.raises(NumericsError, match="20 updates in a row were dropped"):
            half(policy, [True] * 20)
    else:
        half(policy, [True] * 25)
        (line,) = told(caplog)
        assert "20 updates in a row were dropped" in line


def test_a_loss_that_is_no_number_counts_at_once_in_fp16() -> None:
    accelerator = Accelerator(mixed_precision="fp16", nan_policy="stop")
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    accelerator.backward(model(torch.ones(1, 1)).sum() * math.nan)
    with pytest.raises(NumericsError, match="the loss is nan"):
        optimizer.step()


# ---------------------------------------------------------------- parts


def test_sums_that_overflow_are_no_bad_gradient() -> None:
    huge = torch.full((4,), 3e38)
    assert math.isfinite(gradient_screen([huge]))
    assert math.isfinite(gradient_screen([]))
    assert not math.isfinite(gradient_screen([huge, torch.tensor([math.nan])]))
    assert not math.isfinite(gradient_screen([torch.tensor([math.inf, -math.inf])]))
    sparse = torch.eye(2).to_sparse()
    assert math.isfinite(gradient_screen([sparse]))


def test_late_numbers_are_given_once_with_what_belongs_to_them() -> None:
    late = AsyncCheck(torch.device("cpu"))
    assert list(late.ready()) == []
    late.put("the loss", torch.tensor(1.0), "a", ())
    late.put("the loss", torch.tensor([math.nan, 1.0]), "b", ())
    (bad,) = late.ready()
    assert (bad.what, bad.samples) == ("the loss", "b")
    assert math.isnan(bad.value)
    assert list(late.ready()) == []


def test_an_unknown_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nan_policy='loud' is not known. Allowed: 'stop', 'skip', 'warn', 'off'"):
        Accelerator(nan_policy="loud")
    monkeypatch.setenv("LOCKSTEP_NAN_POLICY", "stop")
    assert Accelerator()._state.monitor.policy.value == "stop"
    monkeypatch.setenv("LOCKSTEP_NAN_POLICY", "maybe")
    with pytest.raises(ConfigError, match="LOCKSTEP_NAN_POLICY"):
        Accelerator()


def test_the_detector_by_one_argument(capsys: pytest.CaptureFixture[str], caplog: Log) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(ValueError, match="inf/nan detected during batch_number=2"):
        train("warn", debug="underflow_overflow")
    out = capsys.readouterr().out
    assert "Detected inf/nan during batch_number=2\nin samples 4, 5\nLast " in out
    assert "middle Identity" in out
    assert told(caplog) == []
