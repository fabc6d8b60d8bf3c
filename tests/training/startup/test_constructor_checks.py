"""Trainers that need one rank per replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama

TRL = "trl.trainer.grpo_trainer", "GRPOTrainer", r"GRPOTrainer of TRL takes the rewards .* but this is dp 1"
SENTENCES = "sentence_transformers.trainer", "BaseTrainer", "BaseTrainer of sentence-transformers runs the model on one"


@pytest.mark.parametrize(
    ("axis", "library"),
    [("tensor_parallel_size", TRL), ("sequence_parallel_size", TRL), ("tensor_parallel_size", SENTENCES)],
)
def test_trainers_that_need_a_rank_per_replica_are_refused(
    axis: str, library: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package, name, message = library

    def trainer(module: str) -> Any:
        cls = type("Policy", (type(name, (Trainer,), {"__module__": module}),), {})
        args = TrainingArguments(str(tmp_path), use_cpu=True, zero_stage=0, **{axis: 2})
        return cls(tiny_llama(), args, train_dataset=RaggedTokens(4))

    for variable, value in dict(WORLD_SIZE=2, RANK=0, LOCAL_RANK=0, MASTER_ADDR="nowhere", MASTER_PORT=1).items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr("ds_trainer.training.run_setup.join_ranks", lambda args: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match=message):
        trainer(package).train()
    with pytest.raises(pytest.fail.Exception, match="it was started"):
        trainer("somewhere").train()
