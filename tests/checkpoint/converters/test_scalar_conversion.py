"""Parameters without dimensions in checkpoints of DeepSpeed, read and written: the same next losses.

DeepSpeed makes engines for such models only where
:func:`ds_trainer.engine.scalar_parameters.allow_scalar_parameters` was called, as it is
in every rank here; other versions of it need no help.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.converters.checkpoint_import import export_universal
from tests.support import plain_deepspeed as plain
from tests.support.models import regression_rows
from tests.support.oracle import stack
from tests.support.pool import pool
from tests.support.scalar_models import Scalars

BATCH, STOP, STEPS = 8, 2, 4
CLOSE = {"rel": 0, "abs": 1e-6}


class Numbers(Scalars):
    """Without parameters of no elements, which plain DeepSpeed does not gather under ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused, self.nothing
        self.nothing = torch.zeros(())


def train_with_trainer(output_dir: str, stage: int, resume: str | None = None, **arguments: Any) -> list[float]:
    args = TrainingArguments(
        output_dir,
        zero_stage=stage,
        per_device_train_batch_size=BATCH // torch.distributed.get_world_size(),
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **arguments},
    )
    trainer = Trainer(Numbers(), args, train_dataset=regression_rows(BATCH * STEPS))
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.model.scale.shape == () or stage == 3
    trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_deepspeed(directory: str, stage: int, load: bool, **more: Any) -> list[float]:
    """Losses of plain DeepSpeed, which saves after step 2, or resumes from there."""
    import deepspeed

    from ds_trainer.engine.topology import reset_deepspeed_groups

    reset_deepspeed_groups()  # of the engine before in this process
    model, rank, world = Numbers(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    optimizer = torch.optim.AdamW(plain.grouped(model), lr=1e-2)
    config = {**plain.config_of(stage, world), **more}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if load:
        assert engine.load_checkpoint(directory)[0] is not None
        if stage == 3:  # see plain_deepspeed.load_universal_and_train
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()
    rows, losses, rows_per_rank = regression_rows(BATCH * STEPS), [], BATCH // world
    for step in range(STOP if load else 0, STEPS):
        first = step * BATCH + rank * rows_per_rank
        loss, _ = engine(**stack(rows[first : first + rows_per_rank]))
        engine.backward(loss)
        engine.step()
        global_loss = loss.detach().clone()
        torch.distributed.all_reduce(global_loss)
        losses.append(float(global_loss) / world)
        if not load and step + 1 == STOP:
            engine.save_checkpoint(directory)
    engine.destroy()
    return losses


@pytest.mark.parametrize(("stage", "our_stage"), [(1, 3), (2, 0), (3, 0)])
def test_a_deepspeed_run_resumes_after_conversion(stage: int, our_stage: int, tmp_path: Path) -> None:
    wanted = pool(2).run(partial(train_with_deepspeed, str(tmp_path / "plain"), stage, False))[0]
    for losses in pool(2).run(partial(train_with_trainer, str(tmp_path / "ours"), our_stage, str(tmp_path / "plain"))):
        assert losses == pytest.approx(wanted[STOP:], **CLOSE)


def test_a_converted_checkpoint_resumes_in_deepspeed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": STOP}
    wanted = pool(2).run(partial(train_with_trainer, str(tmp_path / "ours"), 1, **saving))[0]
    export_universal(tmp_path / "ours" / f"checkpoint-{STOP}", tmp_path / "universal")
    for stage in (1, 2, 3):
        job = partial(
            train_with_deepspeed, str(tmp_path / "universal"), stage, True, checkpoint={"load_universal": True}
        )
        for losses in pool(2).run(job):
            assert losses == pytest.approx(wanted[STOP:], **CLOSE), stage
