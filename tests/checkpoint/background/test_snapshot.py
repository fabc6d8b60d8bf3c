"""A snapshot is a real copy: later changes to the engine do not change the file."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.checkpoint.background import snapshot as snapshot_module
from ds_trainer.checkpoint.background import snapshot as staging_buffer_module
from ds_trainer.checkpoint.background.snapshot import Snapshot, StagingBuffer, fits_in_memory, shard_file_sizes
from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, InMemoryFile
from ds_trainer.checkpoint.shards.engine_files import engine_state_files
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.parallel.shard_slices import ShardSlice
from tests.support.layouts import DATA, MODELS, pad
from tests.support.pool import pool


def written(content: CheckpointFile) -> bytes:
    stream = io.BytesIO()
    content.write(stream)
    return stream.getvalue()


def shard(name: str, tensor: torch.Tensor) -> StateShard:
    return StateShard(name, "master", ShardSlice.whole(tensor.shape), tensor)


TYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int16]


def content_of_all_types() -> ShardContent:
    torch.manual_seed(0)
    tensors = [(torch.rand(7) * 3).to(dtype) for dtype in TYPES] + [torch.rand(()), torch.rand(4, 6).t()]
    shards = [shard(str(index), tensor) for index, tensor in enumerate(tensors)]
    return ShardContent("x", shards, {"0": {"step": torch.tensor(3.0)}})


def test_the_copy_equals_the_file() -> None:
    content = content_of_all_types()
    (copied,) = Snapshot([content], StagingBuffer()).contents
    assert written(copied) == written(content)
    assert copied.name == "x"


@pytest.mark.parametrize("deferred", [False, True])
def test_later_changes_do_not_reach_the_copy(deferred: bool) -> None:
    content = content_of_all_types()
    wanted = written(content)
    snapshot = Snapshot([content, InMemoryFile("y", b"1")], StagingBuffer(), lambda shard: deferred)
    if deferred:
        snapshot.copy_deferred()
    for one in content.shards:
        one.tensor.fill_(1)
    content.scalars["0"]["step"].fill_(9)  # type: ignore[index]
    assert written(snapshot.contents[0]) == wanted
    assert snapshot.contents[1] == InMemoryFile("y", b"1")


def test_a_step_waits_for_deferred_copies() -> None:
    snapshot = Snapshot([content_of_all_types()], StagingBuffer(), lambda shard: True)
    waiter = threading.Thread(target=snapshot.wait, daemon=True)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    snapshot.copy_deferred()
    waiter.join(5)
    assert not waiter.is_alive()
    Snapshot([content_of_all_types()], StagingBuffer()).wait()  # nothing to wait for


def test_memory_is_reused() -> None:
    staging_buffer, content = StagingBuffer(), content_of_all_types()
    staging_buffer.preallocate(shard_file_sizes([content]))
    size, address = staging_buffer.nbytes, staging_buffer.blocks(0, 1)[0].data_ptr()
    Snapshot([content], staging_buffer)
    assert size == sum(p.tensor.nbytes for p in content.shards)
    assert (staging_buffer.nbytes, staging_buffer.blocks(0, 1)[0].data_ptr()) == (size, address)
    Snapshot([ShardContent("x", [*content.shards, shard("more", torch.rand(99))], {})], staging_buffer)
    assert staging_buffer.nbytes == size + 99 * 4


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("block", [8, 16, 64, 256])
def test_a_file_may_span_many_blocks(block: int, deferred: bool) -> None:
    """Shards continue in the next block; the written file is the same."""
    content, staging_buffer = content_of_all_types(), StagingBuffer(max_block=block)
    snapshot = Snapshot([content, content], staging_buffer, lambda shard: deferred)
    snapshot.copy_deferred()
    assert [written(copied) for copied in snapshot.files()] == [written(content)] * 2
    size = shard_file_sizes([content])[0]
    assert [one.numel() for one in staging_buffer.blocks(0, size)][:-1] == [block] * ((size - 1) // block)
    Snapshot([ShardContent("x", [*content.shards, shard("more", torch.rand(99))], {})], staging_buffer)
    assert staging_buffer.nbytes == 2 * size + 99 * 4


class PinnedMemory:
    """Counts what torch allocates for page-locked memory: the next power of two of each block."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def __call__(self, size: int, pinned: bool) -> torch.Tensor:
        assert pinned
        self.allocated.append(1 << (size - 1).bit_length())
        return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 1024, 1025, 3000, 84_003])
