"""The dimensions of a transformer's layers, read from a Hugging Face configuration of a supported model family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Decoders whose MLP has a gate (three matrices), and decoders without one (two). Other families are not supported.
GATED_DECODERS = {
    "llama", "mistral", "mixtral", "ministral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi3", "olmo", "olmo2", "olmo3", "olmoe", "granite", "cohere", "cohere2", "stablelm", "smollm3",
    "glm", "glm4", "helium", "seed_oss", "exaone4", "hunyuan_v1_dense", "ernie4_5",
}  # fmt: skip
PLAIN_DECODERS = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "bloom", "mpt", "falcon", "phi",
    "starcoder2", "biogpt", "xglm",
}  # fmt: skip
EXPERT_DECODERS = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}
ENCODERS = {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "ernie", "data2vec-text"}
T5_LIKE = {"t5", "mt5", "umt5"}
BART_LIKE = {"bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart"}

_VOCABULARY_HEADS = ("CausalLM", "LMHeadModel", "MaskedLM", "PreTraining", "ConditionalGeneration", "MTModel")
_LANGUAGE_HEADS_WITH_TRANSFORM = ("MaskedLM", "PreTraining")  # encoders put a square matrix before the vocabulary

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")


@dataclass(frozen=True)
class Stack:
    """A stack of equal transformer layers. Widths are in elements.

    Args:
        layers: number of layers.
        hidden_size: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads (fewer than ``heads`` in grouped-query attention).
        head_dim: width of one head.
        intermediate_size: inner width of the MLP (of one expert, if there are experts).
        mlp_matrices: weight matrices of the MLP: 3 with a gate, 2 without.
        causal: whether a position attends only to itself and earlier positions.
        window: size of the sliding attention window.
        windowed_layers: number of layers with the window.
        cross_attention: whether each layer also attends to the output of another stack.
        experts: experts per expert layer; 1 without experts.
        experts_per_token: experts that process a token.
        expert_layers: number of layers with experts; the others have one MLP of ``dense_intermediate_size``.
        dense_intermediate_size: inner width of the MLP of the layers without experts.
        shared_intermediate_size: inner width of the shared expert, which processes every token; 0 without one.
        family: key of its formulas of activations; empty for that of the model.
        positions: positions of a sample, if they do not follow from the length of a sequence: patches of an image.
        projection_weights: weights of the attention's projections of a layer, where they are not four matrices between
            the residual stream and the heads (latent attention, relative positions, state spaces).
        outside_weights: weights of matrix products outside of layers that each position passes, on average: patch
            embedding, projector.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    mlp_matrices: int
    causal: bool
    window: int | None = None
    windowed_layers: int = 0
    cross_attention: bool = False
    experts: int = 1
    experts_per_token: int = 1
    expert_layers: int = 0
    dense_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    family: str = ""
    positions: int | None = None
    projection_weights: int | None = None
    outside_weights: float = 0.0

    @property
    def query_width(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Weights of the query, key, value and output projections of one layer, without cross attention."""
        if self.projection_weights is not None:
            return self.projection_weights
        return self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mlp_weights(self, experts: int) -> int:
        """Weights of the MLPs of all layers, counting ``experts`` experts per expert layer."""
        one = self.mlp_matrices * self.hidden_size
        if not self.expert_layers:
            return self.layers * one * self.intermediate_size
        shared = one * self.shared_intermediate_size + (self.hidden_size if self.shared_intermediate_size else 0)
        router = self.hidden_size * self.experts
        layer = experts * one * self.intermediate_size + shared + router
        return self.expert_layers * layer + (self.layers - self.expert_layers) * one * self.dense_intermediate_size


@dataclass(frozen=True)
class Transformer:
    """A whole model: one stack, an encoder and a decoder, or towers and a decoder.

    Args:
        kind: ``decoder``, ``encoder``, ``encoder-decoder``, ``vision-language``, or ``other`` for several stacks that
            are none of these.
        stacks: one, or encoder then decoder, or towers then the decoder; the LM head follows the last one.
        vocabulary: rows of the LM head, applied at every position; 0 without an LM head.
        head_transform: whether a square matrix precedes the head (BERT).
    """

    kind: str
    stacks: tuple[Stack, ...]
    vocabulary: int
    head_transform: bool = False

    @property
    def head_weights(self) -> int:
        """Weights of the head after the last stack."""
        hidden = self.stacks[-1].hidden_size
        return hidden * self.vocabulary + (hidden * hidden if self.head_transform else 0)

    @property
    def largest_matrix(self) -> int:
        """Elements that the largest parameter may have: embedding, gate and up projection together, of all experts."""
        mlps = (2 * stack.hidden_size * stack.intermediate_size * stack.experts for stack in self.stacks)
        return max(self.stacks[-1].hidden_size * self.vocabulary, *mlps)

    @property
    def weights(self) -> int:
        """All weights of matrix products, including all experts and excluding embeddings."""
        total = self.head_weights
        for stack in self.stacks:
            attentions = 2 if stack.cross_attention else 1
            total += int(stack.outside_weights)
            total += stack.layers * stack.attention_weights * attentions + stack.mlp_weights(stack.experts)
        return total

    @property
    def weights_without_vocabulary(self) -> int:
        """:attr:`weights` without those of the vocabulary, for models whose head is the embedding matrix."""
        return self.weights - self.stacks[-1].hidden_size * self.vocabulary


def read_transformer(config: Mapping[str, Any], class_name: str | None = None) -> Transformer | None:
    """The layers that ``config`` describes; None for an unsupported family or a missing number.

    Args:
        config: a Hugging Face configuration as a mapping, with its ``model_type``.
        class_name: class of the model; default: the first entry of ``config["architectures"]``.
    """
    family = config.get("model_type")
    if class_name is None:
        class_name = next(iter(config.get("architectures") or ()), None)
    try:
        if family in GATED_DECODERS | PLAIN_DECODERS:
            stacks: tuple[Stack, ...] = (_decoder(config, str(family)),)
            kind, named = "decoder", "ForCausalLM"
        elif family in ENCODERS:
            stacks, kind, named = (_stack(config, matrices=2, causal=False),), "encoder", "Model"
        elif family in T5_LIKE:
            stacks, kind, named = _t5(config), "encoder-decoder", "ForConditionalGeneration"
        elif family in BART_LIKE:
            stacks, kind, named = _bart(config), "encoder-decoder", "ForConditionalGeneration"
        else:
            return None
    except _MissingNumber:
        return None
    class_name = class_name or named
    has_head = class_name.endswith(_VOCABULARY_HEADS)
    vocabulary = config.get("vocab_size")
    if has_head and not _is_count(vocabulary):
        return None
    return Transformer(
        kind,
        stacks,
        int(vocabulary or 0) if has_head else 0,
        head_transform=kind == "encoder" and class_name.endswith(_LANGUAGE_HEADS_WITH_TRANSFORM),
    )


class _MissingNumber(Exception):
    """A number is missing from the configuration of a supported family."""


def _decoder(config: Mapping[str, Any], family: str) -> Stack:
    values: dict[str, Any] = {}
    heads = _number(config, _HEADS)
    if family == "falcon" and not config.get("new_decoder_architecture"):
        values["kv_heads"] = 1 if config.get("multi_query") else heads
    elif family == "falcon":
        values["kv_heads"] = config.get("num_kv_heads") or heads
    elif family == "gpt_bigcode":
        values["kv_heads"] = 1 if config.get("multi_query") else heads
    elif family == "mpt":
        values["intermediate_size"] = int(config.get("expansion_ratio", 4) * _number(config, _WIDTHS))
    if family in ("falcon", "bloom"):
        values.setdefault("intermediate_size", config.get("ffn_hidden_size") or 4 * _number(config, _WIDTHS))
    if family in EXPERT_DECODERS:
        values.update(_experts(config))
    return _stack(config, matrices=3 if family in GATED_DECODERS else 2, causal=True, **values)


def _stack(config: Mapping[str, Any], *, matrices: int, causal: bool, **values: Any) -> Stack:
    """A stack with the numbers of ``config``, some of them replaced by ``values``."""
    hidden = values.pop("hidden_size", None) or _number(config, _WIDTHS)
    heads = values.pop("heads", None) or _number(config, _HEADS)
    layers = values.pop("layers", None) or _number(config, _LAYERS)
    inner = values.pop("intermediate_size", None) or first_count(config, _MLP_WIDTHS) or 4 * hidden
    numbers: dict[str, Any] = dict(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=first_count(config, ("num_key_value_heads",)) or heads,
        head_dim=first_count(config, ("head_dim",)) or hidden // heads,
        intermediate_size=inner,
        mlp_matrices=matrices,
        causal=causal,
    )
    return Stack(**{**numbers, **window_of(config, layers), **values})


def window_of(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """``window`` and ``windowed_layers`` of a stack of ``layers`` layers; empty without a window."""
    window = config.get("sliding_window") or config.get("window_size")
    if not isinstance(window, int) or not _is_count(window) or config.get("use_sliding_window") is False:
        return {}
    kinds = config.get("layer_types") or config.get("attention_layers")
    windowed = layers
    if kinds is not None:
        windowed = sum(kind in ("sliding_attention", "local") for kind in kinds)
    return {"window": window, "windowed_layers": windowed} if windowed else {}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, inner = _number(config, _LAYERS), _number(config, _MLP_WIDTHS)
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return {
        "experts": _number(config, ("num_local_experts", "num_experts")),
        "experts_per_token": _number(config, ("num_experts_per_tok",)),
        "expert_layers": sum((index + 1) % step == 0 and index not in dense for index in range(layers)),
        "intermediate_size": first_count(config, ("moe_intermediate_size",)) or inner,
        "dense_intermediate_size": inner,
        "shared_intermediate_size": first_count(config, ("shared_expert_intermediate_size",)) or 0,
    }


def _t5(config: Mapping[str, Any]) -> tuple[Stack, Stack]:
    gated = bool(config.get("is_gated_act")) or str(config.get("feed_forward_proj", "")).startswith("gated")
    values = {"head_dim": _number(config, ("d_kv",)), "matrices": 3 if gated else 2}
    decoder_layers = first_count(config, ("num_decoder_layers",)) or _number(config, _LAYERS)
    return (
        _stack(config, causal=False, **values),
        _stack(config, causal=True, cross_attention=True, layers=decoder_layers, **values),
    )


def _bart(config: Mapping[str, Any]) -> tuple[Stack, Stack]:
    def half(name: str) -> dict[str, Any]:
        return {
            "layers": _number(config, (f"{name}_layers",)),
            "heads": _number(config, (f"{name}_attention_heads",)),
            "intermediate_size": _number(config, (f"{name}_ffn_dim",)),
            "matrices": 2,
        }

    return (
        _stack(config, causal=False, **half("encoder")),
        _stack(config, causal=True, cross_attention=True, **half("decoder")),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def first_count(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of ``names`` that is a positive number."""
    return next((int(config[name]) for name in names if _is_count(config.get(name))), None)


def _number(config: Mapping[str, Any], names: Iterable[str]) -> int:
    value = first_count(config, names)
    if value is None:
        raise _MissingNumber
    return value
