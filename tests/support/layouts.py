"""Models and data for every layout: heads that eight ranks can share, sequences that have to be padded to be sharded.

The oracle never sees a packed or padded batch of ours: it gets the documents, each as a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import attention
from tests.support.models import VOCABULARY, tiny_llama

Row = dict[str, torch.Tensor]

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def grouped_query(seed: int = 0) -> nn.Module:
    """A Llama: 8 query heads on 4 key/value heads."""
    return tiny_llama(seed, num_attention_heads=8, num_key_value_heads=4)


def tied(seed: int = 0) -> nn.Module:
    """A Qwen 3: embedding and head are one weight, queries and keys are normalized head by head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**_SHAPE, num_key_value_heads=8, head_dim=4, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def multi_head(seed: int = 0) -> nn.Module:
    """A Phi: every head has its own keys; biases everywhere, also in the head.

    All of a head is rotated: a bias of keys that are not has a gradient of zero, and Adam makes steps of its rounding.
    """
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(seed)
    return PhiForCausalLM(PhiConfig(**_SHAPE, num_key_value_heads=8, partial_rotary_factor=1.0))


class _Block(nn.Module):
    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # the softmax would not see a bias: see multi_head
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # as many heads as this rank has
            for layer in (self.query, self.key, self.value)
        )
        mixed = attention(q, k, v, causal=True, attention_mask=mask, position_ids=positions)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainAttention(nn.Module):
    """A model that knows nothing of transformers and returns the mean loss over its own part of the batch."""

    shifts_labels = True
    partition_config: dict[str, Any] = {  # noqa: RUF012
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.(query|key|value|up)\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
        ],
    }

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(_Block(32, 4) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attention_mask, position_ids)
        logits = self.head(self.norm(x))
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        if shift_labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()), "logits": logits}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "grouped_query": grouped_query,
    "tied": tied,
    "multi_head": multi_head,
    "plain": PlainAttention,
}


# -- data --------------------------------------------------------------------------------------------------------------


def _document(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=generator)


class Padded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One document a row, of 3 to 23 tokens; :func:`pad` makes batches as long as their longest."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 24, (samples,), generator=generator).tolist()
        self.documents = [[_document(length, generator)] for length in lengths]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Row:
        (tokens,) = self.documents[index]
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


class Packed(Padded):
    """Rows of 20 tokens with one to four documents in each, separated by positions that restart."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.documents = []
        for _ in range(samples):
            boundaries = torch.randint(2, 19, (int(torch.randint(0, 4, (), generator=generator)),), generator=generator)
            edges = [0, *sorted(set(boundaries.tolist())), 20]
            self.documents.append([_document(b - a, generator) for a, b in pairwise(edges)])

    def __getitem__(self, index: int) -> Row:
        documents = self.documents[index]
        labels = torch.cat(documents)
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        return {
            "input_ids": torch.cat(documents),
            "labels": labels.masked_fill(positions == 0, -100),  # no document predicts the next one
            "position_ids": positions,
        }


def pad(rows: Sequence[Row]) -> Row:
    """Rows as one batch, padded at the end to the longest."""
    values = {"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": 0}
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=values[key])
        for key in rows[0]
    }


class Documents(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What the oracle gets of the same data: lists of documents."""

    def __init__(self, data: Padded) -> None:
        self.documents = data.documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return self.documents[index]


def documents_as_rows(samples: Sequence[list[torch.Tensor]]) -> Row:
    """Every document of ``samples`` as a row of its own, padded."""
    documents = [document for sample in samples for document in sample]
    rows = [{"input_ids": d, "labels": d.clone(), "attention_mask": torch.ones_like(d)} for d in documents]
    return pad(rows)


DATA: dict[str, Callable[[], Padded]] = {"padded": partial(Padded, 37), "packed": partial(Packed, 37, 1)}
