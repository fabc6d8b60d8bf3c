"""What a rank does in a test: train with the real Trainer and report a trajectory."""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.weights import gathered
from ds_trainer.monitor.metrics_file import LOSSES
from tests.support.oracle import Trajectory


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters of the trainer's model, gathered."""
    parameters = list(trainer.model.named_parameters())
    with gathered([p for _, p in parameters]):
        return {name: p.detach().cpu().float().clone() for name, p in parameters}


def compatibility_of(trainer: Trainer) -> Trajectory:
    """What the trainer logged, and its weights."""
    logs = [entry for entry in trainer.state.log_history if not entry.keys().isdisjoint(LOSSES)]
    return Trajectory(
        [entry[name] for entry in logs for name in LOSSES if name in entry],
        [entry["grad_norm"] for entry in logs],
        [entry["learning_rate"] for entry in logs],
        whole_weights(trainer),
    )


def train_and_report(
    make_model: Any,
    make_data: Any,
    output_dir: str,
    trainer_class: type[Trainer] = Trainer,
    collator: Any = None,
    resume: str | None = None,
    **arguments: Any,
) -> Trajectory:
    """Train on this rank with every step logged; returns the trajectory."""
    values: dict[str, Any] = dict(
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        max_steps=4,
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    options = {} if collator is None else {"data_collator": collator}
    trainer = trainer_class(make_model(), args, train_dataset=make_data(), **options)
    trainer.train(resume_from_checkpoint=resume)
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report
