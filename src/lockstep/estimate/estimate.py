"""What a model takes before it is run: sizes for each type of number, activations and peak for each batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError, LockstepError
from lockstep.estimate import optimizers
from lockstep.estimate.activations import Loss, forward_only, measure
from lockstep.estimate.fake_params import no_data, stand_ins
from lockstep.estimate.find_model import FoundModel, Weight
from lockstep.torch_internals import fake


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """How numbers are held."""

    bits: int
    """Of a weight."""
    weights: torch.dtype
    """The type of weights when they are computed with."""
    trains: bool = True
    """Whether a model held like this can be trained."""
    autocast: torch.dtype | None = None
    """The type of activations where it is another."""


PRECISIONS = {
    "fp32": NumberFormat(bits=32, weights=torch.float32),
    "bf16": NumberFormat(bits=16, weights=torch.bfloat16),
    "fp16": NumberFormat(bits=16, weights=torch.float16),
    "mixed-bf16": NumberFormat(bits=32, weights=torch.float32, autocast=torch.bfloat16),
    "mixed-fp16": NumberFormat(bits=32, weights=torch.float32, autocast=torch.float16),
    # Whole numbers have no gradients; they are computed with in 16 bits.
    "int8": NumberFormat(bits=8, weights=torch.bfloat16, trains=False),
    "int4": NumberFormat(bits=4, weights=torch.bfloat16, trains=False),
}
"""By the names that ``lockstep estimate --dtypes`` takes."""
_LSTM = (
    "The model holds an LSTM, which on the CPU keeps a workspace whose size shows only when it computes: activations "
    "and peak are too low. lockstep.utils.estimate_memory on a real model counts it."
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a model takes whatever the batch, in bytes."""

    dtype: str
    """How numbers are held."""
    largest_layer: int
    """The largest piece that must fit on one device."""
    largest_layer_name: str
    weights: int
    """All weights and buffers."""
    gradients: int | None
    """The gradients; None where the model cannot be trained."""
    optimizer: int | None
    """What the optimizer keeps."""
    training_with_adam: int | None
    """Weights, gradients and what Adam keeps, without activations."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one batch size takes, in bytes."""

    dtype: str
    """How numbers are held."""
    batch_size: int
    batch: int
    activations: int
    """What is kept for the backward at the most; where the model cannot be trained, what a forward needs."""
    peak: int
    """The most that lives at one time."""
    peak_in: str
    """When that is."""


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """All that is known about a model."""

    model: str
    """As it was asked for."""
    parameters: int
    """Weights that are trained."""
    optimizer: str
    sizes: tuple[Sizes, ...]
    """One for each type."""
    forecasts: tuple[Forecast, ...]
    """One for each type and batch size; empty where nothing says what the model computes, or on what."""
    notes: tuple[str, ...]
    """What the reader has to know."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def estimate(
    found: FoundModel,
    *,
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16", "int8"),
    batch_sizes: Sequence[int] = (1, 8, 32),
    optimizer: str | optimizers.Make = "adamw",
    batch: Callable[[int], Any] | None = None,
    loss: Loss | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> ModelEstimate:
    """Work out sizes and forecasts; ``progress`` is called with what is being worked on."""
    make = optimizers.maker(optimizer)
    sizes = tuple(sizes_of(found, dtype, make) for dtype in dtypes)
    notes = list(found.notes)
    forecasts: tuple[Forecast, ...] = ()
    source = batch or found.batch
    if found.model is not None and source is None:
        notes.append("Activations are not known: nothing says what the model takes. Give --shape or --batch.")
    elif found.model is not None and source is not None:
        try:
            forecasts = tuple(_forecasts(found, dtypes, batch_sizes, source, make, loss, progress))
        except Exception as error:
            # The model is the user's code: whatever it raises is the answer.
            if batch is not None or loss is not None:
                raise ConfigError(f"The model failed on the batch: {_reason(error)}") from error
            notes.append(
                f"Activations are not known: the model failed on the batch made for it: {_reason(error)} Give --batch."
            )
        if any(isinstance(module, nn.LSTM) for module in found.model.modules()):
            notes.append(_LSTM)
    return ModelEstimate(
        model=found.name,
        parameters=sum(weight.count for weight in found.weights if weight.trainable),
        optimizer=optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "its own"),
        sizes=sizes,
        forecasts=forecasts,
        notes=tuple(notes),
    )


def _reason(error: Exception) -> str:
    """The first line of what went wrong, as a sentence."""
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{first}." if isinstance(error, LockstepError) else f"{type(error).__name__}: {first}."


def sizes_of(found: FoundModel, dtype: str, make: optimizers.Make) -> Sizes:
    """What the model takes whatever the batch."""
    precision = PRECISIONS[dtype]
    weights = sum(_bytes(weight, precision.bits) for weight in found.weights)
    layer, count = max(found.layers.items(), key=lambda item: item[1], default=("", 0))
    trained = [weight for weight in found.weights if weight.trainable]
    gradients = state = adam = None
    if precision.trains:
        bare = [torch.empty(weight.shape, dtype=precision.weights, device="meta") for weight in trained]
        gradients = sum(_bytes(weight, precision.bits) for weight in trained)
        state = optimizers.cost(bare, make).state if bare else 0
        adam = weights + gradients + (optimizers.cost(bare, optimizers.NAMED["adam"]).state if bare else 0)
    return Sizes(
        dtype=dtype,
        largest_layer=count * precision.bits // 8,
        largest_layer_name=layer,
        weights=weights,
        gradients=gradients,
        optimizer=state,
        training_with_adam=adam,
    )


def _bytes(weight: Weight, bits: int) -> int:
    """Numbers with a point are held as asked; others as they are."""
    return weight.count * (bits if weight.dtype.is_floating_point else weight.dtype.itemsize * 8) // 8


def _forecasts(
    found: FoundModel,
    dtypes: Sequence[str],
    batch_sizes: Sequence[int],
    source: Callable[[int], Any],
    make: optimizers.Make,
    loss: Loss | None,
    progress: Callable[[str], object],
) -> Iterator[Forecast]:
    assert found.model is not None
    for dtype in dtypes:
        precision = PRECISIONS[dtype]
        for size in batch_sizes:
            progress(f"{dtype}, batch size {size}")
            with no_data(), stand_ins(found.model, precision.weights):
                batch = _cast(source(size), precision.weights)
                if precision.trains:
                    yield _training(found, dtype, size, batch, make, loss)
                else:
                    yield _inference(found, dtype, size, batch)


def _training(
    found: FoundModel, dtype: str, size: int, batch: Any, make: optimizers.Make, loss: Loss | None
) -> Forecast:
    assert found.model is not None
    seen = measure(found.model, batch, make=make, loss=loss, autocast=PRECISIONS[dtype].autocast)
    return Forecast(
        dtype=dtype,
        batch_size=size,
        batch=seen.batch,
        activations=seen.activations,
        peak=seen.peak,
        peak_in=seen.peak_in,
    )


def _inference(found: FoundModel, dtype: str, size: int, batch: Any) -> Forecast:
    assert found.model is not None
    needed, given = forward_only(found.model, batch)
    weights = sum(_bytes(weight, PRECISIONS[dtype].bits) for weight in found.weights)
    peak = weights + given + needed
    return Forecast(dtype=dtype, batch_size=size, batch=given, activations=needed, peak=peak, peak_in="inference")


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return fake.map_only(torch.Tensor, cast, batch)
