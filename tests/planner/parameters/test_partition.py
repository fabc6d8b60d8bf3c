"""Elements of a tensor-parallel rank of models that are read as modules: those that DeepSpeed allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.planner.memory.elements import elements_of
from ds_trainer.planner.planned_model import PlannedModel

transformers = pytest.importorskip("transformers")

_BERT = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", {**_BERT, "num_attention_heads": 4, "max_position_embeddings": 64}),
    "BertForSequenceClassification": ("BertConfig", {**_BERT, "num_attention_heads": 4, "max_position_embeddings": 64}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {**_T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
# Counted on a rank of two after a step of training; test_deepspeed_allocates_them counts one of them again.
ALLOCATED = {"BertForMaskedLM": 15332, "BertForSequenceClassification": 15234, "T5ForConditionalGeneration": 28288}


def model_of(name: str) -> nn.Module:
    config, values = MODELS[name]
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**values))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_elements_of_a_rank_are_those_that_deepspeed_allocates(name: str) -> None:
    model = model_of(name)
    planned = PlannedModel.from_module(model)
    assert elements_of(planned, 1).total == sum(parameter.numel() for parameter in model.parameters())
    assert elements_of(planned, 2).total == ALLOCATED[name]


def trained(name: str, folder: Path) -> int:
    from ds_trainer import Trainer, TrainingArguments

    model = model_of(name)
    row = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
    quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), max_steps=1, tensor_parallel_size=2, zero_stage=0, **quiet)
    Trainer(model, args, train_dataset=[row] * 16).train()
    return sum(parameter.numel() for parameter in model.parameters())


def test_deepspeed_allocates_them(tmp_path: Path) -> None:
    from tests.support.pool import pool

    name = "T5ForConditionalGeneration"
    assert pool(2).run(trained, name, tmp_path) == [ALLOCATED[name]] * 2
