"""The reference: ``transformers.Trainer`` itself, in this process, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def reference_run(model: nn.Module, data: Any, output_dir: Any, **arguments: Any) -> tuple[list[float], list[float]]:
    """Train ``model`` with transformers; samples in the dataset's order, every step logged.

    Args:
        model: trained in place.
        data: map-style dataset.
        output_dir: where the reference may write.
        arguments: of ``TrainingArguments``, and of the Trainer: those that start with ``trainer_``.

    Returns:
        Losses and gradient norms of the steps.
    """
    import transformers

    given = {name: arguments.pop(name) for name in list(arguments) if name.startswith("trainer_")}
    values: dict[str, Any] = dict(
        learning_rate=2e-3,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_steps=4,
        train_sampling_strategy="sequential",
    )
    args = transformers.TrainingArguments(str(output_dir), **{**values, **arguments})
    named = {name.removeprefix("trainer_"): value for name, value in given.items()}
    trainer = transformers.Trainer(model, args, train_dataset=data, **named)
    with torch.random.fork_rng():
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [float(entry["loss"]) for entry in logs], [float(entry["grad_norm"]) for entry in logs]


OURS: dict[str, Any] = dict(learning_rate=2e-3, max_grad_norm=1.0, train_sampling_strategy="sequential")
"""Arguments under which :func:`tests.support.runs.train_and_report` does the same."""
