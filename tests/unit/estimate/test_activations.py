from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from lockstep.errors import ConfigError, UsageError
from lockstep.utils import estimate_memory


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


def chain(width: int = 64, depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def test_each_part_as_counted_by_hand() -> None:
    seen = estimate_memory(two_layers(), torch.randn(4, 10))
    count = 10 * 20 + 20 + 20 * 5 + 5
    assert seen.weights == seen.gradients == 4 * count
    assert seen.optimizer == 2 * 4 * count + 4 * 4  # two moments; for each of the four tensors the number of steps
    assert seen.batch == 4 * 4 * 10
    # The ReLU keeps its output, the second layer its input: one storage. The first keeps the batch, both their weights.
    assert seen.activations == 4 * 4 * 20


def test_activations_are_freed_while_gradients_appear() -> None:
    seen = estimate_memory(chain(), torch.randn(64, 64), optimizer="sgd")
    assert seen.activations == 6 * 64 * 64 * 4
    everything = seen.weights + seen.batch + seen.activations + seen.gradients
    assert everything - seen.gradients < seen.peak < everything
    assert sum(seen.at_peak.values()) == seen.peak


def test_a_small_batch_has_its_peak_in_the_optimizer() -> None:
    seen = estimate_memory(chain(), torch.randn(1, 64))
    assert seen.peak_in == "optimizer step"
    assert seen.peak >= seen.weights + seen.gradients + seen.optimizer


@settings(max_examples=5, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    batch=st.integers(1, 50),
    optimizer=st.sampled_from(["sgd", "adamw"]),
)
def test_without_data_it_is_the_same(widths: list[int], batch: int, optimizer: str) -> None:
    def build() -> nn.Sequential:
        pairs = pairwise(widths)
        return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.GELU())))

    real = estimate_memory(build(), torch.randn(batch + 1, widths[0]), optimizer=optimizer)
    with torch.device("meta"):
        model = build()
    assert estimate_memory(model, torch.randn(batch + 1, widths[0]), optimizer=optimizer) == real
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    first, *others = model.parameters()
    first.grad = torch.ones_like(first)
    ran: list[Tensor] = []
    first.register_post_accumulate_grad_hook(ran.append)  # such as one that steps an optimizer
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    one, two = (estimate_memory(model, torch.randn(8, 4, generator=torch.Generator())) for _ in range(2))
    assert one == two
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(parameter.grad is None for parameter in others)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert ran == []
    assert all(now is then for now, then in zip(model.parameters(), (first, *others), strict=True))


def test_nothing_is_changed_by_a_model_that_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        estimate_memory(model, torch.randn(8, 4))
    assert torch.equal(model[0].running_mean, torch.zeros(4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embed(tokens))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_are_counted_once(device: str) -> None:
    seen = estimate_memory(Tied().to(device) if device == "cpu" else on_meta(Tied), torch.zeros(2, 8, dtype=torch.long))
    assert seen.weights == seen.gradients == 50 * 16 * 4


def on_meta(factory: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


def test_the_loss_of_the_output_is_used() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    alone = estimate_memory(Tied(), tokens)
    by_name = estimate_memory(Tied(), {"tokens": tokens, "labels": tokens})
    by_position = estimate_memory(Tied(), (tokens, tokens.clone()))
    assert by_name.activations == by_position.activations
    # Cross-entropy keeps the logarithms of what the model predicts, the sum keeps nothing.
    assert by_name.activations >= alone.activations + 2 * 8 * 50 * 4


def test_a_loss_of_ones_own() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    seen = estimate_memory(two_layers(), {"x": torch.randn(4, 10), "y": torch.randn(4, 5)}, loss=loss)
    assert seen.activations == 4 * 4 * 20 + 4 * 4 * 5  # and the output, for the square


def test_checkpointing_keeps_less() -> None:
    model, batch = chain(depth=8), torch.randn(256, 64, requires_grad=True)
    kept = estimate_memory(model, batch)
    redone = estimate_memory(
        model, batch, loss=lambda model, batch: checkpoint_sequential(model, 4, batch, use_reentrant=False).sum()
    )
    assert redone.peak < kept.peak
    assert batch.grad is None


def test_under_the_callers_autocast() -> None:
    model, batch = chain(), torch.randn(4096, 64)
    full = estimate_memory(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert estimate_memory(model, batch).activations < 0.7 * full.activations


def test_frozen_weights_cost_no_gradients() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    seen = estimate_memory(model, torch.randn(4, 10))
    assert seen.gradients == 4 * (20 * 5 + 5)
    assert seen.weights == 4 * (10 * 20 + 20 + 20 * 5 + 5)


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        (two_layers().requires_grad_(False), {}, UsageError, "nothing to train"),
        (
            two_layers(),
            {"loss": lambda model, batch: model(batch)},
            UsageError,
            r"loss gave a tensor of shape \(4, 5\)",
        ),
        (two_layers(), {"loss": lambda model, batch: 1.0}, UsageError, "loss gave float"),
        (two_layers(), {"optimizer": "adamx"}, ConfigError, r"optimizer='adamx' is not known\. Allowed: 'adam'"),
        (two_layers(), {"optimizer": torch.optim.LBFGS}, ConfigError, "LBFGS cannot be tried without data"),
    ],
)
def test_what_cannot_be_measured(model: nn.Module, options: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        estimate_memory(model, torch.randn(4, 10), **options)


def test_an_output_without_a_gradient() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(UsageError, match=r"Detached holds no tensor with a gradient.*Give loss="):
        estimate_memory(Detached(10, 2), torch.randn(4, 10))
