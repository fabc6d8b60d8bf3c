"""Models of transformers that are evaluated under every layout, with data whose batches are ragged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tests.support.models import VOCABULARY, tiny_llama

SAMPLES, LONGEST = 11, 9
Row = dict[str, Any]

_BODY: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    num_labels=3,
)


# Weights are small, so that rounding is below 1e-6 of an output.


def sequence_classifier() -> nn.Module:
    """A class for each sequence, read off its last token."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**_BODY, num_key_value_heads=2, initializer_range=0.06))


def token_classifier() -> nn.Module:
    """A class for each token."""
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**_BODY, attention_probs_dropout_prob=0.0, initializer_range=0.06))


def encoder_decoder() -> nn.Module:
    """A T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=0.3)
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **shape))


class ManyOutputs(nn.Module):
    """A causal language model that also returns its hidden states and a dict of things computed from them."""

    main_input_name = "input_ids"
    shifts_labels = True
    loss_type = "ForCausalLM"  # how transformers' Trainer knows that labels are shifted

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama(initializer_range=0.06)
        self.config = self.inner.config

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        found = self.inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            output_hidden_states=True,
            **more,
        )
        loss = {} if labels is None else {"loss": found.loss}
        states = tuple(found.hidden_states)
        inside = {"choice": found.logits.argmax(-1), "energy": states[-1].double().square().sum(-1)[..., None]}
        return {**loss, "logits": found.logits, "states": states, "inside": inside}


class Kind(NamedTuple):
    """What is evaluated."""

    model: Callable[[], nn.Module]
    rows: Callable[..., list[Row]]
    shifted: bool
    """Whether the prediction at position t is about label t + 1."""
    weighs_samples: bool
    """Whether the loss counts samples, so that it is the one of transformers."""


def rows(samples: int = SAMPLES, labels: str = "tokens") -> list[Row]:
    """Sequences of 2 to :data:`LONGEST` tokens; ``labels`` are the tokens, classes of them, or of the sequence."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(samples):
        length = LONGEST if index == 3 else int(torch.randint(2, LONGEST + 1, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        row: Row = {"input_ids": ids, "attention_mask": [1] * length}
        if labels == "class":
            row["labels"] = sum(ids) % 3
        elif labels == "target":
            row["labels"] = [token for token in reversed(ids)][: 1 + length // 2]
        else:
            wanted = ids if labels == "tokens" else [token % 3 for token in ids]
            row["labels"] = [-100 if position == index % 3 else label for position, label in enumerate(wanted)]
        found.append(row)
    return found


_FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def to_longest(batch: list[Row]) -> dict[str, torch.Tensor]:
    """A batch as wide as its longest row: another batch has another width."""
    made = {}
    for key in batch[0]:
        if isinstance(batch[0][key], int):
            made[key] = torch.tensor([row[key] for row in batch])
        else:
            width = max(len(row[key]) for row in batch)
            made[key] = torch.tensor([row[key] + [_FILL[key]] * (width - len(row[key])) for row in batch])
    return made


KINDS = {
    "sequence classifier": Kind(sequence_classifier, partial(rows, labels="class"), False, True),
    "token classifier": Kind(token_classifier, partial(rows, labels="classes"), False, False),
    "causal LM": Kind(partial(tiny_llama, initializer_range=0.06), rows, True, False),
    "encoder-decoder": Kind(encoder_decoder, partial(rows, labels="target"), False, False),
    "many outputs": Kind(ManyOutputs, rows, True, False),
}


class Scores:
    """Accuracy and macro F1 of whatever was predicted, modulo 3; counts that an order or a duplicate would change."""

    def __init__(self, shifted: bool) -> None:
        self.shifted = shifted

    def __call__(self, found: Any) -> dict[str, float]:
        logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
        labels = found.label_ids
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        wanted = labels != -100
        chosen, labels = logits.argmax(-1) % 3, np.where(wanted, labels % 3, -100)  # a few classes: some are hit
        hits = (chosen == labels) & wanted
        by_class = []
        for name in np.unique(labels[wanted]):
            both = np.sum(hits & (labels == name))
            total = np.sum(wanted & (chosen == name)) + np.sum(labels == name)
            by_class.append(2 * both / total)
        row_weights = np.arange(1, len(labels) + 1).reshape(-1, *(1,) * (labels.ndim - 1))
        return {
            "accuracy": hits.sum() / wanted.sum(),
            "f1": float(np.mean(by_class)),
            "rows": float(len(labels)),
            "order": float((np.where(wanted, labels, 0) * row_weights).sum()),
        }
