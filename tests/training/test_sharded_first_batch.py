"""The first micro-batch of a training is cut too; what is compared before the first step is a beginning of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.utils.errors import ConfigError
from tests.support.layouts import PlainAttention
from tests.support.pool import pool
from tests.support.runs import train_and_report

LENGTH = 5000  # longer than the beginning


class Long(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that do not fit into the beginning, with a change of each."""

    def __init__(self, change: dict[str, Any], without: str = "", length: int = LENGTH) -> None:
        self.change, self.without, self.length = change, without, length

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(self.length) * (index + 3)) % 50 + 3
        row = {"input_ids": tokens, "labels": tokens.clone(), **self.change}
        row.pop(self.without, None)
        return row


def refusal(output_dir: str, data: Any, make_model: Any = PlainAttention, **values: Any) -> str:
    """What a rank says to the data."""
    with pytest.raises(ConfigError) as caught:
        train_and_report(make_model, lambda: data, output_dir, per_device_train_batch_size=1, max_steps=1, **values)
    return str(caught.value)


BAD: dict[str, tuple[Any, str]] = {
    "no labels": (Long({}, "labels"), "A batch of input_ids has no labels (labels), so the inputs of its loss"),
    "another name": (
        Long({"targets": torch.ones(LENGTH, dtype=torch.int64)}, "labels"),
        "The batches have 'targets', which PlainAttention.forward does not take",
    ),
    "pairs": (
        Long({"attention_mask": torch.ones(8, 8)}, length=8),
        "'attention_mask' of a batch has the shape [1, 8, 8]: it relates tokens to tokens",
    ),
    "a label of another length": (
        Long({"labels": torch.ones(3, dtype=torch.int64)}),
        "'labels' of a batch has integers of the shape [1, 3]",
    ),
    "no tokens": (Long({}, "input_ids"), "A batch of labels has no input_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_every_rank_says_what_is_wrong_with_the_first_batch(name: str, tmp_path: Path) -> None:
    """A ConfigError, and not only that another rank has failed."""
    data, message = BAD[name]
    found = pool(2).run(partial(refusal, str(tmp_path), data, context_parallel_size=2, remove_unused_columns=False))
    assert all(message in text for text in found), found
    assert found[0] == found[1]
