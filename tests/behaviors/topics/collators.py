"""Collators: the default ones, those for tokenizers, and functions of the user."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.behaviors.api import Api, raised
from tests.behaviors.topics.files import _tokenizer
from tests.support.models import regression_rows


def _shown(batch: Any) -> Any:
    return {name: [type(v).__name__, str(v.dtype), v.tolist()] for name, v in batch.items()}


def lists_of_numbers(api: Api) -> Any:
    return _shown(api.default_data_collator([{"input_ids": [1, 2], "label": 1}, {"input_ids": [3, 4], "label": 0}]))


def label_names(api: Api) -> Any:
    forms: list[dict[str, Any]] = [{"label": 0.5}, {"label": torch.tensor(1)}, {"label_ids": [1, 2]}, {"labels": 1}]
    return [_shown(api.default_data_collator([{"x": 1, **form}] * 2)) for form in forms]


def arrays_and_tensors(api: Api) -> Any:
    rows = [{"x": np.ones(2, np.float32), "y": torch.zeros(2), "label_ids": np.array([1, 2])}] * 2
    return _shown(api.default_data_collator(rows))


def text_and_none_are_left_out(api: Api) -> Any:
    return sorted(api.default_data_collator([{"text": "a", "nothing": None, "x": 1}] * 2))


def numpy_batches(api: Api) -> Any:
    return _shown(api.default_data_collator([{"x": [1, 2], "label": 1}] * 2, return_tensors="np"))


def objects_with_attributes(api: Api) -> Any:
    return _shown(api.default_data_collator([SimpleNamespace(x=[1, 2], label=1)] * 2))


def as_an_object(api: Api) -> Any:
    return _shown(api.DefaultDataCollator()([{"x": [1, 2], "label": 1}] * 2))


def unequal_lengths_are_refused(api: Api) -> Any:
    return raised(api.default_data_collator, [{"x": [1, 2]}, {"x": [1]}])


def a_function_of_the_user(api: Api) -> Any:
    def collate(rows: Any) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.stack([row["labels"] for row in rows])}

    trainer = api.plain_trainer(data_collator=collate)
    return [trainer.data_collator is collate, trainer.train().training_loss]


def default_collator_with_a_tokenizer(api: Api) -> Any:
    return type(api.text_trainer(processing_class=_tokenizer()).data_collator).__name__


def default_collator_without_a_tokenizer(api: Api) -> Any:
    return api.plain_trainer().data_collator is api.default_data_collator


def padding_in_a_run(api: Api) -> Any:
    rows = [{"input_ids": [3] * (2 + i % 3), "labels": [3] * (2 + i % 3)} for i in range(8)]
    collator = api.DataCollatorForSeq2Seq(_tokenizer(), padding=True, label_pad_token_id=-100)
    return api.text_trainer({"max_steps": 2}, train_dataset=rows, data_collator=collator).train().training_loss


def language_modeling_collator(api: Api) -> Any:
    collator = api.DataCollatorForLanguageModeling(_tokenizer(), mlm=False)
    return _shown(collator([{"input_ids": [3, 4]}, {"input_ids": [3]}]))


def collator_sees_only_columns_of_the_model(api: Api) -> Any:
    seen: list[Any] = []

    def collate(rows: Any) -> Any:
        seen.append(sorted(rows[0]))
        return api.default_data_collator(rows)

    rows = [{**row, "text": "x"} for row in regression_rows(8)]
    next(iter(api.plain_trainer(train_dataset=rows, data_collator=collate).get_train_dataloader()))
    return seen[0]
