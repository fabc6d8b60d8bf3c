"""``current_gradient_accumulation_steps``: right for a subclass that fetches its batches itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import RaggedTokens, tiny_llama


class FetchesItself(Trainer):
    """Counts in its own way, and looks at the accumulation in each micro-batch."""

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        return batches, torch.tensor(float(sum(batch["input_ids"].numel() for batch in batches)))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(self.current_gradient_accumulation_steps)
        return super().training_step(*args, **kwargs)


def test_a_subclass_that_fetches_batches_sees_the_accumulation(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2
    )
    trainer = FetchesItself(tiny_llama(), args, train_dataset=RaggedTokens(5))
    assert trainer.current_gradient_accumulation_steps == 1
    trainer.seen = []
    trainer.train()
    assert trainer.seen == [2, 2, 2, 2, 1]
