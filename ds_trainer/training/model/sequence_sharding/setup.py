"""Builds the :class:`SequenceSharder` of a model, and checks that the model and the loss accept shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import accepts_any_keyword, base_model, forward_names
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.parallel.deferred_mask import pairs_of
from ds_trainer.parallel.document_attention import Documents
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.training.model.sequence_sharding.equivalence_check import check_sharded_model
from ds_trainer.training.model.sequence_sharding.support import is_bidirectional, library_models, sharding_problems
from ds_trainer.training.signatures import takes_shifted_labels
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def sharder_or_problems(
    model: nn.Module, layout: ParallelLayout, **about: Any
) -> tuple[SequenceSharder | None, list[str]]:
    """The result of :func:`make_sequence_sharder`, or None with the reasons why sequences cannot be sharded.

    Such a model can still be evaluated: all ranks of a replica then work on the full batch.
    """
    problems = sharding_problems(model, layout)
    if problems:
        return None, problems
    try:
        return make_sequence_sharder(model, layout, **about), []
    except ConfigError as error:
        return None, error.problems


def make_sequence_sharder(
    model: nn.Module,
    layout: ParallelLayout,
    label_names: Sequence[str],
    processing_class: Any = None,
    *,
    loss_function: Callable[..., Any] | None = None,
    overrides_loss: bool = False,
) -> SequenceSharder | None:
    """The sharder of ``layout`` for ``model``; None if ``layout`` does not shard sequences.

    Args:
        model: the model that the user passed.
        layout: owner of ``cp`` and ``sp``.
        label_names: keys of a batch that may hold labels.
        processing_class: a tokenizer that defines the padding token, or None.
        loss_function: ``compute_loss_func``.
        overrides_loss: a subclass computes the loss.

    Raises:
        ConfigError: the model or the loss does not accept shards.
    """
    if layout.cp * layout.sp == 1:
        return None
    core = base_model(model)
    shifts = shifts_labels(core)
    if shifts and loss_function is not None and not takes_shifted_labels(loss_function):
        raise ConfigError(
            f"compute_loss_func: {type(core).__name__} predicts the next token, and with sequences sharded over "
            f"{layout.cp * layout.sp} ranks, labels are shifted before sharding. Add an argument shift_labels (the "
            "target of position t at t, -100 for none) to the function and compare the logits with it, unshifted; or "
            "set context_parallel_size and sequence_parallel_size to 1."
        )
    if shifts and overrides_loss:
        logger.warning(
            "A subclass overrides compute_loss, and sequences are sharded: a batch has shift_labels (and the same "
            "values under its label name), with the target of position t at t. The loss must not shift them again."
        )
    names = forward_names(core)
    if library_models(core) and accepts_any_keyword(core):
        names = [*names, "position_ids"]  # passed on to the inner model; sharding_problems checks that it accepts them
    return SequenceSharder(
        layout,
        shifts_labels=shifts,
        label_names=label_names,
        accepts=names,
        accepts_any=accepts_any_keyword(core),
        pad_token_id=padding_token(core, processing_class),
        custom_positions=_numbers_by_mask(core),
        model_name=type(core).__name__,
    )


def check_sequence_sharding(
    model: nn.Module,
    sharder: SequenceSharder,
    batch: Mapping[str, Any],
    groups: ParallelGroups,
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]],
    packed: bool = False,
) -> None:
    """Compares ``model`` on a prefix of a batch, full and sharded (:func:`check_sharded_model`). Collective.

    Logs a warning if the outputs have no value per token, because then there is nothing to compare.

    Args:
        model: the engine.
        sharder: the sharder of its batches.
        batch: full sequences, the same on all ranks of a replica.
        groups: the process groups of the layout.
        prepare: moves a batch to the device.
        packed: the sequences are packed samples, and the full ones must keep them apart too: models with bidirectional
            attention need a mask for that.

    Raises:
        ConfigError: the results differ by more than rounding errors.
    """
    core = base_model(model)
    prefix = sharder.prefix(batch, 4 * groups.layout.cp * groups.layout.sp)
    shard, plan = sharder.shard(prefix, groups.coordinates.cp, groups.coordinates.sp)
    length = sharder.length(prefix)
    if packed and any(map(is_bidirectional, library_models(core))):
        prefix["attention_mask"] = pairs_of(Documents.of(prefix["position_ids"]), torch.device("cpu"))
    # With a KV cache, transformers does not look for documents in position_ids.
    without_cache = {"use_cache": False} if library_models(core) and "use_cache" in forward_names(core) else {}

    def call(part: Mapping[str, Any]) -> Any:
        """What only a subclass's compute_loss knows is no argument of the model."""
        known = prepare(part).items()
        return model(**{name: value for name, value in known if sharder.accepted(name)}, **without_cache)

    with torch.no_grad():
        key = per_token_output(call(prefix), length)
    if key is None:
        logger.warning(
            "%s returns nothing per token besides its loss, so its results for sharded sequences cannot be compared "
            "with those for full ones. Return its logits as well, [batch, tokens, ...].",
            type(core).__name__,
        )
        return

    def full() -> torch.Tensor:
        result = value_of(call(prefix), key)
        missing = plan.length - length  # padded like the sharded sequence; padding is not compared
        return nn.functional.pad(result, (0, 0) * (result.dim() - 2) + (0, missing))

    check_sharded_model(model, full, lambda: value_of(call(shard), key), plan, groups)


def per_token_output(outputs: Any, length: int) -> Any:
    """Key or index of the first output with one value per token, or None."""
    items = outputs.items() if isinstance(outputs, Mapping) else enumerate(_sequence(outputs))
    for key, value in items:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[1:2] == (length,):
            return key
    return None


def _sequence(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def value_of(outputs: Any, key: Any) -> torch.Tensor:
    """The output that :func:`per_token_output` found."""
    value: torch.Tensor = outputs[key] if isinstance(outputs, Mapping) else _sequence(outputs)[key]
    return value


def padding_token(model: nn.Module, processing_class: Any) -> int:
    """The padding token. Any token of the vocabulary works, because no token attends to it and it has no target."""
    for owner in (processing_class, getattr(model, "config", None)):
        token = getattr(owner, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _numbers_by_mask(model: nn.Module) -> bool:
    """Whether positions are computed from the attention mask, by an embedding that receives it (OPT, BioGPT)."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any("attention_mask" in inspect.signature(table.forward).parameters for table in tables)
