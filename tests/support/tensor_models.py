"""Models for tensor parallelism: families of transformers, small, without dropout, biases that are not zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import VOCABULARY, tiny_llama

_LLAMA_LIKE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
)
GPT_LIKE = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def of_family(family: str, class_name: str, seed: int = 0, **numbers: Any) -> nn.Module:
    """A model of transformers by the names of its classes; biases get random values."""
    import transformers

    tokens = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, class_name)(
        getattr(transformers, f"{family}Config")(**{**tokens, **numbers})
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def llama_like(family: str, **numbers: Any) -> nn.Module:
    """A causal language model that takes the numbers of a Llama."""
    return of_family(family, f"{family}ForCausalLM", **{**_LLAMA_LIKE, **numbers})


class Mixer(nn.Module):
    """A plain module: a gated MLP between norms, a head, and the mean loss of its micro-batch."""

    shifts_labels = True

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.wide = nn.Linear(24, 37)
        self.inner = nn.Dropout(dropout)
        self.narrow = nn.Linear(37, 24)
        self.outer = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden = self.embedding(input_ids)
        hidden = hidden + self.outer(self.narrow(self.inner(torch.tanh(self.wide(hidden)))))
        logits = self.head(self.norm(hidden))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


MIXER_CUT = {
    "tensor_parallel": {
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": ["wide\\.weight$"], "partition_type": "column"},
                {"patterns": ["narrow\\.weight$"], "partition_type": "row"},
            ],
        }
    }
}

_BART = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=64,
    dropout=0.0,
    decoder_start_token_id=2,
)
_T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
_OPT = dict(
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    dropout=0.0,
    word_embed_proj_dim=32,
)
_BERT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_HEADS_OF_3 = dict(num_attention_heads=3, hidden_size=48, head_dim=16)

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama with 3 heads": partial(tiny_llama, num_key_value_heads=3, **_HEADS_OF_3),
    "tied llama with 3 heads": partial(tiny_llama, tied=True, num_key_value_heads=3, **_HEADS_OF_3),
    "llama with 1 key-value head": partial(tiny_llama, num_key_value_heads=1, **_HEADS_OF_3),
    "llama with 6 heads, 3 of keys": partial(
        tiny_llama, num_attention_heads=6, num_key_value_heads=3, hidden_size=48, head_dim=8
    ),
    "qwen2": partial(llama_like, "Qwen2", num_key_value_heads=2),
    "qwen3": partial(llama_like, "Qwen3", num_key_value_heads=2, head_dim=8),
    "gemma2": partial(llama_like, "Gemma2", num_key_value_heads=2, head_dim=8, attn_implementation="eager"),
    "phi": partial(llama_like, "Phi"),
    "gpt_neox": partial(llama_like, "GPTNeoX"),
    "opt": partial(of_family, "OPT", "OPTForCausalLM", **_OPT),
    "opt with 3 heads": partial(
        of_family,
        "OPT",
        "OPTForCausalLM",
        **{**_OPT, "hidden_size": 48, "word_embed_proj_dim": 48, "num_attention_heads": 3},
    ),
    "gptj": partial(of_family, "GPTJ", "GPTJForCausalLM", rotary_dim=4, **GPT_LIKE),
    "bert": partial(of_family, "Bert", "BertForMaskedLM", **{**_LLAMA_LIKE, **_BERT}),
    "t5": partial(of_family, "T5", "T5ForConditionalGeneration", **_T5),
    "bart": partial(of_family, "Bart", "BartForConditionalGeneration", **_BART),
}
UNSHIFTED = ("bert", "t5", "bart")  # compare position t with label t
