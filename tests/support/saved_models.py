"""Small models of several architectures, saved as ``from_pretrained`` finds them, and what fits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.models import VOCABULARY, tiny_llama

CLASSES = {
    "llama": "AutoModelForCausalLM",
    "tied llama": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForMaskedLM",
    "bert classifier": "AutoModelForSequenceClassification",
}
"""Class of transformers by the name of a model of :func:`saved`."""


def saved(name: str, directory: Path, dtype: torch.dtype = torch.float32, **save: Any) -> str:
    """Write the model ``name`` with random weights; its directory."""
    torch.manual_seed(len(name))
    model: Any = _model(name)
    model.to(dtype).save_pretrained(directory, **save)
    return str(directory)


def _model(name: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, T5Config

    if "llama" in name:
        return tiny_llama(seed=5, tied="tied" in name)
    if name == "t5":
        from transformers import T5ForConditionalGeneration

        sizes: dict[str, Any] = dict(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0
        )
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    bert = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(bert) if "classifier" in name else BertForMaskedLM(bert)


class Labelled(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random tokens with one of three labels, for a classifier."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = [
            {
                "input_ids": torch.randint(3, VOCABULARY, (10,), generator=generator),
                "labels": torch.randint(0, 3, (), generator=generator),
            }
            for _ in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]
