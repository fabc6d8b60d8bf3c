"""Whether a model keeps packed samples apart, judged by class and configuration, and what its batches need for it.

What cannot be seen from outside is compared at the start (:mod:`~ds_trainer.training.model.packing.equality`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.arguments.redefined import is_redefined, packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.columns import accepts_any_keyword, base_model, forward_names
from ds_trainer.data.packing.batch import PackedFormat, PairMask
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.training.model.sequence_sharding.rotary_lengths import length_dependent_rotations
from ds_trainer.training.model.sequence_sharding.setup import padding_token
from ds_trainer.training.model.sequence_sharding.support import (
    OF_WHOLE_SEQUENCES,
    is_bidirectional,
    library_configs,
    library_models,
    module_of,
    takes_positions,
)

_BIDIRECTIONAL_WINDOW = "create_bidirectional_sliding_window_mask"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LOADERS = ("get_train_dataloader", "_get_train_sampler")


def row_length(args: TrainingArguments, model: nn.Module) -> int | None:
    """Tokens of a packed row: ``max_length``, else the positions of the model; None if both are unknown."""
    if not is_redefined(args, "max_length") and args.max_length is not None:
        return int(args.max_length)
    for config in _configs(model):
        for name in ("max_position_embeddings", "n_positions"):
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value - _first_position(base_model(model))
    return None


def strategy_of(args: TrainingArguments) -> PackingStrategy:
    """The packing strategy of ``args``."""
    return PackingStrategy(str(args.packing_strategy))


def packing_problems(
    model: nn.Module,
    args: TrainingArguments,
    layout: ParallelLayout,
    overridden: Collection[str] = (),
    has_metrics: bool = False,
    collator: Any = None,
) -> list[str]:
    """Reasons why the samples of ``model`` cannot be packed, one sentence each.

    Args:
        model: the model that the user passed.
        args: the arguments.
        layout: the parallel layout.
        overridden: names of the methods that a subclass overrides.
        has_metrics: whether there is a ``compute_metrics``.
        collator: the ``data_collator``.
    """
    if not packs(args):
        return []
    name = type(base_model(model)).__name__
    problems = [
        f"{name}: packing=True, but {why} {'Or set' if 'Load' in why else 'Set'} packing=False."
        for why in _reasons(model, layout)
    ]
    length = row_length(args, model)
    problems += [
        f"{name}: packing=True, but {where} ({kind}) rotates all samples of a batch by the length of the longest, if "
        f"that has more than {original} tokens, so samples of a row change each other. Set max_length to at most "
        f"{original}, or packing=False."
        for where, kind, original in length_dependent_rotations(base_model(model))
        if length is not None and length > original
    ]
    if length is None:
        problems.append("packing=True needs max_length, the tokens of a row: the model does not say its positions.")
    own = [method for method in _LOADERS if method in overridden]
    if own:
        problems.append(
            f"packing=True changes the samples of the training loader, but a subclass overrides {' and '.join(own)}. "
            "Pack the samples there, or remove the override."
        )
    if args.eval_packing and not is_redefined(args, "eval_packing") and has_metrics:
        problems.append(
            "eval_packing=True, but compute_metrics needs the predictions of each sample. Leave eval_packing out, or "
            "set it to False."
        )
    if type(collator).__name__ == "DataCollatorWithFlattening":
        problems.append(
            "packing=True packs the samples itself, but the data_collator, a DataCollatorWithFlattening, does it too. "
            "Leave it out, or set packing=False."
        )
    return problems


def packed_format(
    model: nn.Module,
    layout: ParallelLayout,
    label_names: Sequence[str],
    processing_class: Any = None,
    compiles: bool = False,
) -> PackedFormat:
    """What the batches of packed rows need for ``model``. Code that is compiled does not see deferred masks."""
    core = base_model(model)
    library = library_models(core)
    attention = _attention_of(model)
    sharded = layout.cp * layout.sp > 1
    flash = bool(library) and "flash" in attention and not sharded
    pair_mask = PairMask.NONE
    if library and not flash and not sharded and any(map(is_bidirectional, library)):
        of_sdpa = PairMask.BOOLEAN if compiles else PairMask.DEFERRED
        pair_mask = PairMask.ADDITIVE if attention == "eager" else of_sdpa
    return PackedFormat(
        label_names=tuple(label_names),
        shifts_labels=shifts_labels(core),
        first_position=_first_position(core),
        pad_token_id=padding_token(core, processing_class),
        pair_mask=pair_mask,
        flash=flash,
        numbers=bool(library) and _recurrent_layers(model),
        takes_mask="attention_mask" in forward_names(core) or accepts_any_keyword(core),
    )


def _reasons(model: nn.Module, layout: ParallelLayout) -> list[str]:
    core = base_model(model)
    library = library_models(core)
    reasons = []
    if any(getattr(config, "is_encoder_decoder", False) for config in _configs(model)):
        return ["an encoder-decoder model has two sequences for each sample."]
    if any(kind.__name__.endswith(OF_WHOLE_SEQUENCES) for kind in type(core).__mro__):
        reasons.append("it makes one prediction for each row, not for each token.")
    if not ("position_ids" in forward_names(core) or (bool(library) and all(map(takes_positions, library)))):
        reasons.append(
            "its forward takes no position_ids [batch, tokens], which restart at every sample of a row, so it cannot "
            "know where a sample begins."
        )
    for where, module in core.named_modules():
        if isinstance(module, _BATCH_NORMS):
            reasons.append(
                f"{where} ({type(module).__name__}) normalizes with statistics of all tokens of a batch, which mixes "
                "samples."
            )
    bidirectional = [inner for inner in library if is_bidirectional(inner)]
    if bidirectional and layout.cp * layout.sp == 1:
        attention = _attention_of(model)
        if (
            any(hasattr(module_of(inner), _BIDIRECTIONAL_WINDOW) for inner in bidirectional)
            and "flash" not in attention
        ):
            reasons.append(
                "a mask of pairs of tokens would replace the sliding windows of its bidirectional attention. Load it "
                "with attn_implementation='flash_attention_2'."
            )
        elif attention not in ("sdpa", "eager") and "flash" not in attention:
            reasons.append(
                f"its bidirectional attention needs a mask of pairs of tokens, which attn_implementation={attention!r} "
                "does not take. Load it with attn_implementation='sdpa' or 'eager'."
            )
    return reasons


def _configs(model: nn.Module) -> list[Any]:
    configs = [config for inner in library_models(model) for config in library_configs(inner)]
    own = getattr(base_model(model), "config", None)
    return configs or ([] if own is None else [own])


def _attention_of(model: nn.Module) -> str:
    names = [getattr(config, "_attn_implementation", None) for config in _configs(model)]
    return str(next((name for name in names if name), "eager"))


def _recurrent_layers(model: nn.Module) -> bool:
    """Whether a configuration names layers that are not attention, which take the borders of samples if they can."""
    for config in _configs(model):
        layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
        if set(map(str, layers)) - _ATTENTION_LAYERS:
            return True
    return False


def _first_position(core: nn.Module) -> int:
    """The position of a first token where a model counts the tokens that are not padding, as RoBERTa does."""
    for module in core.modules():
        padding = getattr(module, "padding_idx", None)
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(padding, int):
            return padding + 1
    return 0


def has_experts(model: nn.Module) -> bool:
    """Whether tokens share experts: other tokens in a batch then change the shapes of their matrix products."""
    names = {type(module).__name__.lower() for module in base_model(model).modules()}
    return any(part in name for name in names for part in ("expert", "moe", "router"))
