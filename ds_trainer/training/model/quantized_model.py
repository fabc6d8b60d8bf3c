"""Checks for models whose weights are quantized by bitsandbytes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.weights.adapter_files import saves_adapters
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.quantized_weights import is_packed_for_inference, quantized_bits, quantized_parameters
from ds_trainer.engine.weights import HALF_TYPES
from ds_trainer.training.model.half_precision import half_precision_of


def quantized_problems(
    model: nn.Module, args: TrainingArguments, compiled: CompiledConfig, tensor_parallel: int, trained: bool
) -> list[str]:
    """Reasons why a quantized ``model`` cannot be used with these settings, one sentence each.

    Args:
        model: the model that the user passed.
        args: the arguments.
        compiled: the compiled DeepSpeed configuration.
        tensor_parallel: tensor-parallel size.
        trained: whether the model will be trained, not only evaluated.
    """
    quantized = quantized_parameters(model)
    if not quantized:
        return []
    name, first = next(iter(quantized.items()))
    what = f"{type(model).__name__} has {quantized_bits(first)}-bit weights of bitsandbytes ({name})"
    problems = []
    if compiled.zero_stage == 3:
        problems.append(
            f"{what}, and ZeRO stage 3 shards weights, which would separate quantized blocks from their scales. Set "
            "zero_stage to 2 or less, where each rank holds the quantized base model; or use a model that is not "
            "quantized."
        )
    if tensor_parallel > 1:
        problems.append(
            f"{what}, and tensor_parallel_size={tensor_parallel} partitions layers, which is impossible with packed "
            "numbers. Set tensor_parallel_size=1; or use a model that is not quantized."
        )
    if trained and not (saves_adapters(model) and any(p.requires_grad for p in model.parameters())):
        problems.append(
            f"{what}, which cannot be trained, and no trainable adapters. Pass peft_config=peft.LoraConfig(...) to the "
            "Trainer, or a model from peft.get_peft_model."
        )
    if trained and any(is_packed_for_inference(parameter) for parameter in quantized.values()):
        problems.append(
            f"{what}, which a forward pass in evaluation mode has repacked for a CPU inference kernel without "
            "gradients. Load the model again, and evaluate it with the Trainer."
        )
    problems += _cast(what, quantized, compiled.precision.dtype, "")
    problems += _cast(what, quantized, half_precision_of(args), "_full_eval")
    return problems + _elsewhere(what, quantized, str(args.device))


def _cast(what: str, parameters: dict[str, Any], half: str | None, where: str) -> list[str]:
    """DeepSpeed casts all floating-point parameters to 16 bits, including packed weights stored in such a dtype."""
    dtype = HALF_TYPES.get(half or "")
    stored = {p.dtype for p in parameters.values() if dtype is not None and p.dtype.is_floating_point} - {dtype}
    return [
        f"{what}, packed into elements of {other} (bnb_4bit_quant_storage), which {half}{where}=True would cast as if "
        "they were weights. Load the model with bnb_4bit_quant_storage=torch.uint8."
        for other in stored
    ]


def _elsewhere(what: str, parameters: dict[str, Any], device: str) -> list[str]:
    """Moving a model does not move the scales of its 8-bit weights."""
    others = {str(p.device) for p in parameters.values() if quantized_bits(p) == 8} - {device}
    return [
        f"{what} on {other}, but this rank trains on {device}, and 8-bit weights cannot be moved. Load them on that "
        'device (from_pretrained(..., device_map={"": args.device})), or pass their directory to the Trainer.'
        for other in sorted(others)
    ]
