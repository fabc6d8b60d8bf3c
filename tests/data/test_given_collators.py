"""Collators of transformers under our names, with a real tokenizer, through a training step."""

from __future__ import annotations

import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_trainer
from ds_trainer import ConfigError, Trainer, TrainingArguments, default_data_collator
from ds_trainer.data.collators import collator_for
from tests.support.models import tiny_llama

TEXTS = ["the cat sat", "the dog sat on the mat and the cat", "a mat", "the dog and the cat sat on a mat"]
NAMES = [name for name in ds_trainer.__all__ if name.startswith("DataCollator")]


@cache
def tokenizer() -> Any:
    """A word tokenizer trained on the spot."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[MASK]", "[EOS]"]
    vocabulary.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", eos_token="[EOS]"
    )


def arguments(tmp_path: Path, **more: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "use_cpu": True,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "learning_rate": 1e-3,
    }
    return TrainingArguments(str(tmp_path), **{**values, **more})


def encoded() -> list[dict[str, Any]]:
    return [dict(tokenizer()(text)) for text in TEXTS]


def labelled() -> list[dict[str, Any]]:
    return [{**row, "labels": list(row["input_ids"])} for row in encoded()]


def first_loss(trainer: Trainer) -> float:
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def bert(kind: str, **more: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(vocab_size=len(tokenizer()), **sizes, **more))


def test_all_collators_of_transformers_are_exported() -> None:
    import transformers

    assert len(NAMES) == 5
    for name in NAMES:
        assert getattr(ds_trainer, name) is getattr(transformers, name)


def test_a_tokenizer_pads_by_default(tmp_path: Path) -> None:
    rows = [{**row, "label": n % 2} for n, row in enumerate(encoded())]
    trainer = Trainer(
        bert("BertForSequenceClassification"), arguments(tmp_path), train_dataset=rows, processing_class=tokenizer()
    )
    assert isinstance(trainer.data_collator, ds_trainer.DataCollatorWithPadding)
    (batch,) = trainer.get_train_dataloader()
    assert batch["labels"].tolist() == [rows[i]["label"] for i in range(4)] or batch["labels"].shape == (4,)
    assert batch["input_ids"].shape == (4, 9)
    assert first_loss(trainer) > 0


def test_a_feature_extractor_pads_but_other_processors_do_not() -> None:
    from transformers import Wav2Vec2FeatureExtractor

    pad = collator_for(Wav2Vec2FeatureExtractor(return_attention_mask=True))
    assert pad([{"input_values": [0.1, 0.2]}, {"input_values": [0.3]}])["input_values"].shape == (2, 2)
    assert collator_for(None) is default_data_collator and collator_for(object()) is default_data_collator


def test_language_modelling(tmp_path: Path) -> None:
    collate = ds_trainer.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = Trainer(tiny_llama(), arguments(tmp_path), collate, train_dataset=encoded())
    assert first_loss(trainer) == pytest.approx(plain_loss(collate(encoded())), rel=1e-5)
    masked = ds_trainer.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5)
    assert first_loss(Trainer(bert("BertForMaskedLM"), arguments(tmp_path), masked, train_dataset=encoded())) > 0


def plain_loss(batch: Any) -> float:
    with torch.no_grad():
        return float(tiny_llama()(**batch).loss)


def test_sequence_to_sequence(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    config = T5Config(vocab_size=len(tokenizer()), decoder_start_token_id=0, pad_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config)
    collate = ds_trainer.DataCollatorForSeq2Seq(tokenizer(), model=model)
    with torch.no_grad():
        wanted = float(model(**collate(labelled())).loss)
    assert first_loss(Trainer(model, arguments(tmp_path), collate, train_dataset=labelled())) == pytest.approx(wanted)


def test_token_classification(tmp_path: Path) -> None:
    rows = [{**row, "labels": [token % 3 for token in row["input_ids"]]} for row in encoded()]
    collate = ds_trainer.DataCollatorForTokenClassification(tokenizer())
    model = bert("BertForTokenClassification", num_labels=3)
    trainer = Trainer(model, arguments(tmp_path), collate, train_dataset=rows, eval_dataset=rows)
    assert first_loss(trainer) > 0
    assert trainer.evaluate()["eval_items"] == sum(len(row["labels"]) for row in rows)


def test_default_collator_class(tmp_path: Path) -> None:
    rows = [{"input_ids": [4, 5, 6], "labels": [4, 5, 6]}] * 4
    collate = ds_trainer.DefaultDataCollator()
    trainer = Trainer(tiny_llama(), arguments(tmp_path), collate, train_dataset=rows)
    assert first_loss(trainer) == pytest.approx(plain_loss(default_data_collator(rows)), rel=1e-5)


class Collator:
    """A collator with state and a length of 0, which is false in a condition."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.calls += 1
        return default_data_collator(rows)

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self(rows)


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["lambda", "partial", "object", "bound method", "class"])
def test_any_callable_is_a_collator(form: str, tmp_path: Path) -> None:
    """It is called for training, evaluation and prediction, and is what the Trainer shows."""
    rows = [{"input_ids": [4, 5, 6], "labels": [4, 5, 6], "note": "x"}] * 4
    counter = Collator()
    collate: Any = {
        "lambda": lambda rows: counter(rows),
        "partial": partial(Collator.collate, counter),
        "object": counter,
        "bound method": counter.collate,
        "class": Rows,
    }[form]
    trainer = Trainer(tiny_llama(), arguments(tmp_path), collate, train_dataset=rows, eval_dataset=rows)
    assert trainer.data_collator is collate
    wanted = plain_loss(default_data_collator(rows))
    assert first_loss(trainer) == pytest.approx(wanted, rel=1e-5)
    trainer.evaluate()
    trainer.predict(rows)
    assert form == "class" or counter.calls == 3


class Rows(dict[str, Any]):
    """A batch class: its constructor collates."""

    def __init__(self, rows: Any) -> None:
        super().__init__(default_data_collator(rows))


def test_flattened_samples_have_the_loss_of_padded_ones(tmp_path: Path) -> None:
    """Padding-free: all samples in one row, kept apart by their positions; the same tokens count."""
    losses, weights = [], []
    for collate in (ds_trainer.DataCollatorWithFlattening(), ds_trainer.DataCollatorForSeq2Seq(tokenizer())):
        values = {"remove_unused_columns": False, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        trainer = Trainer(tiny_llama(), arguments(tmp_path, **values), collate, train_dataset=labelled())
        (first, *_) = trainer.get_train_dataloader()
        assert ("position_ids" in first) == (first["input_ids"].shape[0] == 1)
        losses.append(first_loss(trainer))
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.allclose(weights[0], weights[1], atol=2e-4)


def test_without_transformers_collators_name_the_package_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import ds_trainer\n"
        "try: ds_trainer.DataCollatorWithPadding\n"
        "except ds_trainer.ConfigError as error: print(error)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "DataCollatorWithPadding comes from transformers" in completed.stdout and "pip install" in completed.stdout


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError):
        ds_trainer.DataCollatorForNothing  # noqa: B018
    assert issubclass(ConfigError, ValueError)
