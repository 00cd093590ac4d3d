"""Models that change after prepare, copies of what was prepared, and small things around them."""

import copy
import logging
import os
import pickle
import sys
import tempfile
import warnings
from collections import OrderedDict

import torch
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, concatenate, pad_across_processes, save
from notes import attempt, fresh
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

CHANGES = {
    "freeze": (lambda net: None, lambda net: net[0].requires_grad_(False)),
    "unfreeze": (lambda net: net[0].requires_grad_(False), lambda net: net[0].requires_grad_(True)),
    "unfreeze all": (lambda net: net.requires_grad_(False), lambda net: net.requires_grad_(True)),
    "grow": (lambda net: None, lambda net: net.append(grown(1))),
    "swap": (lambda net: None, lambda net: net.__setitem__(3, grown(8))),
}
WAYS = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "averaged": AveragedModel,
    "EMA": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True),
}


def scenarios():
    return {
        **{f"models/again/{name}": lambda name=name: again(name) for name in CHANGES},
        **{f"models/copies/{name}": lambda name=name: copies(name) for name in WAYS},
        "models/copied optimizers": copied_optimizers,
        "models/evaluation": evaluation,
        "models/unwrap": unwrap,
        "models/leaves": leaves,
        "models/stacklevel": stacklevel,
        "models/shared": shared,
        "models/naming": naming,
        "models/schedule": schedule,
        "models/print": printing,
    }


def grown(inputs):
    torch.manual_seed(13)
    return nn.Linear(inputs, 1)


def network():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def data(batch_size=4):
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(24, 4, generator=draw)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=batch_size)


def weights(net):
    return [value for parameter in net.parameters() for value in parameter.detach().flatten().tolist()]


def train(accelerator, model, loader, optimizer):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        if loss.requires_grad:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(net):
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained or [torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)


def again(change):
    before, after = CHANGES[change]
    accelerator = fresh()
    net = network()
    before(net)
    model, optimizer, loader = accelerator.prepare(net, optimizer_of(net), data())
    train(accelerator, model, loader, optimizer)
    net = accelerator.unwrap_model(model)
    after(net)
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    train(accelerator, model, loader, optimizer)
    return {"type": type(model).__name__, "weights": weights(net)}


def copies(way):
    accelerator = fresh()
    model = network()
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), data())
    train(accelerator, model, loader, optimizer)
    made = WAYS[way](model)
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(accelerator.process_index))
    for _ in range(2):
        made(inputs).pow(2).mean().backward()
    gradients = [parameter.grad.tolist() for parameter in made.parameters()]
    if isinstance(made, AveragedModel):
        train(accelerator, model, loader, optimizer)
        made.update_parameters(model)
        train(accelerator, model, loader, optimizer)
        made.update_parameters(model)
    made.eval()
    with torch.no_grad():
        output = made(inputs).tolist()
    return {
        "type": type(made).__name__,
        "names": list(made.state_dict()),
        "weights": weights(made),
        "gradients": gradients,
        "output": output,
        "original": [parameter.grad is None for parameter in model.parameters()],
    }


def copied_optimizers():
    accelerator = fresh()
    model = network()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, data())
    seen = []
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        made, made_scheduler = copy.deepcopy((optimizer, scheduler))
        seen.append(
            [made.param_groups[0]["lr"], made_scheduler.get_last_lr(), made_scheduler.state_dict()["last_epoch"]]
        )
    train(accelerator, model, loader, optimizer)
    return seen, weights(accelerator.unwrap_model(model))


def evaluation():
    accelerator = fresh()
    net = network()
    first = accelerator.prepare_model(net, evaluation_mode=True)
    model = accelerator.prepare(net)
    return type(first).__name__, type(model).__name__, type(accelerator.unwrap_model(model)).__name__


def unwrap():
    accelerator = fresh()
    net = nn.Linear(1, 1)
    model = accelerator.prepare(net)
    return {
        "prepared": accelerator.unwrap_model(model) is net,
        "DataParallel": accelerator.unwrap_model(nn.DataParallel(net)) is net,
        "DataParallel of DataParallel": accelerator.unwrap_model(nn.DataParallel(nn.DataParallel(net))) is net,
        "plain": accelerator.unwrap_model(net) is net,
    }


def leaves():
    fresh()
    found = {"text": concatenate(["x"]), "number": concatenate([3]), "none": concatenate([None])}
    found["in a dict"] = concatenate([{"a": "x", "b": torch.ones(2)}])
    found["two texts"] = attempt(lambda: concatenate(["x", "y"]))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = pad_across_processes(nested)
            both = pad_across_processes({"nested": nested, "plain": torch.ones(2)})
        found[f"nested {layout}"] = [
            kept is nested,
            both["nested"] is nested,
            both["plain"].tolist(),
            [warning.category.__name__ for warning in caught if "pad" in str(warning.message)],
        ]
    return found


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append(record)


def stacklevel():
    fresh()
    logger = get_logger("parity")
    records = Records()
    logging.getLogger("parity").addHandler(records)

    def helper(**options):
        logger.warning("here", main_process_only=False, **options)
        logger.log(logging.WARNING, "here", main_process_only=False, **options)

    for options in ({}, {"stacklevel": 2}, {"stacklevel": 3}, {"stacklevel": 4}):
        helper(**options)
    logging.getLogger("parity").removeHandler(records)
    return [record.funcName for record in records.seen]


def shared():
    accelerator = fresh()
    tensor = torch.ones(2)
    state = OrderedDict(a=tensor, b=tensor, c=torch.zeros(1))
    records = Records()
    names = ("accelerate.utils.other", "lockstep.checkpoint")
    for name in names:
        logging.getLogger(name).addHandler(records)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file.safetensors")
        save(state, path, safe_serialization=True)
        there = os.path.exists(path)
    for name in names:
        logging.getLogger(name).removeHandler(records)
    accelerator.wait_for_everyone()
    return there, [record.levelname for record in records.seen], ["b" in record.getMessage() for record in records.seen]


def naming():
    with tempfile.TemporaryDirectory() as folder:
        config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
        accelerator = fresh(project_config=config)
        if accelerator.num_processes > 1:
            return None  # each rank has a folder of its own here
        accelerator.prepare(nn.Linear(1, 1))
        own = os.path.join(folder, "own")
        made = accelerator.save_state(own)
        return os.path.relpath(made, folder), os.path.exists(own)


def schedule():
    accelerator = fresh(gradient_accumulation_steps=2)
    net = network()
    optimizer = optimizer_of(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, loader = accelerator.prepare(net, optimizer, data(2))
    rates = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates, scheduler.last_epoch


def printing():
    class Kept:
        text = ""

        def write(self, text):
            self.text += text

    accelerator = fresh()
    kept, before = Kept(), sys.stdout
    try:
        sys.stdout = kept
        accelerator.print("here")
        sys.stdout = None
        accelerator.print("nowhere")
    finally:
        sys.stdout = before
    return kept.text
