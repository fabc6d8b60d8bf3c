"""A model on meta gets all of its weights on one device: where nothing is sharded and no engine is built."""

from __future__ import annotations

import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import attached_weights
from ds_trainer.engine.state.pieces import persistent_buffers
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError


def load_whole(model: nn.Module, device: torch.device) -> None:
    """Fill the parameters of ``model`` that are on meta, one at a time, on ``device``. The objects stay the same.

    Raises:
        ConfigError: nothing says what the weights are.
    """
    source = attached_weights(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        if source is None or not source.has(name):
            raise ConfigError(
                f"{type(model).__name__} is on the meta device, and nothing says what the weights of {name} are. Make "
                "the model by ds_trainer.from_pretrained(...)."
            )
        values = torch.empty(parameter.numel(), dtype=parameter.dtype, device=device)
        source.fill(name, Place.whole(tuple(parameter.shape)), values)
        loaded = nn.Parameter(values.view(parameter.shape), parameter.requires_grad)
        loaded.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, loaded)
    if source is not None:
        for name, buffer in persistent_buffers(model):
            if source.has(name):
                values = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                source.fill(name, Place.whole(tuple(buffer.shape)), values)
                buffer.copy_(values.view(buffer.shape))
