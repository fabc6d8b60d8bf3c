"""A closed engine is let go of: its shards and buffers do not stay in memory while the process lives."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest

from ds_trainer import Trainer
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.predictions import arguments


def train_and_close(output_dir: str, stage: int) -> list[weakref.ref[object]]:
    args = arguments(output_dir, zero_stage=stage, max_steps=2, save_strategy="no")
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(4))
    trainer.train()
    trainer.evaluate()
    engine = trainer.engine.deepspeed
    trainer.engine.close()
    return [weakref.ref(one) for one in (engine, engine.optimizer, engine.module)]


def live_after(output_dir: str, stage: int) -> list[bool]:
    first = train_and_close(output_dir, stage)
    train_and_close(output_dir, stage)  # what belongs to no engine refers to the latest at most
    gc.collect()
    return [one() is not None for one in first]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_closed_engine_frees_its_memory(stage: int, tmp_path: Path) -> None:
    assert pool(2).run(partial(live_after, str(tmp_path), stage)) == [[False] * 3] * 2
