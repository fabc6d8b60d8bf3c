"""Model FLOPs from the architecture, against the operations that torch counts in real forward and backward passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_trainer.planner.flops import FlopRule, Weights
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.transformer_shape import Transformer
from tests.support import tiny_models as families

# What is left out: gates of shared experts' sigmoid, poolers on one position, rotary tables.
TOLERANCE = 0.01

SAMPLES, LENGTH, TARGETS = 3, 40, 24
DECODER: dict[str, Any] = dict(
    vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0
)  # fmt: skip
GPT2: dict[str, Any] = dict(vocab_size=101, n_embd=48, n_layer=3, n_head=4, n_positions=64)
T5: dict[str, Any] = dict(
    vocab_size=101, d_model=48, d_kv=16, d_ff=80, num_layers=2, num_decoder_layers=3, num_heads=4,
    decoder_start_token_id=0
)  # fmt: skip
BART: dict[str, Any] = dict(
    vocab_size=101, d_model=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=6, encoder_ffn_dim=80, decoder_ffn_dim=96, max_position_embeddings=64
)  # fmt: skip
OWN_KV = {**DECODER, "num_key_value_heads": 4}

# class of the model, of its configuration, numbers
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, grouped heads": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama, tied head": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "tie_word_embeddings": True}),
    "llama without a head": ("LlamaModel", "LlamaConfig", DECODER),
    "llama, wide heads": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "head_dim": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": None}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**DECODER, "sliding_window": None}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2, own MLP width": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "n_inner": 64}),
    "gpt neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", OWN_KV),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        dict(vocab_size=101, hidden_size=48, num_hidden_layers=3, ffn_dim=80, num_attention_heads=4,
             max_position_embeddings=64, word_embed_proj_dim=48)
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", dict(
        vocab_size=101, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, multi_query=True)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2 moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **DECODER, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **DECODER, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}),
    "bert, masked": ("BertForMaskedLM", "BertConfig", OWN_KV),
    "bert, classes": ("BertForTokenClassification", "BertConfig", {**OWN_KV, "num_labels": 2}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", OWN_KV),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5, gated": ("T5ForConditionalGeneration", "T5Config", {**T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART)
}  # fmt: skip


def build(name: str) -> nn.Module:
    model_class, config_class, values = CASES[name]
    config = getattr(transformers, config_class)(**values)
    config._attn_implementation = "eager"  # fused attention is one operation, and not every one is in torch's table
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config)


def counted(model: nn.Module, samples: int, length: int, targets: int) -> int:
    """Operations of one forward and backward pass, as torch sees them."""
    inputs = {"input_ids": torch.randint(3, 101, (samples, length))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, 101, (samples, targets))
    model.eval()  # some families leave out whole layers at random while they train
    with FlopCounterMode(display=False) as counter:
        outputs = model(**inputs)
        outputs[0].float().square().mean().backward()
    return counter.get_total_flops()


def weights_of(model: nn.Module) -> Weights:
    embedded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    rest = [p for p in model.parameters() if id(p) not in embedded]
    return Weights(sum(p.numel() for p in rest), sum(p.numel() for p in rest if p.requires_grad))


@pytest.mark.cases(22, rest="extended")
@pytest.mark.parametrize("name", CASES)
def test_as_many_operations_as_torch_counts(name: str) -> None:
    model = build(name)
    rule = FlopRule.of(ModelShape.from_model(model), weights_of(model))
    assert rule is not None and rule.transformer is not None
    found = rule.flops(SAMPLES, LENGTH, TARGETS)
    assert found == pytest.approx(counted(model, SAMPLES, LENGTH, TARGETS), rel=TOLERANCE)


SMALL: dict[str, Any] = dict(
    vocab_size=101, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
    n_positions=64, pad_token_id=0
)  # fmt: skip
OWN_NAMES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "opt": {"word_embed_proj_dim": 48, "ffn_dim": 80},
    "xglm": {"ffn_dim": 80},
    "starcoder2": {"sliding_window": None},
    "stablelm": {"head_dim": None, "hidden_size": 64},
    "distilbert": {"hidden_dim": 80},
}


def of_family(family: str) -> nn.Module:
    """A small model of a family with its own habits: heads, gates, ties and names."""
    kind: Any = transformers.AutoModelForCausalLM
    if family in families.GATED_DECODERS:
        values = {**DECODER, "head_dim": 12, "sliding_window": 64}
    elif family in families.PLAIN_DECODERS:
        values = SMALL
    elif family in families.ENCODERS:
        kind, values = transformers.AutoModelForMaskedLM, OWN_KV
    else:
        kind, values = transformers.AutoModelForSeq2SeqLM, T5 if family.endswith("t5") else BART
        values = {**values, "pad_token_id": 0}
    if family in families.EXPERT_DECODERS:
        values = {**values, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    if family in ("qwen2_moe", "qwen3_moe"):
        values = {**values, "moe_intermediate_size": 40}
    config = transformers.AutoConfig.for_model(family, **{**values, **OWN_NAMES.get(family, {})})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model: nn.Module = kind.from_config(config, attn_implementation="eager")
    return model


OTHER_SHAPES = {"electra", "modernbert", "deberta-v2"}  # tests/planner/test_module_flops.py
ALL_FAMILIES = sorted(
    {*families.GATED_DECODERS, *families.PLAIN_DECODERS, *families.ENCODERS, *families.SEQ2SEQ} - OTHER_SHAPES
)


def transformer_of(config: dict[str, Any]) -> Transformer:
    """The layers of a configuration."""
    return PlannedModel.from_config(config).transformer


def without_gate(model: nn.Module) -> Transformer:
    """The layers of ``model`` as if their MLPs had two matrices."""
    found = transformer_of(model.config.to_dict())
    return replace(found, stacks=(replace(found.stacks[0], mlp_matrices=2),))


@pytest.mark.cases(20)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_that_is_named(family: str) -> None:
    model = of_family(family)
    rule = FlopRule.of(ModelShape.from_model(model), weights_of(model))
    assert rule is not None and rule.transformer is not None
    found = rule.flops(SAMPLES, LENGTH, TARGETS)
    assert found == pytest.approx(counted(model, SAMPLES, LENGTH, TARGETS), rel=TOLERANCE)


def test_control_a_count_without_the_gate_is_detected() -> None:
    """Negative control of the table above: Llama read as a model without a gate is far off."""
    model = build("llama, grouped heads")
    rule = FlopRule(None, without_gate(model), "")
    assert rule.flops(SAMPLES, LENGTH) < 0.9 * counted(model, SAMPLES, LENGTH, 0)


def test_a_shape_that_does_not_explain_the_parameters_is_not_trusted() -> None:
    model = build("llama, grouped heads")
    weights = weights_of(model)
    rule = FlopRule.of(ModelShape(transformer=without_gate(model)), weights)
    assert rule is not None and rule.transformer is None
    assert rule.flops(SAMPLES, LENGTH) == 6 * weights.total * SAMPLES * LENGTH
    assert rule.source == "6 x parameters outside the embeddings, without attention"


def test_a_model_without_a_known_shape() -> None:
    assert FlopRule.of(ModelShape()) is None
    assert FlopRule.of(ModelShape(), Weights(0, 0)) is None
    rule = FlopRule.of(ModelShape(), Weights(total=100, trainable=25))
    assert rule is not None
    assert rule.flops(2, 8) == 16 * (6 * 25 + 4 * 75)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    """Everything frozen but the last layer's MLP and the embedding, below which gradients still flow."""
    model = build("llama, grouped heads")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.2.mlp" in name or "embed_tokens" in name
    rule = FlopRule.of(ModelShape.from_model(model), weights_of(model))
    assert rule is not None
    assert rule.flops(SAMPLES, LENGTH) == pytest.approx(counted(model, SAMPLES, LENGTH, 0), rel=TOLERANCE)
    all_trained = FlopRule(None, rule.transformer, "").flops(SAMPLES, LENGTH)
    assert rule.flops(SAMPLES, LENGTH) < 0.85 * all_trained


