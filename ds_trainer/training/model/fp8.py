"""Training in fp8: the products of linear layers, forward and backward, on 8-bit operands (``fp8``).

Weights stay in bfloat16, and so does everything else: only the operands of the matrix products are cast. The recipe is
torchao's ``rowwise``: a scale for each token and each row of the weight, so a token's output depends on that token
alone, as in bfloat16 (packed samples stay apart). Left out are the head, whose rounding changes the loss most,
adapters, and layers with a size that is no multiple of 16, which the kernels of the GPU do not take.

Sources: torchao, ``torchao.float8.convert_to_float8_training``; Micikevicius et al. 2022, "FP8 Formats for Deep
Learning".
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.training.model.chunked_loss.linear_head import output_embedding
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

RECIPE = "rowwise"
BAND = 0.02
"""Largest relative difference of the loss of the first batch from that of bfloat16."""
_MULTIPLE, _CAPABILITY = 16, (8, 9)


def fp8_problems(model: nn.Module, args: TrainingArguments, compiled: CompiledConfig, tp: int) -> list[str]:
    """Reasons why ``fp8`` cannot be applied to ``model``, one sentence each."""
    problems = []
    device = _device_problem(args.device_type)
    if device is not None:
        problems.append(f"fp8=True needs an NVIDIA GPU with 8-bit products (Ada, Hopper or later): {device}.")
    if importlib.util.find_spec("torchao") is None:
        problems.append("fp8=True needs a package that is not installed: run pip install torchao.")
    precision = compiled.precision.compute
    if precision != "bf16":
        problems.append(
            f"fp8=True and training in {precision}: 8-bit products replace those of bfloat16. Set bf16=True."
        )
    if tp > 1:
        problems.append(
            f"fp8=True and tensor_parallel_size={tp}: tensor parallelism replaces the linear layers by its own. Change "
            "one of the two settings."
        )
    if not _chosen(model):
        problems.append(
            f"fp8=True, but no linear layer of {type(model).__name__} besides its head has sizes that are multiples of "
            f"{_MULTIPLE}. Set fp8=False."
        )
    return problems


def _device_problem(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"this run is on the {device_type}"
    if not torch.cuda.is_available():
        return None  # another machine runs it
    capability = torch.cuda.get_device_capability()
    return (
        None
        if capability >= _CAPABILITY
        else f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
    )


def _chosen(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are converted, by name."""
    head = output_embedding(model)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and "lora_" not in name
        and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
    }


def apply_fp8(model: nn.Module, args: TrainingArguments) -> None:
    """Replace the linear layers of ``model`` by torchao's; parameters and their names stay. Does nothing twice."""
    chosen = _chosen(model)
    if not args.fp8 or not chosen:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    modules = set(map(id, chosen.values()))
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, _: id(module) in modules,
        config=_config(Float8LinearConfig),
    )
    if distributed.rank() == 0:
        logger.info("fp8: %d of %d linear layers (%s scales)", len(chosen), linear, RECIPE)
        if not args.torch_compile:
            logger.warning("fp8 without torch_compile: the casts are kernels of their own, and cost what fp8 saves.")


def _config(kind: Any) -> Any:
    return kind.from_recipe_name(RECIPE)


@contextmanager
def in_bfloat16(model: nn.Module) -> Iterator[int]:
    """Inside, the converted layers of ``model`` compute in bfloat16. Yields how many there are."""
    converted = [module for module in model.modules() if type(module).__name__ == "Float8Linear"]
    for module in converted:
        module.forward = MethodType(nn.Linear.forward, module)
    try:
        yield len(converted)
    finally:
        for module in converted:
            del module.forward


def check_band(in_fp8: float, in_bf16: float) -> None:
    """Compare two losses of the first batch, this rank's. Collective.

    Raises:
        ConfigError: on all ranks, if they differ by more than :data:`BAND` on one.
    """
    difference = abs(in_fp8 - in_bf16) / max(abs(in_bf16), 1e-6)
    if math.isnan(difference):  # one is NaN, or that in bfloat16 is infinite
        difference = 0.0 if math.isfinite(in_fp8) == math.isfinite(in_bf16) else math.inf
    worst = float(distributed.largest(torch.tensor(difference)))
    if worst > BAND:
        raise ConfigError(
            f"fp8=True: the loss of the first batch differs from that in bfloat16 by a relative {worst:.2g} (at most "
            f"{BAND} is expected; on this rank {in_fp8:.6g} and {in_bf16:.6g}). Set fp8=False."
        )
