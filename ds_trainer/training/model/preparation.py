"""The three moments at which arguments reach the model: checked, changed before the engine, hooked while training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.enums import DebugOption
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.activation_checkpointing import SECTION, checkpoint_with_deepspeed
from ds_trainer.engine.tensor.plan import cut_problems
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.label_smoothing import smoothing_problems
from ds_trainer.training.model.cache import without_cache
from ds_trainer.training.model.compilation import compile_problems
from ds_trainer.training.model.kinds import head_problems
from ds_trainer.training.model.liger import apply_liger, liger_problems
from ds_trainer.training.model.neftune import noise_problems, noisy_embeddings
from ds_trainer.training.model.overflow import overflow_problems, watched_for_overflow
from ds_trainer.training.model.quantized import quantized_problems
from ds_trainer.training.model.recomputation import enable_recomputation, recomputation_problems
from ds_trainer.training.model.special_tokens import align_tokens
from ds_trainer.utils.errors import ConfigError


def check_model(
    model: nn.Module,
    args: TrainingArguments,
    compiled: CompiledConfig,
    layout: ParallelLayout,
    *,
    own_loss: bool = False,
    loss_function: bool = False,
    uncut: Sequence[str] = (),
    trained: bool = True,
) -> None:
    """Refuse what cannot be done to ``model``, before anything starts.

    Args:
        model: the model as it was handed in.
        args: what is asked for.
        compiled: what DeepSpeed is told.
        layout: where every rank stands.
        own_loss: a subclass computes the loss (``compute_loss``).
        loss_function: a ``compute_loss_func`` does.
        uncut: why its sequences cannot be cut, where they have to be.
        trained: it is to be trained, not only evaluated.

    Raises:
        ConfigError: with a sentence for each problem.
    """
    problems = [] if own_loss or loss_function else head_problems(model)
    problems += cut_problems(model, compiled, layout.tp)
    problems += quantized_problems(model, args, compiled, layout.tp, trained)
    problems += uncut
    if args.label_smoothing_factor:
        problems += smoothing_problems(args.label_smoothing_factor, loss_function)
    if args.activation_checkpointing:
        kwargs = as_mapping(args.activation_checkpointing_kwargs)
        problems += recomputation_problems(model, kwargs, SECTION in compiled, args.device_type)
    if args.liger_kernel_config and not args.use_liger_kernel:
        problems.append(f"liger_kernel_config={args.liger_kernel_config} needs use_liger_kernel=True.")
    if args.use_liger_kernel:
        problems += liger_problems(model, args.liger_kernel_config, args.device_type)
        if layout.tp > 1:
            problems.append(
                f"use_liger_kernel=True and tensor_parallel_size={layout.tp}: Liger's loss multiplies with the head's "
                "weight itself, of which a rank has a slice. Set one of them back."
            )
    if args.neftune_noise_alpha is not None:
        problems += noise_problems(model)
    if _watches(args):
        problems += overflow_problems()
    if args.torch_compile:
        problems += compile_problems(args)
    if problems:
        raise ConfigError(problems)


def adapt_model(model: nn.Module, args: TrainingArguments, compiled: CompiledConfig, processing_class: Any) -> None:
    """Change ``model`` as ``args`` say: kernels, recomputation, special tokens. Before the engine wraps it."""
    if args.use_liger_kernel:
        apply_liger(model, args.liger_kernel_config)
    if args.activation_checkpointing:
        by_deepspeed = SECTION in compiled
        enable_recomputation(model, as_mapping(args.activation_checkpointing_kwargs), by_deepspeed)
        if by_deepspeed:
            checkpoint_with_deepspeed(model, compiled)
    align_tokens(model, processing_class)


@contextmanager
def prepared_for_training(model: nn.Module, args: TrainingArguments, layout: ParallelLayout) -> Iterator[None]:
    """What holds while ``model`` is trained and ends with it, also when training fails: cache, noise, watch."""
    with ExitStack() as stack:
        stack.enter_context(without_cache(model, unless=args.use_cache))
        if args.neftune_noise_alpha is not None:
            stack.enter_context(noisy_embeddings(model, args.neftune_noise_alpha, layout.cp * layout.sp))
        if _watches(args):
            stack.enter_context(watched_for_overflow(model))
        yield


def _watches(args: TrainingArguments) -> bool:
    return DebugOption.UNDERFLOW_OVERFLOW in (args.debug or ())
