"""Tiled MLPs and norms: what ``tiled_mlp`` does to a model."""

from __future__ import annotations

from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.tiling.per_token import looks_like_mlp, remove_tiling, tile_modules
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def tiling_problems(model: nn.Module, args: TrainingArguments) -> list[str]:
    """Reasons why ``tiled_mlp`` cannot be applied to ``model``, one sentence each."""
    if not args.tiled_mlp:
        return []
    source = "tiled_mlp=True" if args.given("tiled_mlp") else "long_context=True, which turns on tiled_mlp,"
    problems = []
    if args.torch_compile:
        problems.append(
            f"{source} and torch_compile=True: a compiled model cannot run tile by tile. Set tiled_mlp=False or "
            "torch_compile=False."
        )
    if args.given("tiled_mlp") and not any(looks_like_mlp(module) for module in model.modules()):
        problems.append(
            f"tiled_mlp=True, but {type(model).__name__} has no MLP (a module that takes one tensor and has two "
            "matrices). Leave it out."
        )
    return problems


def apply_tiling(model: nn.Module, args: TrainingArguments) -> None:
    """Makes the MLPs and norms of ``model`` run on a few tokens at a time if ``args`` say so, otherwise undoes it.

    Raises:
        ConfigError: ``tiled_mlp=True`` was given, and no MLP of the model acts on each token alone.
    """
    remove_tiling(model)
    if not args.tiled_mlp:
        return
    tiling = tile_modules(model, args.device)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in tiling.left_out.items())
    if not tiling.mlps and args.given("tiled_mlp"):
        raise ConfigError(
            f"tiled_mlp=True, but no MLP of {type(model).__name__} can be tiled ({reasons or 'there is none'}). "
            "Leave it out."
        )
    if distributed.rank() == 0:
        logger.info("tiled_mlp: %d MLPs and %d norms run tile by tile", len(tiling.mlps), len(tiling.norms))
        if reasons:
            logger.warning("tiled_mlp: not tiled are %s", reasons)
