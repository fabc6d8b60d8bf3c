"""Applies the arguments to the model: checks it, adapts it before the engine, and adds hooks during training."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.enums import DebugOption
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.columns import base_model
from ds_trainer.engine.quantized_weights import quantized_parameters
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.cache import without_cache
from ds_trainer.training.model.gradient_checkpointing import input_embeddings
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss

# What an argument turns on is imported where it is turned on: most runs use a few of these features.


def check_model(
    model: nn.Module,
    args: TrainingArguments,
    compiled: CompiledConfig,
    layout: ParallelLayout,
    *,
    overrides_loss: bool = False,
    loss_function: bool = False,
    sharding_problems: Sequence[str] = (),
    trained: bool = True,
) -> None:
    """Checks before training whether the arguments can be applied to ``model``.

    Args:
        model: the model that the user passed.
        args: the arguments.
        compiled: the compiled DeepSpeed configuration.
        layout: the parallel layout.
        overrides_loss: a subclass computes the loss (``compute_loss``).
        loss_function: a ``compute_loss_func`` computes it.
        sharding_problems: reasons why its sequences cannot be sharded, if the layout requires it.
        trained: whether the model will be trained, not only evaluated.

    Raises:
        ConfigError: with one sentence per problem.
    """
    problems = [] if overrides_loss or loss_function else loss_head_problems(model)
    if layout.tp > 1:
        from ds_trainer.engine.tensor_parallel.partition_check import partition_problems

        problems += partition_problems(model, compiled, layout.tp)
    if layout.ep > 1:
        from ds_trainer.training.model.expert_division import expert_problems

        problems += expert_problems(model, layout.ep, layout.seq_data_parallel_size, compiled.optimizer_type)
    if quantized_parameters(model):
        from ds_trainer.training.model.quantized_model import quantized_problems

        problems += quantized_problems(model, args, compiled, layout.tp, trained)
    problems += sharding_problems
    if args.label_smoothing_factor:
        from ds_trainer.training.model.label_smoothing import smoothing_problems

        problems += smoothing_problems(args.label_smoothing_factor, loss_function)
    if args.activation_checkpointing:
        from ds_trainer.training.model.gradient_checkpointing import gradient_checkpointing_problems

        kwargs = as_mapping(args.activation_checkpointing_kwargs)
        problems += gradient_checkpointing_problems(
            model, kwargs, compiled.activation_checkpointing is not None, args.device_type
        )
    if args.activation_offload or args.long_context:
        from ds_trainer.training.model.activation_offload import offload_problems

        problems += offload_problems(args, compiled)
    if args.tiled_mlp:
        problems += tiling_problems(model, args)
    if args.liger_kernel_config and not args.use_liger_kernel:
        problems.append(f"liger_kernel_config={args.liger_kernel_config} needs use_liger_kernel=True.")
    if args.use_liger_kernel:
        from ds_trainer.training.model.liger import liger_problems

        problems += liger_problems(model, args.liger_kernel_config, args.device_type)
        if layout.tp > 1:
            problems.append(
                f"use_liger_kernel=True and tensor_parallel_size={layout.tp}: Liger's loss multiplies by the head's "
                "weight directly, of which a rank holds only a slice. Change one of the two settings."
            )
    if args.neftune_noise_alpha is not None:
        problems += noise_problems(model)
    if _watches(args):
        problems += overflow_problems()
    if args.torch_compile:
        from ds_trainer.training.model.compilation import compile_problems

        problems += compile_problems(args)
    if args.fp8:
        from ds_trainer.training.model.fp8 import fp8_problems

        problems += fp8_problems(model, args, compiled, layout.tp)
    if args.loss_chunk_tokens or args.z_loss_factor:
        from ds_trainer.training.model.chunked_loss.chunked_loss import chunked_loss_problems

        problems += chunked_loss_problems(
            model, args.loss_chunk_tokens, args.z_loss_factor, compiles_head(args, compiled)
        )
    if problems:
        raise ConfigError(problems)


def chunked_loss_of(args: TrainingArguments, compiled: CompiledConfig) -> ChunkedLoss:
    """What computes the loss without whole logits, as the arguments say."""
    from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss

    if compiles_head(args, compiled):
        return ChunkedLoss(0)
    return ChunkedLoss(args.loss_chunk_tokens, args.z_loss_factor)


def chunks_loss(model: nn.Module, args: TrainingArguments, compiled: CompiledConfig, tokens: int) -> bool:
    """Whether the loss of a micro-batch of ``tokens`` on a rank will be computed without its whole logits."""
    from ds_trainer.training.model.chunked_loss.chunked_loss import uses_tiles
    from ds_trainer.training.model.chunked_loss.linear_head import head_problem, output_embedding

    head = output_embedding(model)
    if compiles_head(args, compiled) or head_problem(head) is not None:
        return False
    classes = getattr(head, "out_features", None)
    return classes is not None and uses_tiles(args.loss_chunk_tokens, tokens, classes)


def adapt_model(model: nn.Module, args: TrainingArguments, compiled: CompiledConfig, processing_class: Any) -> None:
    """Applies kernels, gradient checkpointing, fp8, tiling and special tokens to ``model``, before the engine."""
    if args.use_liger_kernel:
        from ds_trainer.training.model.liger import apply_liger

        apply_liger(model, args.liger_kernel_config)
    if args.activation_checkpointing:
        from ds_trainer.engine.activation_checkpointing import checkpoint_with_deepspeed
        from ds_trainer.training.model.activation_offload import offloads_activations
        from ds_trainer.training.model.gradient_checkpointing import enable_gradient_checkpointing

        by_deepspeed = compiled.activation_checkpointing is not None
        kwargs = as_mapping(args.activation_checkpointing_kwargs)
        enable_gradient_checkpointing(model, kwargs, by_deepspeed, offloads_activations(args))
        if by_deepspeed:
            checkpoint_with_deepspeed(model, compiled)
    if args.fp8:
        from ds_trainer.training.model.fp8 import apply_fp8

        apply_fp8(model, args)
    if args.tiled_mlp or any("forward" in vars(module) for module in model.modules()):  # of an earlier Trainer
        apply_tiling(model, args)
    align_tokens(model, processing_class)


@contextmanager
def prepared_for_training(model: nn.Module, args: TrainingArguments, layout: ParallelLayout) -> Iterator[None]:
    """Inside, ``model`` is set up for training: no cache, NEFTune noise, overflow detection. Undone on exit."""
    with ExitStack() as stack:
        stack.enter_context(without_cache(model, unless=args.use_cache))
        if args.neftune_noise_alpha is not None:
            stack.enter_context(noisy_embeddings(model, args.neftune_noise_alpha, layout.cp * layout.sp))
        if _watches(args):
            stack.enter_context(detect_overflow(model))
        yield


def compiles(args: TrainingArguments, compiled: CompiledConfig) -> bool:
    """Whether torch or DeepSpeed compiles the model, whole or its blocks."""
    return bool(args.torch_compile or compiled.uses_deepspeed_compiler)


def compiles_head(args: TrainingArguments, compiled: CompiledConfig) -> bool:
    """Whether torch or DeepSpeed compiles the head of the model, which then computes its logits whole."""
    return compiled.uses_deepspeed_compiler or (bool(args.torch_compile) and not args.torch_compile_regional)


def _watches(args: TrainingArguments) -> bool:
    return DebugOption.UNDERFLOW_OVERFLOW in (args.debug or ())


def loss_head_problems(model: nn.Module) -> list[str]:
    """Reasons why ``model`` cannot compute a loss; recognizes Hugging Face's base models without a head by name."""
    model = base_model(model)
    if "transformers" not in sys.modules:
        return []
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    bodies: set[str] = set()
    for names in MODEL_MAPPING_NAMES.values():
        bodies.update([names] if isinstance(names, str) else names)
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if name in bodies and not any("label" in p or p == "return_loss" for p in parameters):
        return [
            f"{name} returns hidden states: it takes no labels and returns no loss. Use a model with a head for the "
            "task (AutoModelForCausalLM, AutoModelForSequenceClassification ...), pass a compute_loss_func, or "
            "override compute_loss."
        ]
    return []


