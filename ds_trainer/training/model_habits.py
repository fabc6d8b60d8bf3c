"""What a model needs to be told before training, without privileging any kind of model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_trainer.training.signatures import accepted_arguments
from ds_trainer.utils.errors import ConfigError


@contextmanager
def without_cache(model: nn.Module, unless: bool = False) -> Iterator[None]:
    """Key-value caches off inside, ``unless`` they are wanted: they are for generation and only cost memory.

    Only models with a ``config.use_cache`` (Hugging Face's) have such a switch.
    """
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if unless or not isinstance(before, bool):
        yield
        return
    config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        config.use_cache = before  # type: ignore[union-attr]


def enable_activation_checkpointing(model: nn.Module, arguments: dict[str, Any] | None = None) -> None:
    """Make ``model`` recompute activations in the backward pass.

    Args:
        model: a model with ``activation_checkpointing_enable`` (transformers since 5.23) or its older name
            ``gradient_checkpointing_enable``.
        arguments: for that method; ``use_reentrant`` is False unless it is among them.

    Raises:
        ConfigError: the model has neither.
    """
    keywords = {"use_reentrant": False, **(arguments or {})}
    renamed: Any = getattr(model, "activation_checkpointing_enable", None)
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if renamed is not None:
        # Some are the method's own (every_n_layers, offload); the rest goes to torch.utils.checkpoint.
        own = {name: keywords.pop(name) for name in accepted_arguments(renamed, set(keywords))}
        renamed(activation_checkpointing_kwargs=keywords, **own)
    elif enable is not None:
        enable(gradient_checkpointing_kwargs=keywords)
    else:
        raise ConfigError(
            f"activation_checkpointing=True, but {type(model).__name__} has no activation_checkpointing_enable(). "
            "Set it to False, or give the model that method."
        )
