"""A training whose first step has no target says so: its loss is 0, and nothing else would show why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import tiny_llama

WARNING = "has no target in the first step"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("labels", "packing", "warns"),
    [
        ([-100] * 8, False, True),
        ([3] + [-100] * 7, False, True),  # the first label of a row is no target
        ([-100] * 7 + [3], False, False),
        ([-100] * 8, True, True),
    ],
)
def test_a_first_step_without_targets(
    labels: list[int], packing: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [{"input_ids": list(range(1, 9)), "labels": labels}] * 4
    more: dict[str, Any] = {"packing": True, "max_length": 16} if packing else {}
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, save_strategy="no", report_to="none", **more)
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        Trainer(tiny_llama(), args, train_dataset=data).train()
    assert caplog.text.count(WARNING) == int(warns)
