"""The memory that background saves copy into, from training to training of one process."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.checkpoint.background import snapshot as staging_buffer
from ds_trainer.training.resume import background_saves
from tests.support.pool import pool
from tests.training.resume.test_background_saves import trainer_of


def released_memory(output_dir: str) -> list[tuple[int, int]]:
    """Blocks that were allocated, and that were alive when torch was told to give its cache back; twice."""
    blocks: list[Any] = []
    found: list[tuple[int, int]] = []

    class Pinned(staging_buffer.StagingBuffer):
        def __init__(self, pinned: bool) -> None:
            super().__init__(pinned=True)

    def allocated(size: int, pinned: bool) -> torch.Tensor:
        assert pinned
        block = torch.empty(size, dtype=torch.uint8)
        blocks.append(weakref.ref(block.untyped_storage()))
        return block

    def emptied() -> None:
        found.append((len(blocks), sum(block() is not None for block in blocks)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging_buffer, "_allocate", allocated)
        patch.setattr(background_saves, "StagingBuffer", Pinned)
        patch.setattr(torch._C, "_host_emptyCache", emptied, raising=False)
        gc.collect()
        gc.disable()  # nothing may depend on it
        try:
            for number in range(2):
                trainer = trainer_of(f"{output_dir}/{number}", max_steps=4)
                trainer.train()
                trainer.engine.close()
        finally:
            gc.enable()
    return found


def test_page_locked_memory_is_given_back_after_each_training(tmp_path: Path) -> None:
    for first, second in pool(2).run(released_memory, str(tmp_path)):
        assert first[0] > 0 and second[0] == 2 * first[0]
        assert first[1] == second[1] == 0