def align_tokens(model: nn.Module, processing_class: Any) -> None:
    """Sets the special token ids in the configurations of ``model`` to those of its tokenizer, and logs the change.

    Only for Hugging Face models and tokenizers, with transformers' rule: ids that the tokenizer does not define are
    unchanged, and several end-of-text ids are all kept.
    """
    if "transformers" not in sys.modules or processing_class is None or not hasattr(model, "config"):
        return
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.trainer_utils import align_special_tokens

    if isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        align_special_tokens(model, processing_class)


def overflow_problems() -> list[str]:
    """Reasons why overflows cannot be detected, one sentence each."""
    if importlib.util.find_spec("transformers") is not None:
        return []
    return ["debug=underflow_overflow needs transformers, which is not installed. Run pip install transformers."]


@contextmanager
def detect_overflow(model: nn.Module) -> Iterator[None]:
    """Inside, checks weights, inputs and outputs of every module of ``model``. Slow: it synchronizes at each module.

    At the first inf or nan, transformers' ``DebugUnderflowOverflow`` prints the last modules with their smallest and
    largest absolute values and raises ValueError.
    """
    from transformers.debug_utils import DebugUnderflowOverflow

    class Watch(DebugUnderflowOverflow):
        def register_forward_hook(self) -> None:
            # Before ZeRO-3's hooks, which release the weights; with handles, so that they can be removed.
            self.handles = [m.register_forward_hook(self.forward_hook, prepend=True) for m in self.model.modules()]

    watch = Watch(model)
    try:
        yield
    finally:
        for handle in watch.handles:
            handle.remove()


