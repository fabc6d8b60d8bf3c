"""Which models of transformers cannot be cut along the sequence: told from class and config, before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_trainer.data.columns import base_model, forward_names, takes_any_name
from ds_trainer.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "attention_dropout_rate",
)
_OF_WHOLE_SEQUENCES = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForNextSentencePrediction",
    "DoubleHeadsModel",
)
_OTHER_SEQUENCES = ("vision_config", "audio_config")
_MOVING_ROPE = ("dynamic", "longrope")  # frequencies follow the largest position of a batch, and each rank has another


def split_problems(model: nn.Module, layout: ParallelLayout) -> list[str]:
    """Why the sequences of ``model`` cannot be cut as ``layout`` says, a sentence each.

    Models that hold nothing of transformers are not looked at: they call :func:`ds_trainer.attention` themselves, and
    the self-check at the start sees whether they do.
    """
    if layout.cp * layout.sp == 1:
        return []
    cut = f"context_parallel_size={layout.cp} and sequence_parallel_size={layout.sp} cut every sequence"
    problems: list[str] = []
    for pretrained in library_models(model):
        problems += [f"{type(pretrained).__name__}: {cut}, but {why}" for why in _reasons(pretrained)]
    return list(dict.fromkeys(problems))


def library_models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost models of transformers inside of ``model``, often ``model`` itself."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    def search(module: nn.Module) -> Iterator[PreTrainedModel]:
        if isinstance(module, PreTrainedModel):
            yield module
            return
        for child in module.children():
            yield from search(child)

    return list(search(base_model(model)))


def library_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of a model and of the models and parts inside of it, each once."""
    from transformers import PreTrainedModel

    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
            waiting += [part for part in parts if part is not None]
    return list(found.values())


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    configs = library_configs(model)
    if any(getattr(config, "is_encoder_decoder", False) for config in configs):
        yield (
            "an encoder-decoder model attends from one sequence to another, which cannot be cut. Set both to 1, or "
            "take a model with one sequence (AutoModelForCausalLM, AutoModelForMaskedLM)."
        )
        return
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        yield (
            "its code computes attention without transformers' attention interface (or has none), so that ours cannot "
            "take its place. Set both to 1."
        )
    if any(kind.__name__.endswith(_OF_WHOLE_SEQUENCES) for kind in type(model).__mro__):
        yield "it predicts something of a whole sequence, of which a rank has a part. Set both to 1."
    for config in configs:
        yield from _reasons_of_config(config)
    if not _takes_positions(model):
        yield "its forward takes no position_ids, so that a part would be numbered as a whole. Set both to 1."
    parts = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    if parts & {"sinks", "attention_sink_bias"}:
        yield (
            "it has attention sinks (s_aux), which are not part of the softmax that is computed in pieces. Set both "
            "to 1."
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield (
            "it numbers positions by counting the tokens that are no padding, and a part does not know those before "
            "it. Set both to 1."
        )


def _reasons_of_config(config: Any) -> Iterator[str]:
    for name in _DROPOUTS:
        rate = getattr(config, name, None)
        if isinstance(rate, (int, float)) and rate > 0:
            yield (
                f"{name}={rate}: attention in pieces drops nothing. Load the model with {name}=0.0, or set both to 1."
            )
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        yield (
            f"attn_logit_softcapping={cap}: scores are capped before the softmax, which our attention does not do. "
            "Load the model with attn_logit_softcapping=None if it was trained so, or set both to 1."
        )
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    others = sorted(set(layers) - _KNOWN_LAYERS)
    if others:
        yield (
            f"layer_types has {', '.join(others)}: tokens are mixed otherwise than by full or sliding attention. "
            "Set both to 1."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and (not layers or "chunked_attention" in layers):
        yield f"attention_chunk_size={chunk}: attention inside of chunks is not cut. Set both to 1."
    if getattr(config, "alibi", False):
        yield "alibi=True: a bias of the scores by position is not part of our attention. Set both to 1."
    if "relative" in str(getattr(config, "position_embedding_type", "")):
        yield (
            f"position_embedding_type={config.position_embedding_type!r}: a bias of the scores by position is not part "
            "of our attention. Set both to 1."
        )
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _MOVING_ROPE:
            yield (
                f"rope_type={kind!r}: the frequencies follow the largest position of a batch, and every part has "
                "another. Take a rope_type that stays (default, linear, yarn, llama3), or set both to 1."
            )
    for name in _OTHER_SEQUENCES:
        if getattr(config, name, None) is not None:
            yield f"it has a {name}: only sequences of text are cut. Set both to 1."


def _takes_positions(model: PreTrainedModel) -> bool:
    if "position_ids" in forward_names(model):
        return True
    body = getattr(model, model.base_model_prefix, None)  # a head that hands everything on
    return takes_any_name(model) and isinstance(body, nn.Module) and "position_ids" in forward_names(body)


def _rope_types(parameters: Any) -> list[str]:
    """The kinds in ``rope_parameters``, which holds one set, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [
        str(inner["rope_type"]) for inner in parameters.values() if isinstance(inner, dict) and "rope_type" in inner
    ]
