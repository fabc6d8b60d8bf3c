"""What a model takes: columns, labels, keys of samples, and what is said where they do not fit."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import ConfigError, Trainer, TrainingArguments
from ds_trainer.data.collators import ColumnFilterCollator
from ds_trainer.data.columns import (
    accepted_columns,
    accepts_any_keyword,
    base_model,
    drop_unused_columns,
    find_label_names,
    forward_names,
)
from tests.support.models import Regression, regression_rows, tiny_llama


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


class LooksLikePeft(Anything):
    """As PEFT's models: their forward takes anything, ``get_base_model`` is what was wrapped."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_base_model(self) -> nn.Module:
        return self.inner


class Wrapped(Anything):
    """As DistributedDataParallel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def arguments(tmp_path: Path, **more: Any) -> TrainingArguments:
    values = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "save_strategy": "no"}
    return TrainingArguments(str(tmp_path), **{**values, **more})


@pytest.mark.parametrize(
    "wrap", [lambda m: m, LooksLikePeft, Wrapped, lambda m: Wrapped(LooksLikePeft(m)), torch.compile]
)
def test_columns_are_those_of_the_base_model(wrap: Any) -> None:
    model = Regression()
    assert base_model(wrap(model)) is model
    assert forward_names(wrap(model)) == ["x", "labels"]
    assert find_label_names(wrap(model)) == ["labels"]
    assert not accepts_any_keyword(wrap(model))


def test_label_names_are_those_of_transformers() -> None:
    from transformers import (
        BertConfig,
        BertForPreTraining,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertModel,
    )
    from transformers.utils.generic import find_labels

    config = BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    kinds = (BertForQuestionAnswering, BertForSequenceClassification, BertForPreTraining, BertModel)
    found = [find_label_names(kind(config)) for kind in kinds]
    assert found == [find_labels(kind) for kind in kinds]
    assert found[0] == ["start_positions", "end_positions"] and found[3] == []


def test_the_trainer_counts_the_labels_of_the_model(tmp_path: Path) -> None:
    """Question answering: two labels of one dimension, an item is a sample."""
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    rows = [{"input_ids": [1, 2, 3, 4], "start_positions": n % 4, "end_positions": 3} for n in range(6)]
    trainer = Trainer(BertForQuestionAnswering(config), arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
    assert trainer.label_names == ["start_positions", "end_positions"]
    assert trainer.train().global_step == 1
    assert trainer.evaluate()["eval_items"] == 6


def test_a_model_without_named_arguments_gets_all_columns() -> None:
    assert accepted_columns(Anything(), ["labels"]) is None
    assert ColumnFilterCollator(lambda rows: rows, Anything(), accepted_columns(Anything(), []))([{"a": 1}]) == [
        {"a": 1}
    ]


# -- unused keys -----------------------------------------------------------------------------------------------------


class Reader:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def kinds_of_data(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import datasets

    table = datasets.Dataset.from_list(
        [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in r.items()} for r in rows]
    )
    return {"table": table, "list": rows, "reader": Reader(rows), "stream": table.to_iterable_dataset()}


@pytest.mark.parametrize("kind", ["table", "list", "reader", "stream"])
def test_columns_that_the_model_does_not_accept_are_removed(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = kinds_of_data([{**row, "source": "web", "number": 5} for row in regression_rows(4)])[kind]
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level("INFO", logger="ds_trainer"):
        trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=data)
        batches = list(trainer.get_train_dataloader())
    assert [sorted(batch) for batch in batches] == [["labels", "x"]] * 2
    message = [record.getMessage() for record in caplog.records if "does not accept" in record.getMessage()]
    assert len(message) == 1 and "number, source" in message[0].replace("source, number", "number, source")
    trainer.args.remove_unused_columns = False
    assert "number" in next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("kind", ["table", "list"])
def test_no_remaining_columns_is_an_error(kind: str, tmp_path: Path) -> None:
    data = kinds_of_data([{"text": "a"}, {"text": "b"}])[kind]
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.forward accepts none of .*\(text\).*Tokenize"):
        list(Trainer(tiny_llama(), arguments(tmp_path), train_dataset=data).get_train_dataloader())


def test_a_key_missing_in_the_collator_is_explained(tmp_path: Path) -> None:
    rows = [{**row, "weight": 2.0} for row in regression_rows(4)]

    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack([s["x"] for s in samples]), "labels": torch.tensor([s["weight"] for s in samples])}

    trainer = Trainer(Regression(), arguments(tmp_path), data_collator=collate, train_dataset=rows)
    with pytest.raises(ConfigError, match=r"needs 'weight'.*Set remove_unused_columns=False"):
        trainer.train()
    trainer.args.remove_unused_columns = False
    assert trainer.train().global_step == 1


def test_columns_are_known_without_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    rows = [{"x": 1}]
    assert drop_unused_columns(rows, Regression(), accepted_columns(Regression(), [])) is rows


# -- batches that a model cannot take --------------------------------------------------------------------------------


def as_lists(rows: list[Any]) -> Any:
    return {"x": [row["x"].tolist() for row in rows], "labels": [float(row["labels"]) for row in rows]}


def as_label(rows: list[Any]) -> Any:
    return {"x": torch.stack([row["x"] for row in rows]), "label": torch.stack([row["labels"] for row in rows])}


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (as_lists, r"has no tensor \(x: list, labels: list\)"),
        (lambda rows: {}, "has no tensor"),
        (
            as_label,
            "have 'label', which Regression.forward does not take; it takes x, labels. Rename 'label' to 'labels'",
        ),
        (lambda rows: {**as_label(rows), "other": torch.ones(1)}, "have 'label', 'other'"),
    ],
)
def test_wrong_batches_are_rejected_with_a_message(collate: Any, message: str, tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), data_collator=collate, train_dataset=regression_rows(4))
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def test_a_custom_loss_may_use_any_column(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            inputs["labels"] = inputs.pop("label")
            return super().compute_loss(model, inputs, return_outputs)

    trainer = Weighted(Regression(), arguments(tmp_path), data_collator=as_label, train_dataset=regression_rows(4))
    assert trainer.train().global_step == 1


def test_nested_tensors_are_moved_and_counted(tmp_path: Path) -> None:
    from ds_trainer.training.loop.batches import checked_batch
    from ds_trainer.training.loop.device_copies import on_device

    batch = {"image": {"pixels": torch.ones(2), "name": "a"}, "parts": [torch.ones(1), 3]}
    assert checked_batch(batch) is batch
    moved = on_device(batch, torch.device("meta"))
    assert moved["image"]["pixels"].is_meta and moved["parts"][0].is_meta
    assert moved["image"]["name"] == "a" and moved["parts"][1] == 3
