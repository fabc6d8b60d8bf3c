"""Trainers that need one rank per replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "sequence_parallel_size"])
def test_trainers_that_take_rewards_by_rank_are_refused(
    axis: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def trainer(module: str) -> Any:
        cls = type("Policy", (type("GRPOTrainer", (Trainer,), {"__module__": module}),), {})
        args = TrainingArguments(str(tmp_path), use_cpu=True, zero_stage=0, **{axis: 2})
        return cls(tiny_llama(), args, train_dataset=RaggedTokens(4))

    for name, value in dict(WORLD_SIZE=2, RANK=0, LOCAL_RANK=0, MASTER_ADDR="nowhere", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("ds_trainer.training.trainer.join_ranks", lambda args: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match=r"GRPOTrainer of TRL takes the rewards .* but this is dp 1"):
        trainer("trl.trainer.grpo_trainer").train()
    with pytest.raises(pytest.fail.Exception, match="it was started"):
        trainer("somewhere").train()
