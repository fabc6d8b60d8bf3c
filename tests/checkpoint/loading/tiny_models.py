"""Tiny models of the kinds whose files differ: tied, stacked experts, transposed layers, heads, weight norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from ds_trainer.engine.loading.empty_model import empty_model

_DECODER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
_ENCODER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def _llama(tied: bool) -> Any:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**_DECODER, tie_word_embeddings=tied)


def _qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(**_DECODER, moe_intermediate_size=8, num_experts=12, num_experts_per_tok=2)
    return transformers.Qwen3MoeForCausalLM, config


def _mixtral() -> Any:
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(**_DECODER, num_local_experts=3)


def _gpt_oss() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.GptOssConfig(**_DECODER, num_local_experts=3, num_experts_per_tok=2, layer_types=kinds)
    return transformers.GptOssForCausalLM, config


def _deepseek_v3() -> Any:
    config = transformers.DeepseekV3Config(
        **{**_DECODER, "head_dim": 4},
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    return transformers.DeepseekV3ForCausalLM, config


def _t5() -> Any:
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration, config


def _bert() -> Any:
    return transformers.BertForMaskedLM, transformers.BertConfig(**_ENCODER)


def _clip() -> Any:
    text = {**_ENCODER, "eos_token_id": 2, "bos_token_id": 1}
    vision = {key: value for key, value in _ENCODER.items() if key != "vocab_size"}
    vision = {**vision, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel, transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel, config


def _wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        **{key: value for key, value in _ENCODER.items() if key != "max_position_embeddings"},
        conv_dim=(8, 8),
        conv_stride=(2, 2),
        conv_kernel=(3, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC, config


def _vit() -> Any:
    config = transformers.ViTConfig(
        **{key: value for key, value in _ENCODER.items() if key not in ("vocab_size", "max_position_embeddings")},
        image_size=8,
        patch_size=4,
    )
    return transformers.ViTForImageClassification, config


KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(False),
    "llama, tied": lambda: _llama(True),
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "t5": _t5,
    "bert": _bert,
    "clip": _clip,
    "gpt2": _gpt2,
    "wav2vec2": _wav2vec2,
    "vit": _vit,
}


def make(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights; no two elements alike by construction of a default (norms are random, too)."""
    torch.manual_seed(0)
    model_class, config = KINDS[kind]()
    model = model_class(config).to(dtype)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            tensor.copy_(torch.randn(tensor.shape))
    return model


def on_meta(model_class: Any, config: Any) -> Any:
    """The same architecture without elements."""
    return empty_model(lambda: model_class(config), recorded=False)
