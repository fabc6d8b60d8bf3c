"""How many samples a batch has, whatever the collator returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.data.batch_structure import counted, number_of_samples

ROWS = torch.ones(3, 2)


@dataclass
class Pair:
    texts: list[str]
    rows: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"x": ROWS, "labels": torch.ones(3)}, 3),
        ({"flag": torch.tensor(1.0), "x": ROWS}, 3),
        ({"queries": {"input_ids": ROWS}, "passages": {"input_ids": torch.ones(6, 2)}}, 3),
        ({"scores": None, "nested": {"deeper": {"x": ROWS}}}, 3),
        ({"nested": {"x": torch.ones(5)}, "x": ROWS}, 3),
        ({"images": [torch.ones(2), torch.ones(4)]}, 2),
        ({"texts": ["a", "b"], "flag": True}, 2),
        ({"x": torch.ones(0, 2)}, 0),
        ({"loss_only": torch.tensor(1.0)}, 1),
        ([ROWS, torch.ones(2, 2)], 2),
        ([ROWS, torch.ones(3)], 3),
        (({"input_ids": ROWS}, {"labels": torch.ones(5)}), 3),
        ([{"x": ROWS}, {"x": ROWS}], 2),
        ((torch.tensor(1.0), ROWS, ["a"]), 3),
        (ROWS, 3),
        ("text", 1),
        (Pair(["a", "b", "c"], ROWS), 3),
        ({"pair": (ROWS, ROWS)}, 3),
        (counted([{"x": ROWS}, {"x": ROWS}], 3), 3),
        (counted(("a", "b", "c", "d"), 2), 2),
    ],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert number_of_samples(batch) == samples


class Pairs(nn.Module):
    """Takes two inputs, each of them a mapping, as embedding models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, queries: dict[str, torch.Tensor], passages: dict[str, torch.Tensor]) -> dict[str, Any]:
        scores = self.layer(queries["x"]) @ self.layer(passages["x"]).T
        return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(scores)))}


def test_a_model_with_nested_inputs_is_trained(tmp_path: Path) -> None:
    """Its loss counts, and is that of plain PyTorch."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        values = torch.stack([row["x"] for row in rows])
        return {"queries": {"x": values}, "passages": {"x": values.flip(1)}}

    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=generator)} for _ in range(4)]
    args = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, logging_steps=1, remove_unused_columns=False,
        save_strategy="no", use_cpu=True
    )  # fmt: skip
    trainer = Trainer(Pairs(), args, data_collator=collate, train_dataset=rows)
    trainer.train()
    order = [rows[i]["x"] for i in range(4)]
    batch = collate([{"x": value} for value in order])
    loss = float(Pairs()(**batch)["loss"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert trainer.state.log_history[0]["grad_norm"] > 0
    trainer.engine.close()
