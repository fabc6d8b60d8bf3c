"""Our attention in the models of transformers: registered in their attention interface under the name ``ds_trainer``.

Two functions are registered. The one for masks does not build a mask under a cut, but says in two words what the model
asked for (causal or not, a window or none); the plan of the batch knows the rest (documents, padding). The one for
attention hands these to :func:`ds_trainer.parallel.attention.attention`. Without a cut both hand on to ``sdpa``, so
that generation and all else computes what it always did.

Source: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.attention import RunningCut, active_cut, attention
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.split_problems import library_configs, library_models, split_problems
from ds_trainer.utils.errors import ConfigError

NAME = "ds_trainer"

_NOT_OURS = {  # arguments of attention functions that change the result and that ours has not
    "softcap": "a cap on the scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks (sinks)",
    "position_bias": "a bias of the scores by position (position_bias)",
    "head_mask": "a mask of heads (head_mask)",
    "indices": "a choice of keys (indices)",
    "block_indices": "a choice of keys (block_indices)",
    "cache": "a paged KV cache",
}


@dataclass(frozen=True)
class MaskOfCutSequence:
    """Stands where a mask would: what the model wants its mask to say, apart from documents and padding.

    Attributes:
        causal: a token sees no later one.
        window: the sliding window, or None.
    """

    causal: bool
    window: int | None


class SplitAttention:
    """What :func:`use_split_attention` changed. :attr:`before` holds each config's attention from before."""

    def __init__(self, configs: list[Any]) -> None:
        self._configs = configs
        self.before: list[str | None] = [config._attn_implementation for config in configs]
        for config in configs:
            config._attn_implementation_internal = NAME  # the setter would write to the parts as well, which come here

    def restore(self) -> None:
        """Give every config the attention that it had. A second call changes nothing."""
        for config, name in zip(self._configs, self.before, strict=True):
            config._attn_implementation_internal = name
        self._configs, self.before = [], []


def use_split_attention(model: nn.Module, layout: ParallelLayout) -> SplitAttention:
    """Let the models of transformers inside of ``model`` compute attention by our function.

    Nothing changes where ``layout`` cuts no sequence, or where ``model`` holds nothing of transformers. Weights,
    config files and results without a cut stay as they are (those of ``sdpa``, whatever attention was chosen before).

    Raises:
        ConfigError: a model cannot be cut; one sentence for each reason.
    """
    problems = split_problems(model, layout)
    if problems:
        raise ConfigError(problems)
    models = library_models(model) if layout.cp * layout.sp > 1 else []
    if models:
        register_attention()
    configs = {id(config): config for inner in models for config in library_configs(inner)}
    return SplitAttention(list(configs.values()))


def register_attention() -> None:
    """Register both functions in transformers. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, split_attention)
    AttentionMaskInterface.register(NAME, split_mask)


def split_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **rest: Any) -> Any:
    """The mask of a forward pass: transformers' own without a cut, else a :class:`MaskOfCutSequence`.

    Raises:
        ConfigError: under a cut the keys are not the queries' own, or the mask is of a kind that cannot be cut.
    """
    if active_cut() is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(q_length=q_length, kv_length=kv_length, mask_function=mask_function, **rest)
    if q_length != kv_length:
        raise ConfigError(_other_keys(q_length, kv_length))
    return _asked_for(mask_function)


def split_attention(
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
    """Attention of one layer as transformers calls it: ``[batch, heads, tokens, dim]`` in, ``[batch, tokens, heads,
    dim]`` out. Without a cut it is transformers' ``sdpa``.

    Raises:
        ConfigError: under a cut the layer wants what a cut sequence cannot have.
        RuntimeError: a mask of a cut sequence without a cut.
    """
    cut = active_cut()
    if cut is None:
        if isinstance(attention_mask, MaskOfCutSequence):
            raise RuntimeError(
                "a layer is computed again outside of the cut of its batch: enter use_cut around backward"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **rest
        )
        return whole
    problems = list(_call_problems(module, query, key, attention_mask, dropout, rest, cut))
    if problems:
        raise ConfigError(problems)
    if isinstance(attention_mask, MaskOfCutSequence):
        causal, window = attention_mask.causal, attention_mask.window
    else:  # no mask was asked for: sdpa's rule
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
    cut: RunningCut,
) -> list[str]:
    layer = type(module).__name__
    problems = []
    if query.shape[2] != key.shape[2]:
        problems.append(f"{layer}: {_other_keys(query.shape[2], key.shape[2])}")
    elif query.shape[2] != cut.local_length:
        problems.append(
            f"{layer}: attention over {query.shape[2]} tokens, but the part of this rank is {cut.local_length} of "
            f"{cut.plan.length}: a sequence that is not the batch's own cannot be cut. Set context_parallel_size and "
            "sequence_parallel_size to 1."
        )
    if mask is not None and not isinstance(mask, MaskOfCutSequence):
        problems.append(
            f"{layer}: a ready-made attention mask of shape {list(getattr(mask, 'shape', []))} speaks of a whole "
            "sequence, and this rank has a part. Hand in attention_mask [batch, tokens], and documents as position_ids."
        )
    if mask is None and rest.get("sliding_window") is not None:
        problems.append(
            f"{layer}: sliding_window={rest['sliding_window']} without a mask of transformers' mask functions leaves "
            "open what a token may see."
        )
    if dropout > 0:
        problems.append(f"{layer}: attention dropout {dropout}: attention in pieces drops nothing. Set it to 0.")
    problems += [
        f"{layer}: {what} cannot be computed in pieces. Set context_parallel_size and sequence_parallel_size to 1."
        for name, what in _NOT_OURS.items()
        if rest.get(name) is not None
    ]
    if rest.get("output_attentions"):
        problems.append(f"{layer}: output_attentions=True: attention weights are never formed. Set it to False.")
    return problems


def _other_keys(queries: int, keys: int) -> str:
    return (
        f"{queries} query tokens over {keys} key tokens: under a cut a sequence attends to itself only. Leave out "
        "cross attention and prefix tuning, and set use_cache=False where a KV cache is kept."
    )


def _asked_for(mask_function: Callable[..., Any]) -> MaskOfCutSequence:
    """Read a mask function of transformers.masking_utils, which is composed of closures, back into words.

    Documents that its authors found in position_ids are passed over: the plan of the whole sequence has them, and a
    part in zig-zag order jumps where no document ends.
    """
    from transformers import masking_utils

    causal, window = False, None
    waiting: list[Any] = [mask_function]
    while waiting:
        function = waiting.pop()
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
        ours = getattr(function, "__module__", None) == masking_utils.__name__
        if ours and maker == "and_masks":
            waiting += inner["mask_functions"]
        elif ours and maker in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            window = int(inner["sliding_window"])
        elif ours and maker == "remap_positions_for_packed_sequence":
            waiting.append(inner["mask_function"])
        elif not (ours and maker in ("packed_sequence_mask_function", "padding_mask_function")):
            raise ConfigError(
                f"the model asks for a mask by {maker}, and a cut sequence knows causal, sliding and full attention "
                "with documents and padding. Set context_parallel_size and sequence_parallel_size to 1."
            )
    return MaskOfCutSequence(causal, window)
