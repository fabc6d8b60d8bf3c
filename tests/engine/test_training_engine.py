"""What the engine refuses, and what it does not hand on to the next one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool


def test_the_trainer_rejects_impossible_sizes_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_start(device_type: str) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr("ds_trainer.training.startup.process_setup.start_process_group", must_not_start)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="2 ranks cannot be divided by tensor 3"):
        Trainer(tiny_llama(), TrainingArguments(str(tmp_path), tensor_parallel_size=3, use_cpu=True))


def second_partitions(output_dir: Path) -> list[bool]:
    """Whether there is a second partition (hpZ), in an engine that asks for it and in the next one that does not."""
    found = []
    for config in ({"zero_optimization": {"zero_hpz_partition_size": 2}}, None):
        args = TrainingArguments(
            str(output_dir),
            zero_stage=3,
            deepspeed=config,
            max_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(16))
        trainer.train()
        found.append(trainer.engine.deepspeed.optimizer.parameter_offload.zero_param_parallel_group is not None)
        trainer.engine.close()
    return found


def test_the_secondary_partition_group_of_an_engine_is_not_reused(tmp_path: Path) -> None:
    """DeepSpeed keeps its group in a global variable, from which every later engine would take it."""
    assert pool(2).run(partial(second_partitions, tmp_path)) == [[True, False]] * 2


def engine_of_somebody_else(output_dir: Path) -> tuple[int, int]:
    """Ranks that a plain DeepSpeed engine takes for data-parallel and for model-parallel, after a sliced training."""
    import deepspeed

    options = {"tensor_parallel_size": 2, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(output_dir), **options)  # type: ignore[arg-type]
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(16))
    trainer.train()
    trainer.engine.close()
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config={"train_micro_batch_size_per_gpu": 1})
    found = engine.dp_world_size, engine.mp_world_size
    engine.destroy()
    return found


def test_a_closed_engine_leaves_no_layout_in_deepspeed(tmp_path: Path) -> None:
    assert pool(2).run(partial(engine_of_somebody_else, tmp_path)) == [(2, 1)] * 2
