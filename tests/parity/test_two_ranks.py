"""Our DeepSpeed path on two ranks, beside transformers' Trainer on one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from tests.parity.library import Library, assert_same, logs
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights

RUNS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1, accumulation": {"zero_stage": 1, "gradient_accumulation_steps": 2},
    "ZeRO 2, clipped": {"zero_stage": 2, "max_grad_norm": 0.1},
    "ZeRO 3, warm-up": {"zero_stage": 3, "warmup_steps": 2, "weight_decay": 0.1},
    "ZeRO 3, recomputed": {"zero_stage": 3, "gradient_checkpointing": True},
}


def ours(directory: str, changes: dict[str, Any]) -> Any:
    """What a rank reports: history and whole weights."""
    library = Library(ds_trainer, Path(directory))
    trainer = library.trainer({**changes, "per_device_train_batch_size": 2}, train_dataset=RaggedTokens(22))
    trainer.train()
    report = {"logs": logs(trainer), "weights": whole_weights(trainer)}
    trainer.engine.close()
    return report


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_like_one_process(name: str, tmp_path: Path) -> None:
    import transformers

    library = Library(transformers, tmp_path)
    changes = {"max_steps": 7, **RUNS[name]}
    reference = {key: value for key, value in changes.items() if key != "zero_stage"}
    trainer = library.trainer({**reference, "per_device_train_batch_size": 4}, train_dataset=RaggedTokens(22))
    trainer.train()
    expected = {"logs": logs(trainer), "weights": dict(trainer.model.named_parameters())}
    assert expected["weights"].keys() == dict(tiny_llama().named_parameters()).keys()
    for report in pool(2).run(ours, str(tmp_path / "ours"), changes):
        assert_same(report, expected, tolerance=5e-5)
