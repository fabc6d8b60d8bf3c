"""Data loader workers end with the loop that reads from them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import Regression, regression_rows


def test_no_worker_outlives_training_and_evaluation(tmp_path: Path) -> None:
    """In the middle of an epoch, too: else the garbage collector finds them, and torch waits seconds for each."""
    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        dataloader_num_workers=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    before = set(multiprocessing.active_children())
    trainer = Trainer(Regression(), args, train_dataset=regression_rows(40), eval_dataset=regression_rows(6))
    trainer.train()
    assert set(multiprocessing.active_children()) <= before
    trainer.evaluate()
    assert set(multiprocessing.active_children()) <= before
