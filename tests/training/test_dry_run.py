"""A dry run of any Trainer: models with weights, own optimizers, batches that do not fit the model."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.checkpoint import selection
from ds_trainer.training.dry_run import Adapt, DryRun, dry_run
from ds_trainer.training.trainer import Trainer
from ds_trainer.utils import distributed, failures
from ds_trainer.utils.errors import ConfigError
from tests.support.forks import in_a_fork
from tests.support.pool import pool


class Tied(nn.Module):
    """An embedding whose weight is also that of the output, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(16))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.middle(self.embedding(tokens)) * self.scale)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def samples(number: int, key: str = "tokens") -> list[dict[str, torch.Tensor]]:
    return [{key: torch.arange(8), "labels": torch.arange(8)} for _ in range(number)]


def rehearsed(
    folder: Path,
    ranks: int,
    key: str = "tokens",
    own_optimizer: bool = False,
    trainer: type[Trainer] = Trainer,
    **arguments: Any,
) -> DryRun | str:
    def make(adapt: Adapt) -> Trainer:
        values: dict[str, Any] = {"max_steps": 2, "use_cpu": True, "report_to": "none", **arguments}
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters()) if own_optimizer else None
        args = adapt(TrainingArguments(str(folder / "run"), per_device_train_batch_size=1, **values))
        return trainer(model, args, train_dataset=samples(100, key), optimizers=(optimizer, None))

    try:
        return dry_run(make, ranks)
    except ConfigError as error:
        return str(error)


@pytest.mark.cases(3)
@pytest.mark.parametrize("own_optimizer", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_with_weights_and_ties(stage: int, own_optimizer: bool, tmp_path: Path) -> None:
    given = {} if stage == 0 or not own_optimizer else {"deepspeed": {"zero_allow_untested_optimizer": True}}
    found = in_a_fork(_call, tmp_path, 64, {"own_optimizer": own_optimizer, "zero_stage": stage, **given})
    assert isinstance(found, DryRun), found
    assert found.parameters == 64 * 16 + 16 * 16 + 16  # the tied weight once
    assert found.samples == 100
    assert found.samples_per_rank == 1  # of the second, incomplete micro-step rank 0 has none
    assert found.steps_per_epoch == 2
    assert not (tmp_path / "run").exists()


def _call(folder: Path, ranks: int, values: dict[str, Any]) -> DryRun | str:
    return rehearsed(folder, ranks, **values)


def really_started(folder: Path) -> str | None:
    values: dict[str, Any] = {"max_steps": 2, "use_cpu": True, "report_to": "none", "remove_unused_columns": False}
    args = TrainingArguments(str(folder / "run"), per_device_train_batch_size=1, **values)
    try:
        Trainer(Tied(), args, train_dataset=samples(100, "words")).train()
    except ConfigError as error:
        return str(error)
    return None


def test_a_batch_with_another_key_is_found(tmp_path: Path) -> None:
    dry = in_a_fork(_call, tmp_path, 2, {"key": "words", "remove_unused_columns": False})
    assert isinstance(dry, str)
    assert "words" in dry
    assert pool(2).run(really_started, tmp_path) == [dry, dry]


class WithoutSteps(Trainer):
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        return (*super().set_initial_training_values(args, dataloader)[:-1], 0)


def test_a_run_without_steps_is_said_to_be_one(tmp_path: Path) -> None:
    found = in_a_fork(_call, tmp_path, 8, {"trainer": WithoutSteps})
    assert isinstance(found, DryRun), found
    assert (found.max_steps, found.not_rehearsed) == (0, ("a step: this run has none",))


def leave_out_the_arguments(folder: Path) -> None:
    args = TrainingArguments(str(folder / "run"), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="did not pass the arguments"):
        dry_run(lambda adapt: Trainer(Tied(), args, train_dataset=samples(4)), 2)


def test_arguments_that_were_not_adapted_are_an_error(tmp_path: Path) -> None:
    in_a_fork(leave_out_the_arguments, tmp_path)


def state() -> tuple[Any, ...]:
    from deepspeed.accelerator import get_accelerator

    logger = logging.getLogger("ds_trainer.monitor.doctor.startup_checks")
    return (
        *(get_accelerator().device_name(), distributed.is_initialized(), distributed.gather_to_main),
        *(failures.GRACE_SECONDS, selection.SPLIT_BYTES, logger.level),
    )


def rehearse_and_compare(folder: Path) -> None:
    import os

    environment, before = dict(os.environ), state()
    found = rehearsed(folder, 8)
    assert isinstance(found, DryRun), found
    assert state() == before
    after = dict(os.environ)
    assert {name for name in {*environment, *after} if environment.get(name) != after.get(name)} <= {"DS_ACCELERATOR"}
    assert not [thread for thread in threading.enumerate() if "watchdog" in thread.name]


def test_what_was_replaced_in_the_process_is_put_back(tmp_path: Path) -> None:
    in_a_fork(rehearse_and_compare, tmp_path)
