"""Batches in parts, in one process: how they are split, and that the gradients are those of the whole."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.errors import ConfigError, NumericsError, OutOfMemory, UsageError
from lockstep.memory.microbatch import split_rows
from tests.distributed.test_numerics_ranks import Net

pytestmark = pytest.mark.usefixtures("alone")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Fields:
    x: Tensor
    scale: float


def test_every_form_of_a_batch_is_split_by_rows() -> None:
    rows = torch.arange(8.0).view(4, 2)
    batch = {
        "x": rows,
        "pair": Pair(rows[:, 0], [rows[:, 1]]),
        "fields": Fields(rows, 0.5),
        "texts": ["a", "b", "c", "d"],
        "name": "all",
        "temperature": torch.tensor(2.0),
        "none": None,
    }
    part = split_rows(batch, slice(1, 3))
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(part["pair"], Pair)
    assert part["pair"].x.tolist() == [2, 4]
    assert part["pair"].y[0].tolist() == [3, 5]
    assert part["fields"].x.tolist() == [[2, 3], [4, 5]]
    assert part["fields"].scale == 0.5
    assert part["texts"] == ["b", "c"]
    assert (part["name"], part["none"], float(part["temperature"])) == ("all", None, 2.0)


def test_a_pair_of_tensors_is_no_list_of_two_samples() -> None:
    x, y = split_rows([torch.ones(2, 3), torch.zeros(2)], slice(0, 1))
    assert (x.shape, y.shape) == ((1, 3), (1,))


def test_a_tensor_with_other_rows_is_named() -> None:
    with pytest.raises(UsageError, match=r"batch\['mask'\] has 3 rows where the first tensor has 4\. Pass split="):
        split_rows({"x": torch.ones(4), "mask": torch.ones(3, 3)}, slice(0, 2))


def trained(limit: int | None, rows: int, **options: Any) -> tuple[list[Tensor], float, list[int]]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    accelerator.microbatch_size = None
    model = accelerator.prepare(nn.Linear(3, 2))
    batch = (torch.randn(rows, 3), torch.randn(rows, 2))
    seen: list[int] = []

    def compute_loss(part: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(part[0]))
        if limit is not None and len(part[0]) > limit:
            raise MemoryError
        return (model(part[0]) - part[1]).square().mean()

    loss = accelerator.auto_microbatch(batch, compute_loss, **options)
    return [parameter.grad for parameter in model.parameters()], float(loss), seen  # type: ignore[misc]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), data=st.data())
def test_the_gradients_are_those_of_the_whole_batch(rows: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, rows))
    whole, loss, _ = trained(None, rows)
    parts, loss_of_parts, seen = trained(limit, rows)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert loss_of_parts == pytest.approx(loss, abs=1e-5)
    # The parts that counted, after those that did not fit.
    last = seen[len(seen) - next(n for n in range(1, len(seen) + 1) if sum(seen[-n:]) == rows) :]
    assert sum(last) == rows
    assert max(last) <= limit
    assert max(last) - min(last) <= 1


def test_tokens_count_where_the_loss_is_a_mean_over_tokens() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    x = torch.arange(1.0, 9.0).view(4, 2, 1)
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 0]]).float()

    def compute_loss(part: dict[str, Tensor]) -> Tensor:
        return (model(part["x"]).squeeze(-1) * part["mask"]).sum() / part["mask"].sum()

    for limit in (None, 2, 1):
        accelerator.microbatch_size = limit
        model.weight.grad = None
        accelerator.auto_microbatch({"x": x, "mask": mask}, compute_loss, num_items=lambda part: part["mask"].sum())
        assert float(model.weight.grad) == pytest.approx((1 + 2 + 3 + 7) / 4)


def test_gradients_from_before_are_kept_when_memory_runs_out() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    short = False

    def compute_loss(part: Tensor) -> Tensor:
        if short and len(part) > 1:
            model.weight.grad = torch.full((1, 1), 1e9)  # as a backward that got half way
            raise MemoryError
        return model(part).mean()

    with accelerator.accumulate(model):
        accelerator.auto_microbatch(torch.full((4, 1), 2.0), compute_loss)
    assert float(model.weight.grad) == 1.0
    short = True
    with accelerator.accumulate(model):
        accelerator.auto_microbatch(torch.full((4, 1), 6.0), compute_loss)
    assert float(model.weight.grad) == pytest.approx(4.0)
    assert accelerator.microbatch_size == 1


def test_random_numbers_are_as_if_nothing_had_failed() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    torch.manual_seed(5)
    drawn = []

    def compute_loss(part: Tensor) -> Tensor:
        drawn.append(torch.rand(1).item())
        if len(part) > 2:
            raise MemoryError
        return model(part).mean()

    accelerator.auto_microbatch(torch.ones(4, 1), compute_loss)
    assert drawn == [expected[0], *expected]


def test_fp16s_scale_is_in_every_part() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.microbatch_size = 1
    accelerator.auto_microbatch(torch.full((4, 1), 2.0), lambda part: model(part).mean())
    assert accelerator.scaler is not None
    assert float(model.weight.grad) == pytest.approx(2.0 * accelerator.scaler.get_scale())


def test_an_own_way_to_split() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.microbatch_size = 1
    parts = []

    def split(batch: Tensor, rows: slice) -> Tensor:
        parts.append(rows)
        return batch[rows] * 10

    accelerator.auto_microbatch(torch.ones(2, 1), lambda part: model(part).mean(), split=split)
    assert parts == [slice(0, 1), slice(1, 2)]
    assert float(model.weight.grad) == 10


def test_bad_input() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    ones = torch.ones(2, 1)
    with pytest.raises(UsageError, match="no tensor of this batch"):
        accelerator.auto_microbatch({"a": torch.tensor(1.0)}, lambda part: part)
    with pytest.raises(UsageError, match="must be a function"):
        accelerator.auto_microbatch(ones, model(ones).mean())
    with pytest.raises(UsageError, match=r"returned a tensor of shape \[2, 1\]"):
        accelerator.auto_microbatch(ones, model)
    with pytest.raises(UsageError, match="returned a NoneType"):
        accelerator.auto_microbatch(ones, lambda part: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="num_items=3"):
        accelerator.auto_microbatch(ones, lambda part: model(part).mean(), num_items=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="microbatch_size=0"):
        accelerator.microbatch_size = 0
    with pytest.raises(ValueError, match="mine"):
        accelerator.auto_microbatch(ones, lambda part: (_ for _ in ()).throw(ValueError("mine")))


def test_one_sample_that_does_not_fit() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))

    def compute_loss(part: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    with pytest.raises(OutOfMemory, match=r"even parts of 1 sample do not fit: rank 0 ran out of memory \(tried"):
        accelerator.auto_microbatch(torch.ones(2, 1), compute_loss)


# --- bad numbers -------------------------------------------------------------------------------------------------


def with_a_zero(policy: str, *, limit: int | None = 2, short: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    """Batches of 4 in parts; sample 6, in the second, is a zero, of which ``Net.middle`` gets an infinity.

    ``short`` runs out of memory in the backward of its part, as long as that has 2 samples.
    """
    accelerator = Accelerator(cpu=True, nan_policy=policy, **options)
    values = torch.arange(1.0, 13.0).view(-1, 1)
    values[6] = 0.0
    model = Net()
    loader: DataLoader[Any] = DataLoader(values, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    accelerator.microbatch_size = limit
    skipped, losses, parts = [], [], []

    def compute_loss(part: Tensor) -> Tensor:
        parts.append(part.flatten().tolist())
        loss = model(part).square().mean()
        if short and len(part) == 2 and 0.0 in part:
            loss.register_hook(lambda _: (_ for _ in ()).throw(MemoryError()))
        return loss

    for batch in loader:
        with accelerator.accumulate(model):
            losses.append(float(accelerator.auto_microbatch(batch, compute_loss)))
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return model, (skipped, losses, parts)


def told(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "lockstep.numerics"]


def finite(model: nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize(("limit", "samples"), [(None, "samples 4, 5, 6, 7"), (2, "samples 6, 7"), (1, "sample 6")])
def test_a_bad_loss_of_a_part_is_told_with_its_samples(
    limit: int | None, samples: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, (skipped, losses, _) = with_a_zero("warn", limit=limit)
    (line,) = told(caplog)
    assert line.startswith(f"Update 2, the loss is nan, {samples}.\n")
    assert "in input[0] of middle (Identity)" in line
    assert skipped == [False] * 3
    assert [math.isnan(loss) for loss in losses] == [False, True, True]
    assert not finite(model)


@pytest.mark.parametrize("short", [False, True])
def test_skip_drops_the_update_of_a_bad_part(short: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, (skipped, losses, parts) = with_a_zero("skip", short=short)
    assert skipped == [False, True, False]
    assert finite(model)
    (line,) = told(caplog)
    # Where the part was computed again in smaller ones, those are named.
    assert f"the update is dropped.\nthe loss is nan, {'sample 6' if short else 'samples 6, 7'}\n" in line
    assert ([0.0] in parts) == short
    assert math.isnan(losses[1])


def test_a_bad_part_spoils_its_window_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    model, (skipped, *_) = with_a_zero("skip", gradient_accumulation_steps=2)
    assert skipped == [False, True, False]
    assert finite(model)
    assert "the gradient of update 1 is nan" in told(caplog)[0]


def test_stop_ends_at_a_bad_part() -> None:
    with pytest.raises(NumericsError, match=r"(?s)nan_policy='stop': .*update 2.*samples 6, 7.*middle \(Identity\)"):
        with_a_zero("stop")


def test_what_an_attempt_saw_that_ran_out_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, nan_policy="skip")
    net = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    accelerator.microbatch_size = 2
    seen: list[int] = []

    def compute_loss(part: Tensor) -> Tensor:
        seen.append(len(part))
        if seen == [2, 2]:
            raise MemoryError
        return model(part).mean() + (math.inf if len(part) == 2 else 0.0)

    accelerator.auto_microbatch(torch.ones(4, 1), compute_loss)
    optimizer.step()
    assert seen == [2, 2, 1, 1, 1, 1]
    assert not accelerator.optimizer_step_was_skipped
    assert told(caplog) == []
