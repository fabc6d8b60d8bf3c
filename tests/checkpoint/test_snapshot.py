"""A snapshot is a real copy: whatever happens to the engine afterwards, the file holds the state of its step."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.checkpoint.background import arena as arenas
from ds_trainer.checkpoint.background import snapshot as module
from ds_trainer.checkpoint.background.arena import Arena
from ds_trainer.checkpoint.background.snapshot import Snapshot, fits_in_memory, sizes_of
from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.engine_files import engine_contents
from ds_trainer.checkpoint.protocol.contents import Content, Held
from ds_trainer.engine.state.pieces import Piece
from ds_trainer.parallel.places import Place
from tests.support.layouts import DATA, MODELS, pad
from tests.support.pool import pool


def written(content: Content) -> bytes:
    stream = io.BytesIO()
    content.write(stream)
    return stream.getvalue()


def piece(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, "master", Place.whole(tensor.shape), tensor)


TYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int16]


def content_of_all_types() -> PiecesContent:
    torch.manual_seed(0)
    tensors = [(torch.rand(7) * 3).to(dtype) for dtype in TYPES] + [torch.rand(()), torch.rand(4, 6).t()]
    pieces = [piece(str(index), tensor) for index, tensor in enumerate(tensors)]
    return PiecesContent("x", pieces, {"0": {"step": torch.tensor(3.0)}})


def test_the_copy_is_the_file() -> None:
    content = content_of_all_types()
    (copied,) = Snapshot([content], Arena()).contents
    assert written(copied) == written(content)
    assert copied.name == "x"


@pytest.mark.parametrize("waits", [False, True])
def test_later_changes_are_not_in_it(waits: bool) -> None:
    content = content_of_all_types()
    wanted = written(content)
    snapshot = Snapshot([content, Held("y", b"1")], Arena(), lambda piece: waits)
    if waits:
        snapshot.complete()
    for one in content.pieces:
        one.tensor.fill_(1)
    content.scalars["0"]["step"].fill_(9)  # type: ignore[index]
    assert written(snapshot.contents[0]) == wanted
    assert snapshot.contents[1] == Held("y", b"1")


def test_a_step_waits_for_what_is_copied_later() -> None:
    snapshot = Snapshot([content_of_all_types()], Arena(), lambda piece: True)
    waiter = threading.Thread(target=snapshot.wait, daemon=True)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    snapshot.complete()
    waiter.join(5)
    assert not waiter.is_alive()
    Snapshot([content_of_all_types()], Arena()).wait()  # nothing to wait for


def test_memory_is_kept() -> None:
    arena, content = Arena(), content_of_all_types()
    arena.prepare(sizes_of([content]))
    size, place = arena.nbytes, arena.blocks(0, 1)[0].data_ptr()
    Snapshot([content], arena)
    assert size == sum(p.tensor.nbytes for p in content.pieces)
    assert (arena.nbytes, arena.blocks(0, 1)[0].data_ptr()) == (size, place)
    Snapshot([PiecesContent("x", [*content.pieces, piece("more", torch.rand(99))], {})], arena)
    assert arena.nbytes == size + 99 * 4


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("block", [8, 16, 64, 256])
def test_a_file_may_lie_in_many_blocks(block: int, waits: bool) -> None:
    """Pieces go on in the next block; what is written is the same."""
    content, arena = content_of_all_types(), Arena(block=block)
    snapshot = Snapshot([content, content], arena, lambda piece: waits)
    snapshot.complete()
    assert [written(copied) for copied in snapshot.files()] == [written(content)] * 2
    size = sizes_of([content])[0]
    assert [one.numel() for one in arena.blocks(0, size)][:-1] == [block] * ((size - 1) // block)
    Snapshot([PiecesContent("x", [*content.pieces, piece("more", torch.rand(99))], {})], arena)
    assert arena.nbytes == 2 * size + 99 * 4


class Locked:
    """What torch really takes for page-locked memory: the next power of two of each block."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __call__(self, size: int, pinned: bool) -> torch.Tensor:
        assert pinned
        self.taken.append(1 << (size - 1).bit_length())
        return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 1024, 1025, 3000, 84_003])
def test_page_locked_memory_is_not_wasted(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block would take the next power of two: 137 GB for 84 GB."""
    locked = Locked()
    monkeypatch.setattr(arenas, "_memory", locked)
    arena = Arena(pinned=True, block=1024, smallest=16)
    arena.prepare([size, 100])
    assert sum(locked.taken) == arena.nbytes == arena.room_for([size, 100]), "accounted for as it is"
    assert size + 100 <= arena.nbytes < size + 100 + 2 * 16
    assert max(locked.taken) <= 1024
    taken = len(locked.taken)
    assert sum(block.numel() for block in arena.blocks(0, size)) == size
    assert len(locked.taken) == taken, "kept"


def test_the_real_sizes_waste_little() -> None:
    needed = 84 * 10**9
    assert 0 <= Arena(pinned=True).room_for([needed]) - needed < 2**24
    assert Arena(pinned=False).room_for([needed]) == needed


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fits_in_memory(1)
    assert not fits_in_memory(2**60)
    monkeypatch.setattr(module, "SHARE_OF_FREE_MEMORY", 0.0)
    assert not fits_in_memory(1)


# -- of an engine ------------------------------------------------------------------------------------------------------


def files_while_training(output_dir: str, stage: int, bf16: bool, copy: bool) -> list[tuple[bytes, bytes]]:
    """Files of the state after step 2: written at once, and from a snapshot when step 3 has been taken."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments
    from ds_trainer.engine.state.pieces import changes_in_steps_only

    class Watch(TrainerCallback):
        wanted: list[bytes]
        contents: list[Content]

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != 2:
                return
            self.wanted = [written(content) for content in engine_contents(trainer.engine, True)]
            contents = list(engine_contents(trainer.engine, True))
            self.contents = contents
            if copy:
                snapshot = Snapshot(contents, Arena(), changes_in_steps_only(trainer.engine))
                self.contents = snapshot.contents
                trainer.engine.before_step = snapshot.wait
                threading.Timer(0.3, snapshot.complete).start()  # as late as the next step allows

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


@pytest.mark.parametrize(("stage", "bf16"), CASES)
def test_training_goes_on_while_it_is_copied(stage: int, bf16: bool, tmp_path: Path) -> None:
    for files in pool(2).run(files_while_training, str(tmp_path), stage, bf16, True):
        assert files
        assert all(wanted == found for wanted, found in files)


def test_without_a_copy_the_files_would_differ(tmp_path: Path) -> None:
    """Negative control: the comparison notices a step that was taken meanwhile."""
    for files in pool(2).run(files_while_training, str(tmp_path), 1, False, False):
        assert files[0][0] != files[0][1]
