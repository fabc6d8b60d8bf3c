"""``accelerator_config``: read on ``trainer.accelerator``, followed by loaders of scripts, and in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ds_trainer import ConfigError, Trainer, TrainingArguments
from tests.accelerator.support import accelerator, trainer_for
from tests.support.models import PlainLanguageModel, RaggedTokens
from tests.support.pool import pool

NAMES = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


def test_settings_are_read_where_accelerate_has_them() -> None:
    import accelerate

    assert [getattr(accelerator(), name) for name in NAMES] == [False, None, True, True, False]
    assert all(isinstance(getattr(accelerate.Accelerator, name), property) for name in NAMES)
    other = {name: not value for name, value in zip(NAMES, [False, False, True, True, False], strict=True)}
    config = {**other, "use_configured_state": True, "gradient_accumulation_kwargs": {"num_steps": 3}}
    ours = accelerator(accelerator_config=config)
    assert {name: getattr(ours, name) for name in NAMES} == other
    assert (ours.gradient_accumulation_steps, ours.gradient_state.num_steps) == (3, 3)


def test_a_mapping_that_is_assigned_to_complete_arguments_is_followed_too() -> None:
    args = TrainingArguments("unused", use_cpu=True)
    args.accelerator_config = {"even_batches": False, "split_batches": True}
    ours = Trainer(PlainLanguageModel(), args).accelerator
    assert [getattr(ours, name) for name in NAMES] == [True, None, False, True, False]
    assert len(list(ours.prepare(DataLoader(torch.arange(4), batch_size=2)))) == 2  # type: ignore[arg-type]


def test_even_batches_can_be_set_as_on_the_class_of_accelerate() -> None:
    ours = accelerator()
    ours.even_batches = False
    assert ours.even_batches is False and ours.split_batches is False


def runs(output_dir: str) -> dict[str, Any]:
    """A training with and without ``split_batches``, and loaders of a script."""
    found: dict[str, Any] = {}
    for name, changes in {
        "split": dict(
            per_device_train_batch_size=4, per_device_eval_batch_size=6, accelerator_config={"split_batches": True}
        ),
        "half": dict(per_device_train_batch_size=2, per_device_eval_batch_size=3),
        "whole": dict(per_device_train_batch_size=4, per_device_eval_batch_size=6),
    }.items():
        trainer = trainer_for(output_dir=f"{output_dir}/{name}", max_steps=3, **changes)  # type: ignore[arg-type]
        trainer.train_dataset = RaggedTokens(24)
        shape = next(iter(trainer.get_eval_dataloader(RaggedTokens(24))))["labels"].shape[0]
        total = trainer.get_total_train_batch_size()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[name] = (losses, total, shape)
        trainer.engine.close()
    for even in (True, False):
        ours = accelerator(accelerator_config={"even_batches": even})
        batches = list(ours.prepare(DataLoader(torch.arange(5), batch_size=1)))  # type: ignore[arg-type]
        found[f"even={even}"] = len(batches)
    try:
        config = {"split_batches": True}
        sizes = dict(per_device_train_batch_size=3, per_device_eval_batch_size=5)
        args = TrainingArguments("unused", use_cpu=True, accelerator_config=config, optim_args="aa=1", **sizes)
        Trainer(PlainLanguageModel(), args, train_dataset=RaggedTokens(24))
    except ConfigError as error:
        found["refused"] = error.problems
    return found


@pytest.mark.extended
def test_batches_are_split_and_loaders_of_scripts_follow(tmp_path: Path) -> None:
    ranks = pool(2).run(runs, str(tmp_path))
    for found in ranks:
        (losses, total, samples), (wanted, *sizes) = found["split"], found["half"]
        assert losses == pytest.approx(wanted, rel=1e-6) and len(losses) == 3
        assert [total, samples] == sizes == [4, 3]
        assert found["whole"][1:] == (8, 6) and found["whole"][0] != pytest.approx(losses, rel=1e-4)
        assert [problem.split(" as split")[0] for problem in found["refused"] if "aa" not in problem] == [
            "per_device_train_batch_size=3 cannot be divided by 2 data-parallel replicas,",
            "per_device_eval_batch_size=5 cannot be divided by 2 data-parallel replicas,",
        ]
        assert len(found["refused"]) == 3  # together with the unknown optimizer argument
    assert [found["even=True"] for found in ranks] == [3, 3]  # one sample is repeated
    assert [found["even=False"] for found in ranks] == [3, 2]
