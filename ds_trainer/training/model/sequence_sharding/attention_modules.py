"""Our attention in transformers' models, registered in their attention interface under the name ``ds_trainer``.

Two functions are registered. With sequence sharding, the mask function does not build a mask but returns the model's
request (causal or not, a window or none); the plan of the batch has the rest (documents, padding). The attention
function passes the request to :func:`ds_trainer.parallel.attention.attention`. Without sharding both call ``sdpa``, so
generation and everything else works as before.

Source: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.attention import ActiveSharding, active_sharding, attention
from ds_trainer.parallel.deferred_mask import RequestedMask
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.sequence_sharding.rotary_lengths import use_lengths_of_whole_batches
from ds_trainer.training.model.sequence_sharding.support import library_configs, library_models, sharding_problems
from ds_trainer.utils.errors import ConfigError

NAME = "ds_trainer"

UNSUPPORTED = {  # arguments of attention functions that change the result and that ours does not support
    "softcap": "a cap on the scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks (sinks)",
    "position_bias": "a bias of the scores by position (position_bias)",
    "head_mask": "a mask of heads (head_mask)",
    "indices": "a choice of keys (indices)",
    "block_indices": "a choice of keys (block_indices)",
    "cache": "a paged KV cache",
}


class ShardedAttention:
    """The changes of :func:`use_sharded_attention`. :attr:`before` has each config's previous attention; ``hooks`` are
    handles of hooks.
    """

    def __init__(self, configs: list[Any], hooks: list[Any]) -> None:
        self._configs, self._hooks = configs, hooks
        self.before: list[str | None] = [config._attn_implementation for config in configs]
        for config in configs:
            config._attn_implementation_internal = (
                NAME  # the setter would also change sub-configs, which are in the list
            )

    def restore(self) -> None:
        """Restores every config's previous attention. Idempotent."""
        for config, name in zip(self._configs, self.before, strict=True):
            config._attn_implementation_internal = name
        for hook in self._hooks:
            hook.remove()
        self._configs, self.before, self._hooks = [], [], []


def use_sharded_attention(model: nn.Module, layout: ParallelLayout) -> ShardedAttention:
    """Makes transformers' models inside ``model`` compute attention with our function.

    Changes nothing if ``layout`` does not shard sequences, or if ``model`` contains no transformers model. Weights,
    config files and results without sharding stay the same (results are those of ``sdpa`` for any earlier attention).

    Raises:
        ConfigError: a model does not support sequence sharding; one sentence per reason.
    """
    problems = sharding_problems(model, layout)
    if problems:
        raise ConfigError(problems)
    models = library_models(model) if layout.cp * layout.sp > 1 else []
    if models:
        # Registers both functions in transformers. Idempotent.
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, sharded_attention)
        AttentionMaskInterface.register(NAME, sharded_mask)
    configs = {id(config): config for inner in models for config in library_configs(inner)}
    hooks = [hook for inner in models for hook in use_lengths_of_whole_batches(inner)]
    return ShardedAttention(list(configs.values()), hooks)


def sharded_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **rest: Any) -> Any:
    """The mask of a forward pass: transformers' own without sharding, else a :class:`RequestedMask`.

    Raises:
        ConfigError: with sharding, queries and keys are different tokens, or the kind of mask is not supported.
    """
    if active_sharding() is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(q_length=q_length, kv_length=kv_length, mask_function=mask_function, **rest)
    if q_length != kv_length:
        raise ConfigError(_other_keys(q_length, kv_length))
    return requested_mask(mask_function)


