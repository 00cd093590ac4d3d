"""Local SGD: the weights after each step, and what is averaged."""

import torch
from accelerate.local_sgd import LocalSGD
from notes import fresh


def trained(steps, *, enabled=True, accumulation=1, batches=6):
    accelerator = fresh(gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    layer[0].bias.requires_grad_(False)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.5))
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=steps, enabled=enabled) as local_sgd:
        for batch in range(batches):
            with accelerator.accumulate(model):
                inputs = torch.full((2, 2), float(accelerator.process_index + batch))
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            seen.append([parameter.detach().clone() for parameter in model.parameters()])
    seen.append([parameter.detach().clone() for parameter in model.parameters()])
    accelerator.backward(model(torch.full((2, 2), float(accelerator.process_index))).mean())  # averaged again
    gradients = [parameter.grad for parameter in model.parameters()]
    return {"weights": seen, "gradients": gradients, "steps": local_sgd.num_steps, "enabled": local_sgd.enabled}


def scenarios():
    return {
        "local sgd/each step": lambda: trained(1),
        "local sgd/every third": lambda: trained(3),
        "local sgd/a rest": lambda: trained(4),
        "local sgd/off": lambda: trained(2, enabled=False),
        "local sgd/accumulating": lambda: trained(2, accumulation=2),
    }
