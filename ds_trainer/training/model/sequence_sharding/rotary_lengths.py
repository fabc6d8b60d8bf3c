"""Rotary embeddings whose frequencies depend on the longest sequence of a batch (``dynamic``, ``longrope``).

transformers takes that length from the largest position that the embedding gets. A rank that has a shard of the
sequences would take it from its shard, so ranks would rotate the tokens of one sequence by different frequencies. Here
the embedding gets the largest position of the whole batch too, after those of the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.attention import active_sharding

_POSITIONS = "position_ids"
BY_LENGTH = ("dynamic", "longrope")


def length_dependent_rotations(model: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Name, type, and number of tokens up to which the frequencies are constant, of each such embedding."""
    for name, module in model.named_modules():
        for kind, parameters in _kinds(module):
            if any(part in kind for part in BY_LENGTH):
                cached = getattr(module, "original_max_seq_len", 0)
                original = parameters.get("original_max_position_embeddings", cached) if kind == "longrope" else cached
                yield name, kind, int(original)


def _kinds(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rotary types of ``module`` (one for each type of layer, if they differ) and their parameters."""
    kinds = getattr(module, "rope_type", None)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    if isinstance(kinds, str):
        yield kinds, parameters
    elif isinstance(kinds, Mapping):
        for layer, kind in kinds.items():
            if isinstance(kind, str):
                yield kind, parameters.get(layer) or {}


def use_lengths_of_whole_batches(model: nn.Module) -> list[Any]:
    """Makes the embeddings of ``model`` see the largest position of a batch whose shard they rotate. Idempotent.

    Returns:
        The handles of the hooks, which remove them.
    """
    handles = []
    for name in {name for name, _, _ in length_dependent_rotations(model)}:
        module = model.get_submodule(name)
        if _add_last not in module._forward_pre_hooks.values():
            handles.append(module.register_forward_pre_hook(_add_last, with_kwargs=True))
            handles.append(module.register_forward_hook(_drop_last))
    return handles


def _add_last(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    sharding = active_sharding()
    if sharding is None:
        return None
    if _POSITIONS in keywords:
        return args, {**keywords, _POSITIONS: _with_last(keywords[_POSITIONS], sharding.plan.last_position)}
    hidden, positions, *others = args
    return (hidden, _with_last(positions, sharding.plan.last_position), *others), keywords


def _with_last(positions: torch.Tensor, last: int) -> torch.Tensor:
    return torch.cat([positions, torch.full_like(positions[..., :1], last)], dim=-1)


def _drop_last(module: nn.Module, args: Any, output: Any) -> Any:
    if active_sharding() is None:
        return None
    if isinstance(output, torch.Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)
