"""Small models and data for tests: thousands of parameters, ragged targets, real architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 61
LENGTH = 12


def tiny_llama(seed: int = 0, tied: bool = False, **overrides: Any) -> nn.Module:
    """A two-layer Llama with grouped-query attention and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**values, **overrides}))


class PlainLanguageModel(nn.Module):
    """A model that knows nothing of transformers: returns the *mean* loss over its own micro-batch."""

    shifts_labels = True

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.mixer = nn.GRU(24, 24, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden, _ = self.mixer(self.embedding(input_ids))
        logits = self.head(self.dropout(self.norm(hidden)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class RaggedTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random tokens; every sample has another number of targets (some padding at the end, some masked inside)."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(samples):
            tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
            used = int(torch.randint(3, LENGTH + 1, (), generator=generator))
            labels = tokens.clone()
            labels[used:] = -100
            labels[1 : 1 + int(torch.randint(0, 2, (), generator=generator))] = -100
            mask = (torch.arange(LENGTH) < used).long()
            self.rows.append({"input_ids": tokens * mask, "labels": labels, "attention_mask": mask})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Regression(nn.Module):
    """Mean squared error: a loss per sample, not per token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = self.layers(x).squeeze(-1)
        return F.mse_loss(prediction, labels), prediction


def regression_rows(samples: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples for :class:`Regression`."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(samples, 6, generator=generator)
    return [{"x": x, "labels": (x.sum() + 0.1 * x[0] ** 2)} for x in xs]
