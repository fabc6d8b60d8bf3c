"""Models of transformers with every kind of attention that can be sharded, a few thousand parameters each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.models import VOCABULARY, tiny_llama

KINDS = ["llama", "tied", "mistral", "qwen2", "bert", "modernbert", "gpt2"]
ENCODERS = {"bert", "modernbert"}
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    max_position_embeddings=64,
    pad_token_id=0,
)


def sharded_model(kind: str, seed: int = 0) -> nn.Module:
    """Float64, so that nothing is excused by rounding."""
    import transformers as hf

    decoder = {**_SIZES, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(seed)
    if kind in ("llama", "tied"):
        model = tiny_llama(seed, tied=kind == "tied", num_attention_heads=8)
    elif kind == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**decoder, sliding_window=6))
    elif kind == "qwen2":  # the upper layer slides, the lower one does not
        config = hf.Qwen2Config(**decoder, sliding_window=6, use_sliding_window=True, max_window_layers=1)
        assert config.layer_types == ["full_attention", "sliding_attention"]
        model = hf.Qwen2ForCausalLM(config)
    elif kind == "bert":
        none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        model = hf.BertForTokenClassification(hf.BertConfig(**_SIZES, **none, num_labels=5))
    elif kind == "modernbert":  # slides to both sides
        config = hf.ModernBertConfig(
            **_SIZES, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, bos_token_id=1
        )
        model = hf.ModernBertForMaskedLM(config)
    else:
        none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=8, n_positions=64, **none)
        )
    with torch.no_grad():  # sharp attention: with weights as small as at the start every token sees nearly the same
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(4)
    return model.double()
