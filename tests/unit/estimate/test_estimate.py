from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.cli.estimate import DTYPES
from lockstep.errors import ConfigError, UsageError
from lockstep.estimate import find_model
from lockstep.estimate.estimate import PRECISIONS, ModelEstimate, estimate
from lockstep.utils import estimate_memory


def found(model: nn.Module | None = None) -> find_model.FoundModel:
    with torch.device("meta"):
        model = model or nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 4))
    return find_model._of_module("here", model)


def work_out(*dtypes: str, sizes: tuple[int, ...] = (4, 8), **options: Any) -> ModelEstimate:
    return estimate(found(), dtypes=dtypes, batch_sizes=sizes, batch=lambda size: torch.zeros(size, 16), **options)


COUNT = 16 * 64 + 64 + 64 * 4 + 4


def test_the_command_knows_all_types() -> None:
    assert set(DTYPES) == set(PRECISIONS)


def test_sizes_by_type() -> None:
    fp32, bf16, mixed, int8, int4 = work_out("fp32", "bf16", "mixed-bf16", "int8", "int4").sizes
    steps = 4 * 4  # Adam counts its steps for each tensor, in fp32 whatever the weights are
    assert (fp32.weights, fp32.gradients, fp32.optimizer) == (4 * COUNT, 4 * COUNT, 8 * COUNT + steps)
    assert (bf16.weights, bf16.gradients, bf16.optimizer) == (2 * COUNT, 2 * COUNT, 4 * COUNT + steps)
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (fp32.weights, fp32.gradients, fp32.optimizer)
    assert (int8.weights, int4.weights) == (COUNT, COUNT // 2)
    assert int8.gradients is int8.optimizer is int8.training_with_adam is None
    assert fp32.training_with_adam == 16 * COUNT + steps
    assert (fp32.largest_layer, fp32.largest_layer_name) == (4 * (16 * 64 + 64), "0")


def test_the_optimizer_is_counted_but_training_with_adam_is_adams() -> None:
    row = work_out("fp32", optimizer="momentum").sizes[0]
    assert row.optimizer == 4 * COUNT
    assert row.training_with_adam == 16 * COUNT + 16


def test_forecasts_by_batch_size_and_type() -> None:
    report = work_out("fp32", "bf16", "int8")
    rows = {(row.dtype, row.batch_size): row for row in report.forecasts}
    assert list(rows) == [(dtype, size) for dtype in ("fp32", "bf16", "int8") for size in (4, 8)]
    assert rows["fp32", 8].activations == 2 * rows["fp32", 4].activations
    assert rows["bf16", 8].batch == rows["fp32", 8].batch // 2 == 8 * 16 * 2
    assert rows["bf16", 8].peak < rows["fp32", 8].peak
    assert rows["int8", 8].peak_in == "inference"
    # The second layer's input and the ReLU's output at once, or a layer's output and its input: two rows of 64.
    assert rows["int8", 8].peak <= COUNT + rows["int8", 8].batch + 2 * 8 * 64 * 2 + 8 * 4 * 2


def test_mixed_precision_has_smaller_activations_and_the_same_weights() -> None:
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    report = estimate(
        found(wide), dtypes=["fp32", "mixed-bf16"], batch_sizes=[4096], batch=lambda size: torch.zeros(size, 64)
    )
    fp32, mixed = report.forecasts
    assert 0.4 * fp32.activations < mixed.activations < 0.8 * fp32.activations


def test_the_model_stays_on_the_meta_device() -> None:
    seen = found()
    assert seen.model is not None
    estimate(seen, dtypes=["fp32", "int8"], batch_sizes=[2], batch=lambda size: torch.zeros(size, 16))
    assert all(parameter.is_meta and parameter.grad is None for parameter in seen.model.parameters())
    assert all(module.training for module in seen.model.modules())


def test_a_large_model_takes_no_memory() -> None:
    """340 GB of weights, a batch of 4 GB."""
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(1 << 16, 1 << 16) for _ in range(20)))
    report = estimate(
        found(large), dtypes=["fp32"], batch_sizes=[1 << 14], batch=lambda size: torch.zeros(size, 1 << 16)
    )
    assert report.forecasts[0].peak > 4 * 340e9


def test_without_a_batch_the_activations_are_not_known() -> None:
    report = estimate(found())
    assert report.forecasts == ()
    assert report.notes == ("Activations are not known: nothing says what the model takes. Give --shape or --batch.",)


def test_a_batch_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"The model failed on the batch: RuntimeError: .*16"):
        estimate(found(), dtypes=["fp32"], batch_sizes=[2], batch=lambda size: torch.zeros(size, 3))


def test_progress_is_told() -> None:
    told: list[str] = []
    work_out("fp32", progress=told.append)
    assert told == ["fp32, batch size 4", "fp32, batch size 8"]


class Looks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_a_model_that_looks_at_values() -> None:
    with pytest.raises(ConfigError, match=r"looks at the values of a tensor .*Measure a model on a real device"):
        estimate(found(Looks(4, 4)), dtypes=["fp32"], batch_sizes=[2], batch=lambda size: torch.zeros(size, 4))
    with torch.device("meta"):
        model = Looks(4, 4)
    with pytest.raises(UsageError, match="looks at the values of a tensor"):
        estimate_memory(model, torch.zeros(2, 4))
    assert estimate_memory(Looks(4, 4), torch.zeros(2, 4)).gradients == 4 * 20


def test_what_an_lstm_hides_is_said() -> None:
    class Last(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[0]

    with torch.device("meta"):
        model = Last(4, 8)
    report = estimate(found(model), dtypes=["fp32"], batch_sizes=[2], batch=lambda size: torch.zeros(5, size, 4))
    assert "peak are too low" in report.notes[0]
    assert report.forecasts[0].activations < estimate_memory(Last(4, 8), torch.zeros(5, 2, 4)).activations
