"""A token id, a label or a row that is out of the range of the model is named, with what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.loop.index_errors import explain_index_error
from ds_trainer.utils.errors import ConfigError
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool

Rows = list[dict[str, torch.Tensor]]


def trainer_of(tmp_path: Path, model: nn.Module, rows: Rows, **arguments: Any) -> Trainer:
    args = TrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="no", disable_tqdm=True, use_cpu=True, report_to="none", **arguments
    )
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows)


def rows_with(tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Rows:
    return [{"input_ids": tokens, "labels": tokens if labels is None else labels}] * 8


def gpt2(positions: int = 16) -> nn.Module:
    """A model with a learned table of positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": positions}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def classifier(labels: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=VOCABULARY, num_labels=labels))


TOKENS = torch.arange(12) % (VOCABULARY - 4) + 3


@pytest.mark.parametrize("wrong", [VOCABULARY, VOCABULARY + 7, -3])
@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
def test_a_token_beyond_the_vocabulary(tmp_path: Path, wrong: int, evaluates: bool) -> None:
    tokens = TOKENS.clone()
    tokens[5] = wrong
    trainer = trainer_of(tmp_path, tiny_llama(), rows_with(tokens, TOKENS))
    with pytest.raises(
        ConfigError, match=rf"token id {wrong} .*{VOCABULARY} tokens, .*resize_token_embeddings"
    ) as found:
        trainer.evaluate() if evaluates else trainer.train()
    assert isinstance(found.value.__cause__, IndexError)


def errors(output_dir: str, rows: Rows) -> str:
    with pytest.raises(ConfigError) as found:
        trainer_of(Path(output_dir), tiny_llama(), rows, context_parallel_size=2).train()
    return str(found.value)


@pytest.mark.parametrize("of_labels", [False, True], ids=["token", "label"])
def test_sharded_sequences_are_looked_at_too(tmp_path: Path, of_labels: bool) -> None:
    wrong = TOKENS.clone()
    wrong[1] = VOCABULARY + 2
    rows = rows_with(TOKENS, wrong) if of_labels else rows_with(wrong, TOKENS)
    for said in pool(2).run(errors, str(tmp_path), rows):
        assert f"{'label' if of_labels else 'token id'} {VOCABULARY + 2}" in said


@pytest.mark.parametrize("chunk", [0, 4], ids=["whole logits", "chunked"])
def test_a_label_beyond_the_vocabulary(tmp_path: Path, chunk: int) -> None:
    labels = TOKENS.clone()
    labels[5] = VOCABULARY
    trainer = trainer_of(tmp_path, tiny_llama(), rows_with(TOKENS, labels), loss_chunk_tokens=chunk)
    with pytest.raises(ConfigError, match=f"label {VOCABULARY}, .*vocab_size={VOCABULARY}"):
        trainer.train()


def test_a_class_that_the_model_does_not_have(tmp_path: Path) -> None:
    rows = [{"input_ids": TOKENS, "labels": torch.tensor(index % 3)} for index in range(8)]
    trainer = trainer_of(tmp_path, classifier(2), rows)
    with pytest.raises(ConfigError, match=r"label 2, .*num_labels=2, .*more num_labels"):
        trainer.train()


def test_a_row_longer_than_the_table_of_positions(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gpt2(8), rows_with(TOKENS))
    with pytest.raises(ConfigError, match="rows of 12 tokens, but GPT2LMHeadModel has positions for 8"):
        trainer.train()


@pytest.mark.parametrize("error", [IndexError("list index out of range"), RuntimeError("shapes do not match")])
def test_another_error_stays_as_it_is(error: Exception) -> None:
    explain_index_error(error, rows_with(TOKENS[None]), tiny_llama())
    tokens = torch.full((1, 12), VOCABULARY)
    if isinstance(error, RuntimeError):
        explain_index_error(error, rows_with(tokens), tiny_llama())


def test_a_model_without_a_table_of_positions_is_not_blamed_for_long_rows() -> None:
    """Another index error, of a callback for example, in a run with rows beyond what a Llama was trained for."""
    explain_index_error(
        IndexError("list index out of range"), rows_with(TOKENS[None]), tiny_llama(max_position_embeddings=8)
    )


def test_an_assertion_of_a_kernel_is_explained_from_the_batch_in_host_memory() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(ConfigError, match=f"token id {VOCABULARY} "):
        explain_index_error(error, rows_with(torch.full((1, 12), VOCABULARY)), tiny_llama())
    on_device = {"input_ids": torch.full((1, 12), VOCABULARY, device="meta")}  # which may not answer
    explain_index_error(error, [on_device], tiny_llama())
