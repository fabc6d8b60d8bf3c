"""An accelerator as the Trainer makes it, without training."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator
from tests.support.models import PlainLanguageModel


def trainer_for(model: nn.Module | None = None, **changes: Any) -> Trainer:
    """A Trainer on this rank that has not trained."""
    values: dict[str, Any] = dict(
        optim="sgd",
        learning_rate=0.1,
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    where = changes.pop("output_dir", "unused")
    return Trainer(model or PlainLanguageModel(), TrainingArguments(where, **{**values, **changes}))


def accelerator(**changes: Any) -> TrainerAccelerator:
    """Its accelerator."""
    return trainer_for(**changes).accelerator