# NEFTune, against overfitting to small instruction datasets. Source: Jain et al. 2023, arXiv:2310.05914: uniform noise
# between -1 and 1, times alpha / sqrt(L d) for sequences of L positions and vectors of length d.


def noise_problems(model: nn.Module) -> list[str]:
    """Reasons why noise cannot be added to ``model``'s embeddings, one sentence each."""
    if input_embeddings(model) is not None:
        return []
    return [
        f"neftune_noise_alpha: the input embeddings of {type(model).__name__} are unknown. Add a method "
        "get_input_embeddings() that returns the module, or set neftune_noise_alpha=None."
    ]


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float, sequence_shards: int = 1) -> Iterator[None]:
    """Inside, adds noise to the embeddings of ``model`` in training mode.

    Args:
        model: a model with input embeddings.
        alpha: strength of the noise.
        sequence_shards: number of ranks over which each sequence is sharded, so that ``L`` is its full length.

    The noise uses the device's random state, which checkpoints contain, so a resumed run draws the same noise.
    """
    embeddings = input_embeddings(model)
    assert embeddings is not None  # checked when the Trainer was made
    # Before DeepSpeed's hooks: the noise is added to the module's own output.
    handle = embeddings.register_forward_hook(partial(_add_noise, alpha, sequence_shards), prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _add_noise(alpha: float, sequence_shards: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
    if not module.training:
        return None
    bound = alpha / math.sqrt(output.shape[1] * sequence_shards * output.shape[2])
    return output + torch.empty_like(output).uniform_(-bound, bound)


# Tiled MLPs and norms: what ``tiled_mlp`` does to a model.


logger = get_logger(__name__)


def tiling_problems(model: nn.Module, args: TrainingArguments) -> list[str]:
    """Reasons why ``tiled_mlp`` cannot be applied to ``model``, one sentence each."""
    from ds_trainer.engine.tiling.per_token import looks_like_mlp

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
    from ds_trainer.engine.tiling.per_token import remove_tiling, tile_modules

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
