"""In which types gradients are summed: over ranks (``communication_data_type``) and over micro-batches
(``data_types.grad_accum_dtype``).

DeepSpeed sums in the type of the weights unless it is told otherwise. A ring adds one rank after the other, and
accumulation one micro-batch after the other: a term below half a unit in the last place of the partial sum is lost.
bf16 has 8 significant bits, fp16 11. ``benchmarks/gradient_sums.py`` simulates it; up to the limits below the error
stays near 1 %.
"""

from __future__ import annotations

from ds_trainer.arguments.enums import GradientDtype
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.draft import Draft
from ds_trainer.parallel.layout import ParallelLayout

TERMS = {"bf16": 64, "fp16": 512}
"""From so many terms on, a sum in this type is off by 1 % and more: it is made in float32."""

_ZERO = "zero_optimization"
_ACCUMULATE = "data_types.grad_accum_dtype"
_COMMUNICATE = "communication_data_type"
_SAFE_MODULES = "torch_autocast.lower_precision_safe_modules"


def write_gradient_dtypes(draft: Draft, args: TrainingArguments, layout: ParallelLayout) -> None:
    """Write both types where the arguments decide them, or where the sum has too many terms for 16 bits.

    Args:
        draft: where they go; precision, ZeRO, offload and optimizer are already in it.
        args: the arguments.
        layout: its gradient ranks are summed over.
    """
    model = next((name for name in TERMS if draft.config.get(f"{name}.enabled")), "fp32")
    ranks, micro_batches = layout.gradient_ranks, args.gradient_accumulation_steps
    _communication(draft, args, model, ranks)
    if args.grad_accum_dtype != GradientDtype.AUTO:
        draft.argument(_ACCUMULATE, str(args.grad_accum_dtype), "grad_accum_dtype")
    elif micro_batches >= TERMS.get(model, micro_batches + 1) and _can_accumulate_in_float32(draft, model, layout):
        draft.derive(_ACCUMULATE, "fp32", f"{model} with {micro_batches} micro-batches: their sum would lose digits")


def _communication(draft: Draft, args: TrainingArguments, model: str, ranks: int) -> None:
    asked = args.communication_data_type
    why = f"{model} with {ranks} gradient ranks: their sum would lose digits"
    if asked != GradientDtype.AUTO:
        draft.argument(_COMMUNICATE, str(asked), "communication_data_type")
    elif ranks >= TERMS.get(model, ranks + 1) and draft.asked(f"{_ZERO}.zero_quantized_gradients") is not True:
        draft.derive(_COMMUNICATE, "fp32", why)
    if not draft.config.get("torch_autocast.enabled", draft.asked("torch_autocast.enabled")):
        return
    # With autocast, DeepSpeed's ZeRO sends gradients of these modules in bf16, and looks at nothing else.
    if asked == GradientDtype.FP32:
        draft.derive(_SAFE_MODULES, [], f"communication_data_type=fp32 ({args.where('communication_data_type')})")
    elif asked == GradientDtype.AUTO and ranks >= TERMS["bf16"]:
        draft.derive(_SAFE_MODULES, [], f"autocast with {ranks} gradient ranks: a sum in bf16 would lose digits")


def _can_accumulate_in_float32(draft: Draft, model: str, layout: ParallelLayout) -> bool:
    """Whether DeepSpeed 0.19.8 has float32 accumulation for what is asked for otherwise."""
    if any(draft.asked(f"{model}.{model}_{what}") for what in ("master_weights_and_grads", "optimizer_states")):
        return False  # low-precision gradients are asked for
    if draft.mentions(f"{_ZERO}.zenflow") or draft.asked(f"{_ZERO}.offload_optimizer.super_offload"):
        return False  # they accumulate in ways of their own
    optimizer = str(draft.config.get("optimizer.type", "")).lower()
    if optimizer == "lamb":
        return False  # its kernel takes the gradients themselves, in the type of the weights
    if model != "bf16" or draft.config.get(f"{_ZERO}.stage") != 1:
        return True
    by_muon = optimizer == "muon" and layout.tp > 1
    return not by_muon and draft.asked(f"{_ZERO}.compute_grad_norm") is not False