def sharded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer with transformers' signature: ``[batch, heads, tokens, dim]`` in, ``[batch, tokens, heads,
    dim]`` out. Without sharding it is transformers' ``sdpa``.

    Raises:
        ConfigError: the layer uses a feature that sharded sequences do not support.
        RuntimeError: a :class:`RequestedMask` without active sharding.
    """
    sharding = active_sharding()
    if sharding is None:
        if isinstance(attention_mask, RequestedMask):
            raise RuntimeError(
                "a layer is recomputed outside of the sharding of its batch: enter use_sharding around backward"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        unsharded: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **rest
        )
        return unsharded
    problems = list(
        _call_problems(
            module=module, query=query, key=key, mask=attention_mask, dropout=dropout, rest=rest, sharding=sharding
        )
    )
    if problems:
        raise ConfigError(problems)
    if isinstance(attention_mask, RequestedMask):
        causal, window = attention_mask.causal, attention_mask.window
    else:  # no mask requested: sdpa's rule
        causal, window = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal), None
    result = attention(query, key, value, causal=causal, window=window, scale=scaling)
    return result.transpose(1, 2).contiguous(), None


def _call_problems(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Any,
    dropout: float,
    rest: dict[str, Any],
    sharding: ActiveSharding,
) -> list[str]:
    layer = type(module).__name__
    problems = []
    if query.shape[2] != key.shape[2]:
        problems.append(f"{layer}: {_other_keys(query.shape[2], key.shape[2])}")
    elif query.shape[2] != sharding.local_length:
        problems.append(
            f"{layer}: attention over {query.shape[2]} tokens, but this rank's shard has {sharding.local_length} of "
            f"{sharding.plan.length}: only the batch's own sequence can be sharded. Set context_parallel_size and "
            "sequence_parallel_size to 1."
        )
    if mask is not None and not isinstance(mask, RequestedMask):
        problems.append(
            f"{layer}: a precomputed attention mask of shape {list(getattr(mask, 'shape', []))} describes a full "
            "sequence, but this rank has a shard. Pass attention_mask [batch, tokens], and documents as position_ids."
        )
    if mask is None and rest.get("sliding_window") is not None:
        problems.append(
            f"{layer}: sliding_window={rest['sliding_window']} without a mask from transformers' mask functions is "
            "ambiguous."
        )
    if dropout > 0:
        problems.append(f"{layer}: attention dropout {dropout}: sharded attention has no dropout. Set it to 0.")
    problems += [
        f"{layer}: sharded attention does not support {feature}. Set context_parallel_size and sequence_parallel_size "
        "to 1."
        for name, feature in UNSUPPORTED.items()
        if rest.get(name) is not None
    ]
    if rest.get("output_attentions"):
        problems.append(f"{layer}: output_attentions=True: attention weights are never computed. Set it to False.")
    return problems


def _other_keys(queries: int, keys: int) -> str:
    return (
        f"{queries} query tokens over {keys} key tokens: a sharded sequence can attend only to itself. Remove cross "
        "attention and prefix tuning, and set use_cache=False if there is a KV cache."
    )


def requested_mask(mask_function: Callable[..., Any]) -> RequestedMask:
    """Read the kind of mask from a mask function of transformers.masking_utils, which is composed of closures.

    Ignores documents that transformers found in position_ids: the plan of the full sequence has them, and a shard in
    zig-zag order has jumps that are not document boundaries. Padding is ignored, too.

    Raises:
        ConfigError: the mask is of another kind.
    """
    from transformers import masking_utils

    causal, window = False, None
    pending: list[Any] = [mask_function]
    while pending:
        function = pending.pop()
        if function is masking_utils.causal_mask_function:
            causal = True
            continue
        if function is masking_utils.bidirectional_mask_function:
            continue
        maker = getattr(function, "__qualname__", repr(function)).partition(".")[0]
        cells = getattr(function, "__closure__", None) or ()
        inner = {
            name: cell.cell_contents
            for name, cell in zip(getattr(getattr(function, "__code__", None), "co_freevars", ()), cells, strict=False)
        }
        known = getattr(function, "__module__", None) == masking_utils.__name__
        if known and maker == "and_masks":
            pending += inner["mask_functions"]
        elif known and maker in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            window = int(inner["sliding_window"])
        elif known and maker == "remap_positions_for_packed_sequence":
            pending.append(inner["mask_function"])
        elif not (known and maker in ("packed_sequence_mask_function", "padding_mask_function")):
            raise ConfigError(
                f"the model requests a mask by {maker}, but sharded attention supports causal, sliding and full "
                "attention with documents and padding. Set context_parallel_size and sequence_parallel_size to 1."
            )
    return RequestedMask(causal, window)
