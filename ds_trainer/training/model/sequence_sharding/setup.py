"""Builds the :class:`SequenceSharder` of a model, and checks that the model and the loss accept shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.data.columns import accepts_any_keyword, base_model, forward_names
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.parallel.attention import use_sharding
from ds_trainer.parallel.deferred_mask import pairs_of
from ds_trainer.parallel.document_attention import Documents
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.training.model.sequence_sharding.support import is_bidirectional, library_models, sharding_problems
from ds_trainer.training.signatures import takes_shifted_labels
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.two_runs import first_difference, rms
from ds_trainer.utils.undisturbed import evaluation_mode

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


# Verifies before training that a model gives the same results for sharded and for full sequences.
#
# A model must not be sharded if its forward pass mixes tokens by anything other than our attention: a convolution, a
# recurrent layer, positions counted inside the model, a custom mask, statistics over the tokens. There is no way to
# detect all of these from the outside. So a prefix of the first batch runs through the model in full and sharded, and
# the results are compared.


_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def check_sharded_model(
    model: nn.Module,
    full: Callable[[], torch.Tensor],
    sharded: Callable[[], torch.Tensor],
    plan: SequencePlan,
    groups: ParallelGroups,
) -> float:
    """Compares the results of ``model`` for full sequences with those for sharded ones. Collective in a replica.

    A few tokens suffice: a ``plan`` for the first ``4 * cp * sp`` tokens of the first batch gives 4 tokens to each
    rank, with borders between all of them. Every rank of a replica must hold the same full sequences.

    Args:
        model: switched to evaluation mode for the comparison, then restored.
        full: computes the logits ``[batch, plan.length, ...]`` of full sequences as in unsharded training
            (``use_cache=False``: with a KV cache, transformers does not look for documents in position_ids).
        sharded: computes the logits ``[batch, local length, ...]`` of this rank's shard, with ``plan`` active.
        plan: how the sequences are sharded.
        groups: the process groups of its layout.

    Returns:
        The relative difference: root mean square of (sharded - full) over the valid tokens of a rank, divided by the
        root mean square of full; the maximum over the replica's ranks.

    Raises:
        ConfigError: on all ranks of the replica, if the difference exceeds rounding errors, the forward pass never
            calls our attention, or it does not return one result per token.
    """
    part = plan.positions(groups.coordinates.cp, groups.coordinates.sp)
    calls = 0

    def whole_pass() -> torch.Tensor:
        with use_sharding(None, None):
            return full().detach()

    def sharded_pass() -> torch.Tensor:
        nonlocal calls
        with use_sharding(plan, groups) as sharding:
            shard = sharded().detach()
        assert sharding is not None  # there is a plan
        calls = sharding.calls
        return shard

    with evaluation_mode(model), torch.no_grad():
        expected, result = whole_pass(), sharded_pass()
    per_token = expected.shape[1:2] == (plan.length,) and result.shape[1:2] == (len(part),)
    difference = _difference(expected, result, plan, part) if per_token else 0.0
    # All ranks use the maximum; nan counts as infinite.
    outcome = torch.tensor(
        [difference if difference == difference else float("inf"), calls == 0, not per_token],
        dtype=torch.float64,
    )
    dist.all_reduce(outcome, dist.ReduceOp.MAX, group=groups.replica_host)
    difference, without, misshapen = outcome.tolist()
    allowed = _TOLERANCE.get(result.dtype, 1e-3)
    if misshapen:
        why = (
            f"its result of shape {list(expected.shape)} for {plan.length} tokens ({list(result.shape)} for "
            f"{len(part)}) does not have one value per token. Set both to 1."
        )
    elif without:
        why = (
            "its forward pass never called our attention, so tokens of different ranks would not attend to each other. "
            "Call ds_trainer.attention(query, key, value) in it, or set both to 1."
        )
    elif difference > allowed:

        def of_module(one: torch.Tensor, two: torch.Tensor) -> float:
            per_token = two.shape == (len(expected), len(part), *one.shape[2:]) and len(one) == len(expected)
            if not per_token or not len(part) < one.shape[1] <= plan.length:
                return 0.0
            missing = plan.length - one.shape[1]  # padding, which is not compared
            return _difference(nn.functional.pad(one, (0, 0) * (one.dim() - 2) + (0, missing)), two, plan, part)

        with evaluation_mode(model), torch.no_grad():
            own = first_difference(model, whole_pass, sharded_pass, of_module, allowed, through_inputs=True)
        names: list[str | None] = [None] * groups.replica_host.size()
        dist.all_gather_object(names, own, group=groups.replica_host)
        module = next((name for name in names if name), "none with one value per token")
        why = (
            f"the results of a sharded sequence differ from those of the full one by a relative {difference:.2g} "
            f"(rounding allows {allowed:.0e}): something other than our attention mixes tokens (a convolution, a "
            f"recurrent layer, custom positions or masks). The first module with another output: {module}. Set both to "
            "1."
        )
    else:
        return difference
    layout = plan.layout
    raise ConfigError(
        f"{type(getattr(model, 'module', model)).__name__}: context_parallel_size={layout.cp} and "
        f"sequence_parallel_size={layout.sp} shard every sequence, but {why}"
    )


def _difference(expected: torch.Tensor, result: torch.Tensor, plan: SequencePlan, part: torch.Tensor) -> float:
    valid = torch.ones(expected.shape[0], len(part), dtype=torch.bool)
    if plan.documents is not None:  # results for padding do not matter
        valid = plan.documents.valid_at(part)
    full = expected[:, part.to(expected.device)][valid.to(expected.device)].double().cpu()
    sharded = result[valid.to(result.device)].double().cpu()
    size = rms(expected)
    if not full.numel() or size == 0:
        return 0.0 if not full.numel() else sharded.abs().max().item()
    return rms(sharded - full) / size
