"""What cannot be done to a model whose weights are quantized by bitsandbytes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint.weights.adapters import saves_adapters
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.quantized import is_packed_for_inference, quantized_bits, quantized_parameters
from ds_trainer.engine.training_engine import HALF_TYPES, precision_of
from ds_trainer.training.evaluation.precision import half_of


def quantized_problems(
    model: nn.Module, args: TrainingArguments, compiled: CompiledConfig, tensor_parallel: int, trained: bool
) -> list[str]:
    """Why ``model`` cannot be used as it is asked for, a sentence each; none for a model that is not quantized.

    Args:
        model: as it was handed in.
        args: what is asked for.
        compiled: what DeepSpeed is told.
        tensor_parallel: ranks over which layers are sliced.
        trained: it is to be trained, not only evaluated.
    """
    found = quantized_parameters(model)
    if not found:
        return []
    name, first = next(iter(found.items()))
    what = f"{type(model).__name__} has {quantized_bits(first)}-bit weights of bitsandbytes ({name})"
    problems = []
    if compiled.get("zero_optimization.stage") == 3:
        problems.append(
            f"{what}, and ZeRO stage 3 shards weights: their numbers belong together in blocks, which that would cut "
            "from their scales. Set zero_stage to 2 or less, where each rank holds the quantized base; or use the "
            "model that is not quantized."
        )
    if tensor_parallel > 1:
        problems.append(
            f"{what}, and tensor_parallel_size={tensor_parallel} slices layers, which it cannot do with packed "
            "numbers. Set tensor_parallel_size=1; or use the model that is not quantized."
        )
    if trained and not (saves_adapters(model) and any(p.requires_grad for p in model.parameters())):
        problems.append(
            f"{what}, which cannot be trained, and no adapters that are. Pass peft_config=peft.LoraConfig(...) to the "
            "Trainer, or a model that peft.get_peft_model made."
        )
    if trained and any(is_packed_for_inference(parameter) for parameter in found.values()):
        problems.append(
            f"{what}, which a forward pass in evaluation mode has put into the order of an inference kernel for CPUs: "
            "they give no gradients. Load the model again, and evaluate it by the Trainer."
        )
    problems += _cast(what, found, precision_of(compiled), "")
    problems += _cast(what, found, half_of(args), "_full_eval")
    return problems + _elsewhere(what, found, str(args.device))


def _cast(what: str, found: dict[str, Any], half: str | None, where: str) -> list[str]:
    """Every parameter that looks like numbers with a fraction is cast to 16 bits; packed ones may be stored as such."""
    dtype = HALF_TYPES.get(half or "")
    stored = {p.dtype for p in found.values() if dtype is not None and p.dtype.is_floating_point} - {dtype}
    return [
        f"{what}, packed into elements of {other} (bnb_4bit_quant_storage), which {half}{where}=True would cast as if "
        "they were weights. Load the model with bnb_4bit_quant_storage=torch.uint8."
        for other in stored
    ]


def _elsewhere(what: str, found: dict[str, Any], device: str) -> list[str]:
    """Of 8-bit weights, moving a model leaves the scales where they are."""
    others = {str(p.device) for p in found.values() if quantized_bits(p) == 8} - {device}
    return [
        f"{what} on {other}, and this rank trains on {device}: 8-bit weights stay where they were loaded. Load them "
        'there (from_pretrained(..., device_map={"": args.device})), or give the Trainer their directory.'
        for other in sorted(others)
    ]