@pytest.mark.parametrize("window", [None, 16, 4096])
def test_causal_attention_counts_half(window: int | None) -> None:
    length = 512
    config = {**DECODER, "model_type": "mistral", "sliding_window": window}
    rule = FlopRule(None, transformer_of(config), "")
    attention = 12 * 3 * 48  # layers x query width
    assert rule.transformer is not None
    products = 6 * rule.transformer.weights * length
    full = rule.flops(1, length) - products
    half = rule.flops(1, length, halve_causal=True) - products
    assert full == attention * length * min(length, window or length)
    # The diagonal belongs to the visible half: half a position for each.
    # Pairs of positions that a causal mask with a window leaves.
    positions = torch.arange(length)
    distance = positions[:, None] - positions[None, :]
    assert half == pytest.approx(attention * int(((distance >= 0) & (distance < (window or length))).sum()), rel=0.04)


def test_attention_windows_of_some_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {**DECODER, "model_type": "gemma2", "sliding_window": 8, "layer_types": kinds}
    model = transformer_of(config)
    assert (model.stacks[0].window, model.stacks[0].windowed_layers) == (8, 2)
    unused = transformer_of({**DECODER, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False})
    assert unused.stacks[0].window is None


def test_a_published_figure() -> None:
    """Llama 2 7B: 6.74 billion parameters, of which 131 million are the input embedding."""
    config = dict(
        model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32
    )  # fmt: skip
    shape = ModelShape.from_config(config)
    assert shape.transformer is not None
    assert shape.transformer.weights == pytest.approx(6.738e9 - 32000 * 4096, rel=1e-3)
    rule = FlopRule.of(shape)
    assert rule is not None
    assert rule.flops_per_token(4096) == 6 * shape.transformer.weights + 12 * 32 * 4096 * 4096


def test_layers_of_other_models_are_not_guessed() -> None:
    for config in ({"model_type": "mamba", "hidden_size": 48}, {"model_type": "mystery", **DECODER}, {}):
        assert ModelShape.from_config(config).transformer is None


class Tied(nn.Module):
    """A module of a user with a configuration like that of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.LlamaConfig(**DECODER)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))


def test_a_module_of_a_user_has_no_known_layers() -> None:
    assert ModelShape.from_model(Tied()).transformer is None


def test_the_layers_of_a_model_are_read_before_tensor_parallelism_cuts_them() -> None:
    model = build("llama, grouped heads")
    whole = ModelShape.from_model(model).transformer
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight[:40].detach())  # type: ignore[union-attr]
    assert ModelShape.from_model(model).transformer == whole
    model.resize_token_embeddings(120)  # type: ignore[operator]
    assert ModelShape.from_model(model).transformer != whole
