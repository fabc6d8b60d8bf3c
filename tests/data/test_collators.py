"""The default collator: as Hugging Face's where it works, a clear error where it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.columns import drop_unused_columns
from ds_trainer.utils.errors import ConfigError
from tests.support.models import tiny_llama

SAME: list[list[dict[str, Any]]] = [
    [{"input_ids": [1, 2], "label": 3}, {"input_ids": [4, 5], "label": 6}],
    [{"x": torch.ones(2, 3), "labels": [1, -100]}, {"x": torch.zeros(2, 3), "labels": [0, 1]}],
    [{"x": np.ones((2,), np.float32), "label": 0.5}, {"x": np.zeros((2,), np.float32), "label": 1.5}],
    [{"x": 1, "text": "left out", "nothing": None, "label_ids": [1]}, {"x": 2, "text": "too", "label_ids": [2]}],
]


@pytest.mark.parametrize("rows", SAME)
def test_batches_are_those_of_transformers(rows: list[dict[str, Any]]) -> None:
    from transformers import default_data_collator as theirs

    found, wanted = default_data_collator(rows), theirs(rows)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype


def test_objects_with_attributes() -> None:
    rows = [SimpleNamespace(x=1.5), SimpleNamespace(x=2.5)]
    assert default_data_collator(rows)["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": [1]}, {"x": [1, 2]}], r"differ in 'x': shapes \(1,\), \(2,\).*data_collator"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(2)}], r"differ in 'x'"),
        ([{"x": 1}, {"y": 1}], "Some samples of a batch have no 'x'"),
        ([(1, 2)], "a tuple, but a model is called by keyword"),
    ],
)
def test_what_cannot_be_stacked_is_named(rows: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        default_data_collator(rows)


def test_unused_columns_of_a_datasets_dataset_go() -> None:
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]], "source": ["a"]})
    assert drop_unused_columns(data, tiny_llama(), ["labels"]).column_names == ["input_ids", "labels"]
    with pytest.raises(ConfigError, match=r"columns \(text\) are none that LlamaForCausalLM.forward takes"):
        drop_unused_columns(Dataset.from_dict({"text": ["a"]}), tiny_llama(), ["labels"])
    rows = [{"anything": 1}]
    assert drop_unused_columns(rows, tiny_llama(), ["labels"]) is rows
