"""Parameters from a configuration are those of the model, for every family and variant that is described."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from ds_trainer.planner.parameters.decoders import DECODERS, decoder_parameters
from ds_trainer.planner.parameters.groups import total, total_by_kind
from ds_trainer.planner.parameters.modules import module_parameters
from ds_trainer.planner.transformer_shape import read_transformer

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 208,
    "num_hidden_layers": 3,
    "vocab_size": 130,
    "max_position_embeddings": 40,
}
EQUAL_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
GPT2 = {"n_embd": 96, "n_head": 6, "n_layer": 3, "n_inner": 208, "vocab_size": 130, "n_positions": 40}
EXPERTS = {"num_experts_per_tok": 2}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gptj": {**GPT2, "rotary_dim": 16},
    "codegen": {**GPT2, "n_head": 8, "rotary_dim": 8},
    "mpt": {"d_model": 96, "n_heads": 8, "n_layers": 3, "vocab_size": 130},
    "bloom": {"hidden_size": 96, "n_head": 6, "n_layer": 3, "vocab_size": 130},
    "gpt_neo": {
        **{"hidden_size": 96, "num_heads": 6, "num_layers": 4, "intermediate_size": 208, "vocab_size": 130},
        "attention_types": [[["global", "local"], 2]],
    },
    "opt": {**EQUAL_HEADS, "ffn_dim": 208, "word_embed_proj_dim": 96},
    "xglm": {"d_model": 96, "ffn_dim": 208, "attention_heads": 6, "num_layers": 3, "vocab_size": 130},
    "biogpt": EQUAL_HEADS,
    "gpt_neox": EQUAL_HEADS,
    "helium": {**SIZES, "head_dim": 16},
    "hunyuan_v1_dense": {**SIZES, "head_dim": 16},
    "ministral": {**SIZES, "head_dim": 16},
    "mixtral": {**SIZES, **EXPERTS, "num_local_experts": 4},
    "olmoe": {**SIZES, **EXPERTS, "num_experts": 4},
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen2_moe": {
        **{**SIZES, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 48},
        "shared_expert_intermediate_size": 64,
    },
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": True},
    {"head_dim": 32},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"mlp_bias": True},
    {"use_qkv_bias": True},
    {"use_bias": False},
    {"qkv_bias": False},
    {"enable_bias": False},
]


def meta_model(family: str, **values: Any) -> Any:
    config = transformers.AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", DECODERS)
def test_every_shape_is_that_of_the_model(family: str) -> None:
    defaults = transformers.AutoConfig.for_model(family)
    tried = 0
    for variant in VARIANTS:
        if not all(hasattr(defaults, name) for name in variant) or (family == "helium" and "head_dim" in variant):
            continue  # helium's output projection ignores another head_dim
        model = meta_model(family, **{**OWN_SIZES.get(family, SIZES), "pad_token_id": 0, **variant})
        config = model.config.to_dict()
        shape = read_transformer(config, type(model).__name__)
        assert shape is not None
        found = decoder_parameters(config, family, shape.stacks[0], head=True)
        assert found is not None
        wanted = Counter(tuple(sorted(parameter.shape)) for parameter in model.parameters())
        counted: Counter[tuple[int, ...]] = Counter()
        for group in found:
            counted[tuple(sorted(group.shape))] += group.copies
        assert counted == wanted, variant
        assert total(found) == sum(parameter.numel() for parameter in model.parameters())
        tried += 1
    assert tried >= 3


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt2", "gemma2"])
def test_a_module_has_the_kinds_of_its_configuration(family: str) -> None:
    model = meta_model(family, **{**OWN_SIZES.get(family, SIZES), "pad_token_id": 0})
    config = model.config.to_dict()
    shape = read_transformer(config, type(model).__name__)
    assert shape is not None
    described = decoder_parameters(config, family, shape.stacks[0], head=True)
    walked = module_parameters(model)
    assert described is not None
    assert total_by_kind(walked) == total_by_kind(described)
    layers = {group.copies for group in walked if group.stack is not None}
    assert layers == {shape.stacks[0].layers}


def test_a_family_or_variant_that_is_not_described() -> None:
    stack = read_transformer({**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    assert stack is not None
    assert decoder_parameters(SIZES, "falcon", stack.stacks[0], head=True) is None
    assert decoder_parameters({**SIZES, "use_qk_norm": True}, "cohere", stack.stacks[0], head=True) is None
