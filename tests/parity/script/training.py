"""Short training runs."""

import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin
from notes import fresh
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

SCHEDULERS = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=9),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=40),
    # Shorter than the run: what happens past the end.
    "one_cycle_short": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=10),
}


def scenarios(exact):
    """``exact``: what makes the tail of an accumulation window follow Accelerate's arithmetic."""

    def window(steps, **options):
        return GradientAccumulationPlugin(num_steps=steps, **options)

    def exact_window(steps, **options):
        return window(steps, **options, **exact)

    split = DataLoaderConfiguration(split_batches=True)
    runs = {
        "plain/as it is": lambda: train(),
        "plain/uneven data": lambda: train(samples=21),
        "plain/uneven data kept uneven by drop_last": lambda: train(samples=21, drop_last=True),
        "plain/adamw": lambda: train(optimizer=torch.optim.AdamW),
        "plain/split batches": lambda: train(dataloader_config=split),
        "plain/split batches, uneven": lambda: train(samples=21, dataloader_config=split),
        "plain/bf16": lambda: train(mixed_precision="bf16"),
        "plain/clip norm": lambda: train(clip_norm=0.05),
        "plain/clip norm, inf": lambda: train(clip_norm=0.05, norm_type=float("inf")),
        "plain/clip value": lambda: train(clip_value=0.01),
        "plain/no_sync by hand": lambda: by_hand(),
        "plain/two models": lambda: two_models(),
        "accumulate/even": lambda: train(gradient_accumulation_steps=3),
        "accumulate/even, clip norm": lambda: train(gradient_accumulation_steps=3, clip_norm=0.05),
        "accumulate/even, bf16": lambda: train(gradient_accumulation_steps=3, mixed_precision="bf16"),
        "accumulate/even, each batch synced": lambda: train(
            gradient_accumulation_plugin=window(3, sync_each_batch=True)
        ),
        "accumulate/split batches": lambda: train(gradient_accumulation_steps=3, dataloader_config=split),
        "tail/exact": lambda: train(samples=28, gradient_accumulation_plugin=exact_window(3)),
        "tail/exact, clip norm": lambda: train(
            samples=28, clip_norm=0.05, gradient_accumulation_plugin=exact_window(3)
        ),
        "tail/exact, window not closed by the loader": lambda: train(
            samples=28, gradient_accumulation_plugin=exact_window(3, sync_with_dataloader=False)
        ),
        "tail/default": lambda: train(samples=28, epochs=1, momentum=0, gradient_accumulation_plugin=window(3)),
    }
    for name, make in SCHEDULERS.items():
        runs |= {
            f"schedule/{name}": lambda make=make: train(scheduler=make),
            f"schedule/{name}, accumulating": lambda make=make: train(scheduler=make, gradient_accumulation_steps=3),
            f"schedule/{name}, accumulating, not adjusted": lambda make=make: train(
                scheduler=make, gradient_accumulation_plugin=window(3, adjust_scheduler=False)
            ),
            f"schedule/{name}, split batches": lambda make=make: train(scheduler=make, dataloader_config=split),
            f"schedule/{name}, without the optimizer": lambda make=make: train(
                scheduler=make, step_scheduler_with_optimizer=False
            ),
        }
    return {f"train/{name}": run for name, run in runs.items()}


def problem(samples):
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 4, generator=draw)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(
    samples=24,
    epochs=2,
    drop_last=False,
    optimizer=torch.optim.SGD,
    momentum=0.9,
    scheduler=None,
    clip_norm=None,
    norm_type=2,
    clip_value=None,
    **options,
):
    accelerator = fresh(**options)
    model = network()
    extra = {"momentum": momentum} if optimizer is torch.optim.SGD else {}
    made = optimizer(model.parameters(), lr=0.1, **extra)
    schedule = (scheduler or SCHEDULERS["lambda"])(made)
    loader = DataLoader(problem(samples), batch_size=4, drop_last=drop_last)
    model, made, loader, schedule = accelerator.prepare(model, made, loader, schedule)
    if scheduler is None:
        schedule = None
    seen = {name: [] for name in ("loss", "output", "sync", "rate", "norm", "skipped", "place", "weights")}
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                output = model(inputs)
                loss = nn.functional.mse_loss(output, targets)
                accelerator.backward(loss)
                if clip_norm is not None and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm, norm_type=norm_type)
                    seen["norm"].append(float(norm))
                if clip_value is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), clip_value)
                made.step()
                if schedule is not None:
                    schedule.step()
                    seen["rate"].append(schedule.get_last_lr())
                made.zero_grad()
            seen["loss"].append(loss.item())
            seen["output"].append(str(output.dtype))
            seen["sync"].append(accelerator.sync_gradients)
            seen["skipped"].append(accelerator.optimizer_step_was_skipped)
            seen["place"].append(where(accelerator.gradient_state))
            seen["weights"].append(weights(accelerator.unwrap_model(model)))
    seen["after"] = where(accelerator.gradient_state)
    seen["type"] = type(accelerator.unwrap_model(model)).__name__
    return seen


def where(state):
    return {
        "end_of_dataloader": state.end_of_dataloader,
        "remainder": state.remainder,
        "in_dataloader": state.in_dataloader,
        "num_steps": state.num_steps,
        "sync_gradients": state.sync_gradients,
    }


def weights(model):
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def by_hand():
    """Two forwards and backwards without, one with the averaging of gradients."""
    accelerator = fresh()
    model, made, loader = network(), None, DataLoader(problem(24), batch_size=4)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    model, made, loader = accelerator.prepare(model, made, loader)
    for number, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        if number % 3 < 2:
            with accelerator.no_sync(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        else:
            accelerator.backward(loss)
            made.step()
            made.zero_grad()
    return weights(accelerator.unwrap_model(model))


def two_models():
    accelerator = fresh(gradient_accumulation_steps=3)
    first, second = network(), nn.Linear(1, 1)
    nn.init.constant_(second.weight, 0.5)
    nn.init.zeros_(second.bias)
    made = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    loader = DataLoader(problem(24), batch_size=4)
    first, second, made, loader = accelerator.prepare(first, second, made, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(first, second):
            accelerator.backward(nn.functional.mse_loss(second(first(inputs)), targets))
            made.step()
            made.zero_grad()
    return weights(accelerator.unwrap_model(first)) + weights(accelerator.unwrap_model(second))
