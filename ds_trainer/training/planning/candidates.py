"""A run as the planner's ``Candidate``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.candidate import Candidate, state_bytes
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.training.loop.run_plan import batch_plan_of, evaluation_plan_of
from ds_trainer.training.model.activation_offload import offloads_activations
from ds_trainer.training.model.chunked_loss.chunked_loss import uses_tiles
from ds_trainer.training.model.preparation import chunks_loss, compiles_head
from ds_trainer.training.startup.configuration import TrainerInputs


def candidate_of(inputs: TrainerInputs, config: CompiledConfig, layout: ParallelLayout, length: int) -> Candidate:
    """The run that ``config`` describes, on sequences of ``length`` tokens."""
    args = inputs.args
    return replace(
        candidate_of_arguments(args, config, layout, length, inputs.eval_dataset is not None),
        attention=attention_of(inputs.model),
        state_bytes=state_bytes(optimizer_name(inputs) or config.optimizer_type or str(args.optim)),
        chunked_loss=chunks_loss(inputs.model, args, config, _tokens(args, layout, length)),
    )


def candidate_of_arguments(
    args: TrainingArguments, config: CompiledConfig, layout: ParallelLayout, length: int, evaluates: bool, rows: int = 0
) -> Candidate:
    """The run that ``config`` describes, as far as that is known without a model.

    Args:
        args: what ``config`` was compiled from.
        config: the compiled configuration.
        layout: the layout of the job.
        length: tokens of a sequence.
        evaluates: whether there is data for an evaluation.
        rows: rows of the vocabulary at the LM head, which decide whether the loss is chunked; 0: it is not.
    """
    batch = batch_plan_of(args, layout)
    return Candidate(
        layout.world_size,
        length,
        stage=config.zero_stage,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        tp=layout.tp,
        cp=layout.cp,
        sp=layout.sp,
        ep=layout.ep,
        offload_optimizer=config.offload("optimizer") is not None,
        offload_param=config.offload("param") is not None,
        optimizer_on_nvme=config.offload("optimizer") == "nvme",
        param_on_nvme=config.offload("param") == "nvme",
        hpz=config.hpz_partition_size,
        every_n_layers=every_n_layers(args),
        checkpointing=bool(args.activation_checkpointing) or config.activation_checkpointing is not None,
        precision=config.precision.dtype,
        state_bytes=state_bytes(config.optimizer_type or str(args.optim)),
        eval_micro_batch=evaluation_plan_of(args, layout).micro_batch if evaluates else None,
        float32_sums=config.accumulation_dtype == "fp32",
        tiled_mlp=bool(args.tiled_mlp),
        offload_activations=offloads_activations(args),
        chunked_loss=bool(rows)
        and not compiles_head(args, config)
        and uses_tiles(args.loss_chunk_tokens, _tokens(args, layout, length), rows),
    )


def _tokens(args: TrainingArguments, layout: ParallelLayout, length: int) -> int:
    """Tokens of a rank in a micro-batch."""
    return batch_plan_of(args, layout).micro_batch * length // (layout.cp * layout.sp)


def unknown_activations(
    inputs: TrainerInputs, config: CompiledConfig, model: PlannedModel, length: SequenceLength
) -> str:
    """Why the activations of a run are not known; empty if they are those of the planner's formulas."""
    args, stack, block = inputs.args, model.stack, config.activation_checkpointing
    if not (stack.head_dim or stack.intermediate_size):
        return f"the layers of {model.name} are not known"
    if not length.of_data and stack.positions is None:
        return "the length of the samples is not known"
    if args.use_liger_kernel:
        return "Liger kernels do not keep all of them"
    if args.torch_compile or config.uses_deepspeed_compiler:
        return "a compiler decides which are kept"
    if config.precision.autocast is not None:
        return "with autocast they have several dtypes"
    moved = block is not None and (block.cpu_checkpointing or block.partition_activations)
    if moved or (as_mapping(args.activation_checkpointing_kwargs) or {}).get("offload"):
        return "the arguments of activation checkpointing move them"
    return ""


def every_n_layers(args: TrainingArguments) -> int:
    """One in how many layers is checkpointed, if any are."""
    return int((as_mapping(args.activation_checkpointing_kwargs) or {}).get("every_n_layers") or 1)


def optimizer_name(inputs: TrainerInputs) -> str | None:
    """Name of the class of the user's optimizer; None if the arguments describe it."""
    if inputs.optimizer is not None:
        return type(inputs.optimizer).__name__
    return None if inputs.optimizer_class is None else inputs.optimizer_class[0].__name__


def attention_of(model: Any) -> str:
    """The planner's name of the attention of a model: ``eager`` or ``sdpa``."""
    return "eager" if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager" else "sdpa"


# The length of the sequences of a run, from what is known before the first batch.


_OF_ARGUMENTS = ("max_length", "max_seq_length", "model_max_length")  # of TRL and of common scripts
_SAMPLES = 64
_LONGEST = 8192  # models are made for more positions than they are usually trained with


@dataclass(frozen=True)
class SequenceLength:
    """Tokens of a sequence.

    Attributes:
        tokens: their number.
        source: where it is from.
        of_data: whether samples have this length; otherwise it is only a limit.
    """

    tokens: int
    source: str
    of_data: bool


def sequence_length(args: Any, dataset: Any, main_input: str, model_length: int | None) -> SequenceLength:
    """The length: of the samples, else the limit of the arguments, else that of the model.

    Samples are read only if that has no effect: those of a list or of a ``datasets.Dataset``.

    Args:
        args: the training arguments; those of libraries may have a ``max_length``.
        dataset: the training data.
        main_input: key of the tokens in a sample.
        model_length: positions for which the model was made; None if unknown.
    """
    if packs(args) and args.max_length is not None:
        return SequenceLength(int(args.max_length), "max_length, the length of packed rows", True)
    fixed = getattr(dataset, "sequence_length", None)
    if isinstance(fixed, int):
        return SequenceLength(fixed, "the training data", True)
    longest = _longest_sample(dataset, main_input)
    if longest:
        return SequenceLength(longest, f"the longest of the first {_SAMPLES} samples", True)
    for name in _OF_ARGUMENTS:
        value = getattr(args, name, None)
        if isinstance(value, int) and value > 0:
            return SequenceLength(value, name, False)
    tokens = min(model_length or _LONGEST, _LONGEST)
    return SequenceLength(tokens, "the positions of the model" if tokens == model_length else "a default", False)


def main_input_name(model: Any) -> str:
    """Key of the tokens in the samples of a model."""
    return str(getattr(model, "main_input_name", "input_ids"))


def _longest_sample(dataset: Any, main_input: str) -> int:
    is_table = type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "__len__")
    if is_table and dataset.format["type"] != "custom" and main_input in dataset.column_names:
        return max((_length(row) for row in dataset[:_SAMPLES][main_input]), default=0)
    if isinstance(dataset, list | tuple):
        rows = (sample.get(main_input) for sample in dataset[:_SAMPLES] if isinstance(sample, dict))
        return max((_length(row) for row in rows), default=0)
    return 0


def _length(tokens: Any) -> int:
    shape = getattr(tokens, "shape", None)
    if shape is not None:
        return int(shape[-1]) if len(shape) else 0
    return len(tokens) if isinstance(tokens, list | tuple) else 0
