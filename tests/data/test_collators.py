"""The default collator: as Hugging Face's where it works, a clear error where it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.data.collators import DefaultDataCollator, default_data_collator
from ds_trainer.data.columns import accepted_columns, drop_unused_columns
from ds_trainer.utils.errors import ConfigError
from tests.support.models import tiny_llama

SAME: list[list[dict[str, Any]]] = [
    [{"input_ids": [1, 2], "label": 3}, {"input_ids": [4, 5], "label": 6}],
    [{"x": torch.ones(2, 3), "labels": [1, -100]}, {"x": torch.zeros(2, 3), "labels": [0, 1]}],
    [{"x": np.ones((2,), np.float32), "label": 0.5}, {"x": np.zeros((2,), np.float32), "label": 1.5}],
    [{"x": 1, "text": "left out", "nothing": None, "label_ids": [1]}, {"x": 2, "text": "too", "label_ids": [2]}],
    [{"x": [0.5, 1.5], "label": True}, {"x": [2.5, 3.5], "label": False}],
    [{"x": [True, False], "label_ids": [0.5, 1.0]}, {"x": [True, True], "label_ids": [0.0, 2.0]}],
    [{"x": 1, "label": 1, "label_ids": [2, 3]}, {"x": 1, "label": 0, "label_ids": [4, 5]}],
    [{"x": 1, "label": None, "label_ids": [2, 3]}, {"x": 1, "label": None, "label_ids": [4, 5]}],
]
OF_TORCH: list[list[dict[str, Any]]] = [
    [{"label": torch.tensor(1, dtype=torch.int32)}, {"label": torch.tensor(0, dtype=torch.int32)}],
    [{"label": torch.tensor(0.5, dtype=torch.float64)}, {"label": torch.tensor(1.5, dtype=torch.float64)}],
    [{"label_ids": torch.tensor([0.5, 1.0])}, {"label_ids": torch.tensor([1.5, 0.0])}],
]
OF_NUMPY: list[list[dict[str, Any]]] = [
    [{"x": np.ones(2, np.int32), "label": np.int32(1)}, {"x": np.zeros(2, np.int32), "label": np.int32(0)}],
    [{"x": np.ones(2), "label_ids": np.ones(2, np.int32)}, {"x": np.zeros(2), "label_ids": np.zeros(2, np.int32)}],
]


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], kind: type) -> None:
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert isinstance(found[key], kind)
        assert found[key].tolist() == values.tolist() and found[key].dtype == values.dtype, key


@pytest.mark.parametrize("rows", [*SAME, *OF_TORCH])
def test_batches_are_those_of_transformers(rows: list[dict[str, Any]]) -> None:
    from transformers import default_data_collator as reference

    assert_equal(default_data_collator(rows), reference(rows), torch.Tensor)
    assert_equal(DefaultDataCollator()(rows), reference(rows), torch.Tensor)
    assert_equal(DefaultDataCollator("np")(rows, return_tensors="pt"), reference(rows), torch.Tensor)


@pytest.mark.parametrize("rows", [*SAME, *OF_NUMPY])
def test_arrays_are_those_of_transformers(rows: list[dict[str, Any]]) -> None:
    from transformers import default_data_collator as reference

    wanted = reference(rows, return_tensors="np")
    if isinstance(rows[0].get("label"), np.integer):  # transformers 5.20 makes floats of NumPy's integers
        wanted["labels"] = wanted["labels"].astype(np.int64)
    assert_equal(default_data_collator(rows, return_tensors="np"), wanted, np.ndarray)
    assert_equal(DefaultDataCollator(return_tensors="np")(rows), wanted, np.ndarray)
    assert_equal(DefaultDataCollator()(rows, "np"), wanted, np.ndarray)


@pytest.mark.parametrize("kind", ["tf", "jax", ""])
def test_other_frameworks_are_refused(kind: str) -> None:
    for collate in (default_data_collator, DefaultDataCollator()):
        with pytest.raises(ConfigError, match=f"return_tensors='{kind}' is not supported. Use 'pt' .*'np'"):
            collate([{"x": 1}], return_tensors=kind)


def test_objects_with_attributes_are_collated() -> None:
    rows = [SimpleNamespace(x=1.5), SimpleNamespace(x=2.5)]
    assert default_data_collator(rows)["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": [1]}, {"x": [1, 2]}], r"differ in 'x': shapes \(1,\), \(2,\).*data_collator"),
        ([{"x": torch.ones(1)}, {"x": torch.ones(2)}], r"differ in 'x'"),
        ([{"x": 1}, {"y": 1}], "Only some samples of a batch have 'x'"),
        ([(1, 2)], "a tuple, but models are called with keywords"),
        ([{"x": 1, "label": "good"}], "'label' of a sample is the text 'good'.*class_encode_column"),
    ],
)
@pytest.mark.parametrize("kind", ["pt", "np"])
def test_values_that_cannot_be_stacked_are_reported(rows: Any, message: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=message):
        default_data_collator(rows, kind)


def test_unused_columns_of_a_dataset_are_removed() -> None:
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]], "source": ["a"]})
    assert drop_unused_columns(data, tiny_llama(), accepted_columns(tiny_llama(), ["labels"])).column_names == [
        "input_ids",
        "labels",
    ]
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.forward accepts none of .*columns \(text\)"):
        drop_unused_columns(
            Dataset.from_dict({"text": ["a"]}), tiny_llama(), accepted_columns(tiny_llama(), ["labels"])
        )
    rows = [{"anything": 1}]
    assert drop_unused_columns(rows, tiny_llama(), accepted_columns(tiny_llama(), ["labels"])) is rows
