"""Small mixtures of experts of transformers: four experts, two of which a token goes through, and no auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 96

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
)
_DEEPSEEK: dict[str, Any] = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
_SHARED: dict[str, Any] = dict(
    n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=16
)
_LINEAR: dict[str, Any] = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=8, moe_intermediate_size=16, num_experts=4)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4)),
    "olmoe": ("OlmoeConfig", dict(num_experts=4)),
    "gpt_oss": ("GptOssConfig", dict(head_dim=8, num_local_experts=4, attn_implementation="eager")),
    "glm4_moe": ("Glm4MoeConfig", dict(head_dim=8, n_group=1, topk_group=1, **_SHARED)),
    "deepseek_v3": ("DeepseekV3Config", dict(n_group=2, topk_group=1, **_SHARED, **_DEEPSEEK)),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            head_dim=8,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=4,
            layer_types=["linear_attention", "full_attention"],
            **_LINEAR,
        ),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        dict(
            text_config=dict(head_dim=8, moe_intermediate_size=16, num_local_experts=4, num_experts_per_tok=2),
            vision_config=dict(
                depth=1,
                hidden_size=16,
                intermediate_size=16,
                num_heads=2,
                out_hidden_size=32,
                patch_size=4,
                num_position_embeddings=16,
                deepstack_visual_indexes=[0],
            ),
            image_token_id=VOCABULARY - 1,
            vision_start_token_id=VOCABULARY - 2,
        ),
    ),
}
"""The configuration class of each family, and what it needs besides."""


def mixture(family: str, to_one_expert: bool = False, **overrides: Any) -> nn.Module:
    """A model of ``family`` with the same weights at every call; perhaps with routers that prefer the first experts."""
    import transformers

    name, own = CONFIGURATIONS[family]
    torch.manual_seed(0)
    values = {**_SHAPE, "num_experts_per_tok": 2, **own, **overrides}
    auto = transformers.AutoModelForCausalLM
    if "text_config" in own:
        values = {**own, "text_config": {**_SHAPE, **own["text_config"], **overrides}}
        auto = transformers.AutoModelForImageTextToText
    config = getattr(transformers, name)(**values)
    model = auto.from_config(config).float()
    if to_one_expert:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith(("gate.weight", "router.weight")):
                    parameter.zero_()  # equal scores: the first experts are chosen
                    parameter.requires_grad_(False)
    return model


def maker(family: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes such models."""
    return _Maker(family, options)


class _Maker:
    """Can be sent to a rank."""

    def __init__(self, family: str, options: dict[str, Any]) -> None:
        self._family = family
        self._options = options

    def __call__(self) -> nn.Module:
        return mixture(self._family, **self._options)
