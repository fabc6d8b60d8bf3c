"""FLOPs of models of every kind that were read from their module, against torch's counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_trainer.planner.flops import forward_flops
from ds_trainer.planner.planned_model import PlannedModel

transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH, TARGETS = 2, 48, 24
TEXT: dict[str, Any] = dict(
    vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=64, pad_token_id=0
)  # fmt: skip
BERT = {**TEXT, "num_key_value_heads": 4, "embedding_size": 48}
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
)  # fmt: skip
SEQ2SEQ: dict[str, Any] = dict(
    vocab_size=101, d_model=48, d_kv=16, d_ff=80, num_layers=2, num_decoder_layers=3, num_heads=4, encoder_layers=2,
    decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=6, encoder_ffn_dim=80, decoder_ffn_dim=96,
    max_position_embeddings=64, decoder_start_token_id=0, pad_token_id=0
)  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, num_experts_per_tok=2,
    moe_intermediate_size=40, head_dim=8
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("MaskedLM", BERT),
    "electra": ("MaskedLM", {**BERT, "embedding_size": 32}),
    "modernbert": ("MaskedLM", BERT),
    "distilbert": ("MaskedLM", {**BERT, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}),
    "vit": ("ImageClassification", VISION),
    "t5": ("Seq2SeqLM", SEQ2SEQ),
    "umt5": ("Seq2SeqLM", SEQ2SEQ),
    "bart": ("Seq2SeqLM", SEQ2SEQ),
    "falcon": ("CausalLM", {name: value for name, value in TEXT.items() if name != "head_dim"}),
    "mixtral": ("CausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("CausalLM", {**TEXT, **EXPERTS}),
    "deepseek_v3": ("CausalLM", {**TEXT, **LATENT}),
    "glm4_moe": ("CausalLM", {**TEXT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                              "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "llava": ("ImageTextToText", {"image_token_id": 99, "vision_config": {**VISION, "model_type": "clip_vision_model"},
                                  "text_config": {**TEXT, "model_type": "llama"}}),
    "paligemma": ("ImageTextToText", {
        "image_token_id": 99, "projection_dim": 48,
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {**TEXT, "model_type": "gemma"}})
}  # fmt: skip


def build(family: str) -> Any:
    task, values = CASES[family]
    config = transformers.AutoConfig.for_model(family, **values)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config, attn_implementation="eager")
    return model.eval()


@pytest.mark.cases(12, rest="extended")
@pytest.mark.parametrize("family", CASES)
def test_as_many_operations_as_torch_counts(family: str) -> None:
    model = build(family)
    ids = torch.randint(3, 99, (SAMPLES, LENGTH))
    inputs = {"input_ids": ids}
    if CASES[family][0].startswith("Image"):
        inputs["pixel_values"] = torch.randn(SAMPLES, 3, 16, 16)
        ids[:, :16] = 99
    if family == "vit":
        del inputs["input_ids"]
    if CASES[family][0] == "Seq2SeqLM":
        inputs["decoder_input_ids"] = ids[:, :TARGETS]
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    found = PlannedModel.from_module(model)
    products, attention = forward_flops(found.transformer, LENGTH, TARGETS, halve_causal=False)
    assert SAMPLES * (products + attention) == pytest.approx(counter.get_total_flops(), rel=0.01)
