"""Parameters of decoders, from the configuration: one description of a layer, and what families do differently.

Source: the constructors of the models in transformers 5; every family is compared with its own modules in
``tests/planner/parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_trainer.planner.parameters.groups import ParameterGroup
from ds_trainer.planner.transformer_shape import Stack

Config = Mapping[str, Any]
Flag = Callable[[Config], bool]


def _always(config: Config) -> bool:
    return True


def _never(config: Config) -> bool:
    return False


def _given(name: str, default: bool = False) -> Flag:
    """Whether the configuration says so."""
    return lambda config: bool(config.get(name, default))


@dataclass(frozen=True)
class Decoder:
    """What a family of decoders has in each layer and around them.

    Attributes:
        norms: norms of a layer that act on the residual stream.
        norm_bias: whether norms have a bias; None if norms have no parameters.
        head_norms: whether queries and keys are normalized, by head (``"head"``) or as a whole (``"full"``).
        qkv_bias: whether the projections of queries, keys and values have a bias.
        out_bias: whether the output projection of the attention has a bias.
        mlp_bias: whether the MLP has biases.
        fused_qkv: name of a single projection of queries, keys and values.
        fused_gate: whether gate and up projection are one matrix.
        names: names of projections that differ from those of Llama.
        positions: how many learned positions there are.
        embedding_norm: whether the embeddings are normalized.
        head_bias: whether the LM head has a bias.
        tied: whether the LM head is the embedding unless the configuration says otherwise.
    """

    norms: int = 2
    norm_bias: Callable[[Config], bool | None] = _never
    head_norms: Callable[[Config], str | None] = field(default=lambda config: None)
    qkv_bias: Flag = _never
    out_bias: Flag = _never
    mlp_bias: Flag = _never
    fused_qkv: str | None = None
    fused_gate: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    positions: Callable[[Config], int] = field(default=lambda config: 0)
    embedding_norm: bool = False
    head_bias: bool = False
    tied: bool = False


def _biases(flag: Flag) -> dict[str, Any]:
    """The same rule for every bias of a layer."""
    return {"qkv_bias": flag, "out_bias": flag, "mlp_bias": flag}


_BIAS = _given("attention_bias")
_ALL_BIAS = _biases(_always)
_LAYER_NORM: dict[str, Any] = {"norm_bias": _always}
_BY_HEAD: dict[str, Any] = {"head_norms": lambda config: "head"}
_WHOLE: dict[str, Any] = {"head_norms": lambda config: "full"}
_FAIRSEQ = {"o_proj": "out_proj", "up_proj": "fc1", "down_proj": "fc2", "mlp": ""}
_GPT2 = {"attn": "attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"}
_NEOX = {"attn": "attention", "o_proj": "dense", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}
_BLOOM = {**_NEOX, "attn": "self_attention"}
_GPTJ = {"attn": "attn", "o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"}


def _length(*names: str, plus: int = 0) -> Callable[[Config], int]:
    return lambda config: next(int(config[name]) for name in names if config.get(name)) + plus


_LLAMA = Decoder(qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=_given("mlp_bias"))
_PLAIN = Decoder()
_GPT2_LIKE: dict[str, Any] = {**_ALL_BIAS, **_LAYER_NORM, "names": _GPT2, "fused_qkv": "c_attn", "tied": True}

DECODERS: dict[str, Decoder] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=_given("mlp_bias"), tied=True),
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "mixtral": _PLAIN,
    "qwen2": Decoder(qkv_bias=_always),
    "qwen2_moe": Decoder(qkv_bias=_given("qkv_bias", True)),
    "qwen3": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, **_BY_HEAD),
    "qwen3_moe": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, **_BY_HEAD),
    "gemma": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, tied=True),
    "gemma2": Decoder(norms=4, qkv_bias=_BIAS, out_bias=_BIAS, tied=True),
    "gemma3_text": Decoder(norms=4, qkv_bias=_BIAS, out_bias=_BIAS, tied=True, **_BY_HEAD),
    "phi3": Decoder(fused_qkv="qkv_proj", fused_gate=True),
    "olmo": Decoder(norm_bias=lambda config: None, qkv_bias=_BIAS, out_bias=_BIAS),
    "olmo2": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, **_WHOLE),
    "olmo3": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, **_WHOLE),
    "olmoe": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, **_WHOLE),
    "cohere": Decoder(
        norms=1,
        qkv_bias=_BIAS,
        out_bias=_BIAS,
        head_norms=lambda config: "full" if config.get("use_qk_norm") else None,
        tied=True,
    ),
    "cohere2": Decoder(norms=1, qkv_bias=_BIAS, out_bias=_BIAS, tied=True),
    "stablelm": Decoder(
        qkv_bias=_given("use_qkv_bias"),
        head_norms=lambda config: "full" if config.get("qk_layernorm") else None,
        **_LAYER_NORM,
    ),
    "glm": Decoder(qkv_bias=_BIAS, fused_gate=True),
    "glm4": Decoder(norms=4, qkv_bias=_BIAS, fused_gate=True),
    "helium": Decoder(qkv_bias=_BIAS, mlp_bias=_given("mlp_bias")),
    "seed_oss": Decoder(
        qkv_bias=_given("attention_bias", True), out_bias=_given("attention_out_bias"), mlp_bias=_given("mlp_bias")
    ),
    "exaone4": Decoder(**_BY_HEAD),
    "hunyuan_v1_dense": Decoder(qkv_bias=_BIAS, out_bias=_BIAS, **_BY_HEAD),
    "ernie4_5": Decoder(
        qkv_bias=_given("use_bias"), out_bias=_given("use_bias"), mlp_bias=_given("use_bias"), tied=True
    ),
    "gpt2": Decoder(positions=_length("n_positions"), **_GPT2_LIKE),
    "gpt_bigcode": Decoder(positions=_length("n_positions"), **_GPT2_LIKE),
    "gpt_neo": Decoder(
        out_bias=_always,
        mlp_bias=_always,
        names={"attn": "attention", "o_proj": "out_proj", "up_proj": "c_fc", "down_proj": "c_proj"},
        positions=_length("max_position_embeddings"),
        tied=True,
        **_LAYER_NORM,
    ),
    "gpt_neox": Decoder(
        qkv_bias=_given("attention_bias", True),
        out_bias=_given("attention_bias", True),
        mlp_bias=_always,
        names=_NEOX,
        fused_qkv="query_key_value",
        **_LAYER_NORM,
    ),
    "gptj": Decoder(norms=1, mlp_bias=_always, names=_GPTJ, head_bias=True, **_LAYER_NORM),
    "codegen": Decoder(norms=1, mlp_bias=_always, names=_GPTJ, fused_qkv="qkv_proj", head_bias=True, **_LAYER_NORM),
    "opt": Decoder(
        names=_FAIRSEQ,
        positions=_length("max_position_embeddings", plus=2),
        tied=True,
        **_biases(_given("enable_bias", True)),
        **_LAYER_NORM,
    ),
    "bloom": Decoder(
        names=_BLOOM, fused_qkv="query_key_value", embedding_norm=True, tied=True, **_ALL_BIAS, **_LAYER_NORM
    ),
    "mpt": Decoder(names={"attn": "attn", "o_proj": "out_proj", "mlp": "ffn"}, fused_qkv="Wqkv", tied=True),
    "phi": Decoder(
        norms=1,
        names={"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"},
        head_bias=True,
        **_ALL_BIAS,
        **_LAYER_NORM,
    ),
    "starcoder2": Decoder(
        names={"up_proj": "c_fc", "down_proj": "c_proj"},
        tied=True,
        **_biases(_given("use_bias", True)),
        **_LAYER_NORM,
    ),
    "biogpt": Decoder(
        names=_FAIRSEQ, positions=_length("max_position_embeddings", plus=2), tied=True, **_ALL_BIAS, **_LAYER_NORM
    ),
    "xglm": Decoder(names=_FAIRSEQ, tied=True, **_ALL_BIAS, **_LAYER_NORM),
}


def decoder_parameters(config: Config, family: str, stack: Stack, *, head: bool) -> list[ParameterGroup] | None:
    """The parameters of a decoder; None for a family that is not described here.

    Args:
        config: a Hugging Face configuration as a mapping.
        family: its ``model_type``.
        stack: the dimensions of its layers.
        head: whether the model has an LM head.
    """
    if family not in DECODERS or _special(config, family):
        return None
    rules, hidden = DECODERS[family], stack.hidden_size
    rows = int(config["vocab_size"])
    groups = [ParameterGroup("embed_tokens.weight", (rows, hidden), "embedding")]
    if rules.positions(config):
        groups.append(ParameterGroup("embed_positions.weight", (rules.positions(config), hidden), "embedding"))
    if rules.embedding_norm:
        groups += _norm("embed_norm", hidden, rules.norm_bias(config), 1)
    groups += _attention(config, rules, stack)
    groups += _mlp(config, rules, stack)
    for index in range(rules.norms):
        groups += _norm(f"norm{index + 1}", hidden, rules.norm_bias(config), stack.layers, stack=0)
    groups += _norm("norm", hidden, rules.norm_bias(config), 1)
    if head and not config.get("tie_word_embeddings", rules.tied):
        groups.append(ParameterGroup("lm_head.weight", (rows, hidden), "head", split=0))
    if head and rules.head_bias:
        groups.append(ParameterGroup("lm_head.bias", (rows,), "head", split=0))
    return groups


def _special(config: Config, family: str) -> bool:
    """Whether the configuration selects a variant that is not described here."""
    if family == "opt":
        narrow = config.get("word_embed_proj_dim") not in (None, config.get("hidden_size"))
        return narrow or not config.get("do_layer_norm_before", True)
    if family == "cohere":
        return bool(config.get("use_qk_norm"))
    if family == "stablelm":
        return bool(config.get("qk_layernorm"))
    return family == "mpt" and not config.get("no_bias", True)


def _linear(
    name: str, rows: int, columns: int, kind: str, layers: int, *, bias: bool, split: int, unit: int = 1
) -> list[ParameterGroup]:
    """A linear layer of each layer: outputs times inputs. ``split`` 0 partitions outputs, 1 inputs."""
    groups = [
        ParameterGroup(
            name=f"{name}.weight", shape=(rows, columns), kind=kind, copies=layers, split=split, stack=0, unit=unit
        )
    ]
    if bias:
        groups.append(
            ParameterGroup(
                name=f"{name}.bias",
                shape=(rows,),
                kind=kind,
                copies=layers,
                split=0 if split == 0 else None,
                stack=0,
                unit=unit,
            )
        )
    return groups


def _norm(
    name: str, width: int, bias: bool | None, copies: int, stack: int | None = None, kind: str = "norm"
) -> list[ParameterGroup]:
    if bias is None:
        return []
    parts = ("weight", "bias") if bias else ("weight",)
    return [ParameterGroup(f"{name}.{part}", (width,), kind, copies, None, stack) for part in parts]


def _attention(config: Config, rules: Decoder, stack: Stack) -> list[ParameterGroup]:
    hidden, layers, head = stack.hidden_size, stack.layers, stack.head_dim
    queries, keys, bias = stack.query_width, stack.kv_heads * head, rules.qkv_bias(config)
    prefix = rules.names.get("attn", "self_attn")
    groups: list[ParameterGroup] = []
    if rules.fused_qkv:
        widths = {rules.fused_qkv: queries + 2 * keys}
    else:
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, width in widths.items():
        groups += _linear(f"{prefix}.{name}", width, hidden, "attention", layers, bias=bias, split=0, unit=head)
    out = f"{prefix}.{rules.names.get('o_proj', 'o_proj')}"
    groups += _linear(out, hidden, queries, "attention", layers, bias=rules.out_bias(config), split=1, unit=head)
    kind = rules.head_norms(config)
    if kind is not None:
        for name, width in (("q_norm", queries), ("k_norm", keys)):
            groups += _norm(f"{prefix}.{name}", head if kind == "head" else width, False, layers, stack=0)
    return groups


def _mlp(config: Config, rules: Decoder, stack: Stack) -> list[ParameterGroup]:
    dense = stack.layers - stack.expert_layers
    width = stack.dense_intermediate_size if stack.expert_layers else stack.intermediate_size
    groups = _dense_mlp(config, rules, stack, width, dense, "mlp") if dense else []
    if stack.expert_layers:
        hidden, inner, layers = stack.hidden_size, stack.intermediate_size, stack.expert_layers
        groups += [
            ParameterGroup("mlp.gate.weight", (stack.experts, hidden), "experts", layers, None, 0),
            ParameterGroup("mlp.experts.gate_up_proj", (stack.experts, 2 * inner, hidden), "experts", layers, 1, 0),
            ParameterGroup("mlp.experts.down_proj", (stack.experts, hidden, inner), "experts", layers, 2, 0),
        ]
        if stack.shared_intermediate_size:
            groups += _dense_mlp(config, rules, stack, stack.shared_intermediate_size, layers, "mlp.shared_expert")
            groups.append(ParameterGroup("mlp.shared_expert_gate.weight", (1, hidden), "experts", layers, None, 0))
    return groups


def _dense_mlp(
    config: Config, rules: Decoder, stack: Stack, width: int, layers: int, prefix: str
) -> list[ParameterGroup]:
    hidden, bias = stack.hidden_size, rules.mlp_bias(config)
    prefix = rules.names.get(prefix, prefix)
    up, down = rules.names.get("up_proj", "up_proj"), rules.names.get("down_proj", "down_proj")
    if stack.mlp_matrices == 2:
        inward = {up: width}
    elif rules.fused_gate:
        inward = {"gate_up_proj": 2 * width}
    else:
        inward = {"gate_proj": width, up: width}
    groups: list[ParameterGroup] = []
    for name, rows in inward.items():
        groups += _linear(f"{prefix}.{name}".lstrip("."), rows, hidden, "mlp", layers, bias=bias, split=0)
    return groups + _linear(f"{prefix}.{down}".lstrip("."), hidden, width, "mlp", layers, bias=bias, split=1)
