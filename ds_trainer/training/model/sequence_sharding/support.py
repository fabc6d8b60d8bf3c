"""Which transformers models do not support sequence sharding, judged by class and config before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_trainer.data.columns import accepts_any_keyword, base_model, forward_names
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.sequence_sharding.rotary_lengths import BY_LENGTH, length_dependent_rotations

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
OF_WHOLE_SEQUENCES = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForNextSentencePrediction",
    "DoubleHeadsModel",
)
_BIDIRECTIONAL = "create_bidirectional_mask"
_OTHER_SEQUENCES = ("vision_config", "audio_config")


def sharding_problems(model: nn.Module, layout: ParallelLayout) -> list[str]:
    """Reasons why the sequences of ``model`` cannot be sharded as in ``layout``, one sentence each.

    Does not check models without transformers models inside: they call :func:`ds_trainer.attention` themselves, and
    :mod:`~ds_trainer.training.model.sequence_sharding.setup` verifies that.
    """
    if layout.cp * layout.sp == 1:
        return []
    setting = f"context_parallel_size={layout.cp} and sequence_parallel_size={layout.sp} shard every sequence"
    problems: list[str] = []
    for pretrained in library_models(model):
        problems += [f"{type(pretrained).__name__}: {setting}, but {why}" for why in _reasons(pretrained)]
    return list(dict.fromkeys(problems))


def library_models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost transformers models inside ``model``, often ``model`` itself."""
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
    """The configs of a model and of its submodels, each once."""
    from transformers import PreTrainedModel

    pending = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs: dict[int, Any] = {}
    while pending:
        config = pending.pop(0)
        if id(config) not in configs:
            configs[id(config)] = config
            parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
            pending += [part for part in parts if part is not None]
    return list(configs.values())


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    configs = library_configs(model)
    if any(getattr(config, "is_encoder_decoder", False) for config in configs):
        yield (
            "an encoder-decoder model attends from one sequence to another, which cannot be sharded. Set both to 1, or "
            "use a model with one sequence (AutoModelForCausalLM, AutoModelForMaskedLM)."
        )
        return
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        yield (
            "it does not use transformers' attention interface (or has no attention), so ours cannot replace it. Set "
            "both to 1."
        )
    if any(kind.__name__.endswith(OF_WHOLE_SEQUENCES) for kind in type(model).__mro__):
        yield "it makes one prediction per sequence, of which a rank holds a shard. Set both to 1."
    rotations = list(length_dependent_rotations(model))
    for config in configs:
        yield from _reasons_of_config(config)
        for kind in _rope_types(getattr(config, "rope_parameters", None)):
            if kind in BY_LENGTH and not rotations:
                yield (
                    f"rope_type={kind!r}: the frequencies depend on the largest position of a batch, which differs in "
                    "every shard, and the model has no module with this rope_type that could be told. Use a fixed "
                    "rope_type (default, linear, yarn, llama3), or set both to 1."
                )
    if not takes_positions(model):
        yield "its forward takes no position_ids, so a shard would be numbered like a full sequence. Set both to 1."
    parts = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    if parts & {"sinks", "attention_sink_bias"}:
        yield ("it has attention sinks (s_aux), which sharded attention does not support. Set both to 1.")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield (
            "it numbers positions by counting non-padding tokens, and a shard does not contain the tokens before it. "
            "Set both to 1."
        )


def _reasons_of_config(config: Any) -> Iterator[str]:
    for name in _DROPOUTS:
        rate = getattr(config, name, None)
        if isinstance(rate, (int, float)) and rate > 0:
            yield (
                f"{name}={rate}: sharded attention has no dropout. Load the model with {name}=0.0, or set both to 1."
            )
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        yield (
            f"attn_logit_softcapping={cap}: sharded attention does not cap scores before the softmax. Load the model "
            "with attn_logit_softcapping=None if it was trained without it, or set both to 1."
        )
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    others = sorted(set(layers) - _KNOWN_LAYERS)
    if others:
        yield (
            f"layer_types contains {', '.join(others)}: only full and sliding attention can be sharded. Set both to 1."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and (not layers or "chunked_attention" in layers):
        yield f"attention_chunk_size={chunk}: chunked attention cannot be sharded. Set both to 1."
    if getattr(config, "alibi", False):
        yield "alibi=True: sharded attention has no position bias. Set both to 1."
    if "relative" in str(getattr(config, "position_embedding_type", "")):
        yield (
            f"position_embedding_type={config.position_embedding_type!r}: sharded attention has no position bias. Set "
            "both to 1."
        )
    for name in _OTHER_SEQUENCES:
        if getattr(config, name, None) is not None:
            yield f"it has a {name}: only text sequences can be sharded. Set both to 1."


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether ``position_ids`` reach the embeddings or the attention of a transformers model."""
    if "position_ids" in forward_names(model):
        return True
    body = getattr(model, model.base_model_prefix, None)  # a head that passes all arguments on
    return accepts_any_keyword(model) and isinstance(body, nn.Module) and "position_ids" in forward_names(body)


def _rope_types(parameters: Any) -> list[str]:
    """The rope types in ``rope_parameters``, which has one set of parameters, or one per layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [
        str(inner["rope_type"]) for inner in parameters.values() if isinstance(inner, dict) and "rope_type" in inner
    ]


def is_bidirectional(model: PreTrainedModel) -> bool:
    """Whether transformers builds a bidirectional mask for ``model``; those do not look at position_ids."""
    if not getattr(model.config, "is_causal", True):
        return True
    own = [module for module in model.modules() if not getattr(module, "is_cross_attention", False)]
    causal = {module.is_causal for module in own if isinstance(getattr(module, "is_causal", None), bool)}
    return hasattr(module_of(model), _BIDIRECTIONAL) and True not in causal


def module_of(model: PreTrainedModel) -> Any:
    """The Python module of the class of ``model``."""
    return sys.modules.get(type(model).__module__)
