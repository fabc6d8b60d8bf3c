"""The self-check at the start: models that mix tokens by themselves are seen, the others pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import attention
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model.sequence_sharding.attention_modules import use_sharded_attention
from ds_trainer.training.model.sequence_sharding.setup import check_sharded_model
from ds_trainer.utils.errors import ConfigError
from tests.support.attention import plan_of
from tests.support.full_attention import packed, padded
from tests.support.models import VOCABULARY, PlainLanguageModel
from tests.support.pool import pool
from tests.training.model.sharded_models import sharded_model


class OwnModel(nn.Module):
    """Our attention, and optionally another operation that mixes tokens."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Embedding(64, 16)
        self.mix = nn.Linear(16, 48)
        self.conv = nn.Conv1d(16, 16, 2, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, tokens = input_ids.shape
        if position_ids is None or self.fault == "own positions":
            position_ids = torch.arange(tokens)[None]
        hidden = self.dropout(self.embedding(input_ids) + self.places(position_ids))
        if self.fault == "convolution":
            hidden = hidden + self.conv(hidden.transpose(1, 2))[..., :tokens].transpose(1, 2)
        if self.fault == "mean of tokens":
            hidden = hidden - hidden.mean(1, keepdim=True)
        query, key, value = self.mix(hidden).view(batch, tokens, 4, 12).transpose(1, 2).chunk(3, dim=-1)
        if self.fault == "attention of its own":
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = attention(query, key, value, attention_mask=attention_mask, position_ids=position_ids)
        hidden = hidden + seen.transpose(1, 2).flatten(2)
        return self.head(hidden.mean(1) if self.fault == "one result a sequence" else hidden)


def case(kind: str, rows: str, cp: int, sp: int) -> float | str:
    layout = ParallelLayout(cp * sp, cp=cp, sp=sp)
    groups = parallel_groups(layout)
    length = 4 * cp * sp
    torch.manual_seed(0)
    tokens, positions = torch.randint(3, VOCABULARY, (2, length)), torch.arange(length).expand(2, -1)
    documents = valid = None
    if rows == "packed":
        documents, positions = packed(2, length)
    if rows == "padded":
        valid = padded(2, length)
    plan = plan_of(layout, length, documents, valid)
    indices = plan.positions(groups.coordinates.cp, groups.coordinates.sp)
    mask = None if valid is None else valid.long()
    model: Any
    if kind == "recurrent":
        model = PlainLanguageModel()
        full = lambda: model(tokens, tokens)["logits"]  # noqa: E731
        sharded = lambda: model(tokens[:, indices], tokens[:, indices])["logits"]  # noqa: E731
    else:
        model = sharded_model("llama").float() if kind == "llama" else OwnModel(kind)
        use_sharded_attention(model, layout)
        take = (lambda answer: answer.logits) if kind == "llama" else (lambda answer: answer)
        cacheless = {"use_cache": False} if kind == "llama" else {}  # with a cache transformers looks for no documents
        full = lambda: take(model(tokens, position_ids=positions, attention_mask=mask, **cacheless))  # noqa: E731
        sharded = lambda: take(model(tokens[:, indices], position_ids=positions[:, indices]))  # noqa: E731
    model.train()
    model.head.eval() if hasattr(model, "head") else model.lm_head.eval()  # modes come back one by one
    try:
        return check_sharded_model(model, full, sharded, plan, groups)
    except ConfigError as error:
        return str(error)
    finally:
        assert model.training and not (model.head if hasattr(model, "head") else model.lm_head).training


@pytest.mark.parametrize(("cp", "sp"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("rows", ["whole", "packed", "padded"])
@pytest.mark.parametrize("kind", ["llama", ""])
def test_models_that_support_sharding_pass(kind: str, rows: str, cp: int, sp: int) -> None:
    answers = pool(cp * sp).run(case, kind, rows, cp, sp)
    assert all(isinstance(answer, float) and answer < 1e-5 for answer in answers), answers
    assert len(set(answers)) == 1


FAULTS = {
    "recurrent": "PlainLanguageModel: .* never called our attention",
    "attention of its own": "never called our attention",
    "convolution": r"differ from those of the full one by a relative 0.* another output: mix \(Linear\)",
    "mean of tokens": r"differ from those of the full one by a relative 0.* another output: mix \(Linear\)",
    "own positions": r"differ from those of the full one by a relative [01].* another output: dropout \(Dropout\)",
    "one result a sequence": r"shape \[2, 61\] for 8 tokens",
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_unsupported_models_are_rejected_with_the_measured_difference(fault: str) -> None:
    for answer in pool(2).run(case, fault, "whole", 1, 2):
        assert isinstance(answer, str), answer
        with pytest.raises(ValueError, match=FAULTS[fault]):
            raise ValueError(answer)
        assert "sequence_parallel_size=2" in answer and "both to 1" in answer
