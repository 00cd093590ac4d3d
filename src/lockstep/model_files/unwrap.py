"""The user's model inside what torch puts around it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def inner_model(model: nn.Module) -> nn.Module:
    """The model without DDP, DataParallel and ``torch.compile`` around it: names of weights have no prefix there."""
    while True:
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            model = compiled
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model