def test_page_locked_memory_is_not_wasted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block would take the next power of two: 137 GB for 84 GB."""
    pinned = PinnedMemory()
    monkeypatch.setattr(staging_buffer_module, "_allocate", pinned)
    staging_buffer = StagingBuffer(pinned=True, max_block=1024, min_block=16)
    staging_buffer.preallocate([size, 100])
    assert sum(pinned.allocated) == staging_buffer.nbytes == staging_buffer.allocated_bytes([size, 100]), (
        "wrong accounting"
    )
    assert size + 100 <= staging_buffer.nbytes < size + 100 + 2 * 16
    assert max(pinned.allocated) <= 1024
    count = len(pinned.allocated)
    assert sum(block.numel() for block in staging_buffer.blocks(0, size)) == size
    assert len(pinned.allocated) == count, "memory was not reused"


def test_default_block_sizes_waste_little() -> None:
    needed = 84 * 10**9
    assert 0 <= StagingBuffer(pinned=True).allocated_bytes([needed]) - needed < 2**24
    assert StagingBuffer(pinned=False).allocated_bytes([needed]) == needed


def test_whether_a_copy_fits_in_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fits_in_memory(1)
    assert not fits_in_memory(2**60)
    monkeypatch.setattr(snapshot_module, "MEMORY_FRACTION", 0.0)
    assert not fits_in_memory(1)


# -- of an engine ------------------------------------------------------------------------------------------------------


def files_while_training(output_dir: str, stage: int, bf16: bool, copy: bool) -> list[tuple[bytes, bytes]]:
    """Files of the state after step 2: written at once, and from a snapshot after step 3."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments
    from ds_trainer.engine.state.state_shards import changed_only_by_steps

    class Watch(TrainerCallback):
        wanted: list[bytes]
        contents: list[CheckpointFile]

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != 2:
                return
            self.wanted = [written(content) for content in engine_state_files(trainer.engine, True)]
            contents = list(engine_state_files(trainer.engine, True))
            self.contents = contents
            if copy:
                snapshot = Snapshot(contents, StagingBuffer(), changed_only_by_steps(trainer.engine))
                self.contents = snapshot.contents
                trainer.engine.before_step = snapshot.wait
                threading.Timer(0.3, snapshot.copy_deferred).start()  # as late as possible

    watch = Watch()
    args = TrainingArguments(
        output_dir,
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        zero_stage=stage,
        bf16=bf16,
    )
    trainer = Trainer(MODELS["tied"](), args, pad, train_dataset=DATA["padded"](), callbacks=[watch])
    trainer.train()
    trainer.engine.close()
    return [(wanted, written(content)) for wanted, content in zip(watch.wanted, watch.contents, strict=True)]


CASES = [(0, False), (0, True), (1, False), (1, True), (2, False), (3, False), (3, True)]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("stage", "bf16"), CASES)
def test_training_continues_during_the_copy(stage: int, bf16: bool, tmp_path: Path) -> None:
    for files in pool(2).run(files_while_training, str(tmp_path), stage, bf16, True):
        assert files
        assert all(wanted == found for wanted, found in files)


def test_without_a_copy_the_files_would_differ(tmp_path: Path) -> None:
    """Negative control: the comparison detects a step that was made in between."""
    for files in pool(2).run(files_while_training, str(tmp_path), 1, False, False):
        assert files[0][0] != files[0][1]
