"""torch.compile for prepared models, in place, so that names and types stay as they were."""

from __future__ import annotations

from torch import nn

from lockstep.config.handlers import TorchDynamoPlugin


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the model, or with regional compilation the blocks that repeat in it."""
    if not plugin.wanted:
        return
    kwargs = plugin.compile_kwargs()
    blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    if plugin.use_regional_compilation and blocks:
        for block in blocks:
            block.compile(**kwargs)
    else:
        model.compile(**kwargs)
