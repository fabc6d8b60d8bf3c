"""The mask of packed rows that a collator defers: what leaves it as it is, and that all else sees the mask."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from ds_trainer.data.batch_transfer import receive, send
from ds_trainer.monitor.health.replay import save_batches
from ds_trainer.parallel.deferred_mask import DeferredMask, DocumentMask
from ds_trainer.parallel.document_attention import Documents
from ds_trainer.training.loop.batch_splitting import split_batch
from ds_trainer.training.loop.device_copies import on_device
from tests.support.pool import pool

LENGTHS = ((3, 1, 4), (8,), (2, 6))
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DeferredMask]:
    """The masks that something reads."""
    found: list[DeferredMask] = []
    original = DeferredMask.made

    def counting(mask: DeferredMask) -> torch.Tensor:
        found.append(mask)
        return original(mask)

    monkeypatch.setattr(DeferredMask, "made", counting)
    return found


def new(lengths: Any = LENGTHS) -> DocumentMask:
    return DocumentMask(Documents.of(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])))


def wanted(lengths: Any = LENGTHS) -> torch.Tensor:
    blocks = [torch.block_diag(*[torch.ones(n, n) for n in row]) for row in lengths]
    return torch.stack(blocks)[:, None].bool()


def test_it_is_the_mask() -> None:
    mask = new()
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.dtype, mask.device) == (wanted().shape, torch.bool, CPU)
    assert "DocumentMask((3, 1, 8, 8)" in repr(mask)
    assert torch.equal(mask, wanted()) and type(mask.made()) is torch.Tensor
    assert mask.tolist() == wanted().tolist() and (mask.numpy() == wanted().numpy()).all()


DEFERRED: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "pickle of workers": lambda mask: pickle.loads(ForkingPickler.dumps(mask)),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "to": lambda mask: mask.to(CPU, None, non_blocking=True),
    "to copy": lambda mask: mask.to(CPU, copy=True),
    "on device": lambda mask: on_device({"attention_mask": mask}, CPU, torch.bfloat16)["attention_mask"],
    "cpu": lambda mask: mask.cpu(),
    "pin": lambda mask: mask.pin_memory(),
    "detach": lambda mask: mask.detach(),
    "clone": lambda mask: mask.clone(),
    "contiguous": lambda mask: mask.contiguous(),
    "bool": lambda mask: mask.bool(),
    "alias": lambda mask: mask[...],
    "data": lambda mask: mask.data,
}
READING: dict[str, Callable[[torch.Tensor], Any]] = {
    "one row": lambda mask: mask[0],
    "rows": lambda mask: mask[1:],
    "chosen rows": lambda mask: mask[torch.tensor([2, 0])],
    "index_select": lambda mask: mask.index_select(0, torch.tensor([2, 1])),
    "tokens": lambda mask: mask[:, :, :4, :4],
    "float": lambda mask: mask.float(),
    "to float": lambda mask: mask.to(CPU, torch.bfloat16),
    "inverted": lambda mask: ~mask,
    "where": lambda mask: torch.where(mask, 0.0, -1.0),
    "sum": lambda mask: mask.sum(),
    "expand": lambda mask: mask.expand(3, 2, 8, 8),
    "rows one by one": lambda mask: torch.stack(list(mask)),
    "cat": lambda mask: torch.cat([mask, mask]),
    "channels last": lambda mask: mask.clone(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("operation", DEFERRED)
def test_what_does_not_read_it(operation: str, made: list[DeferredMask]) -> None:
    result = DEFERRED[operation](new())
    assert type(result) is DocumentMask and not made
    assert torch.equal(result, wanted())


@pytest.mark.parametrize("operation", READING)
def test_what_reads_it(operation: str) -> None:
    result, expected = READING[operation](new()), READING[operation](wanted())
    assert type(result) is torch.Tensor and torch.equal(result, expected)


@pytest.mark.parametrize("operation", DEFERRED)
def test_a_changed_mask_stays_changed(operation: str) -> None:
    """Whatever was made of it before."""
    mask = new()
    before = [mask.detach(), mask.data]
    independent = [mask.clone(), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))]
    mask[0, :, :, 2] = False
    changed = wanted()
    changed[0, :, :, 2] = False
    assert mask.changed and all(other.changed for other in before)
    if operation != "pin":  # a plain tensor, for which a CPU has no such memory
        found = DEFERRED[operation](mask)
        assert torch.equal(found, changed) and not (isinstance(found, DocumentMask) and not found.changed)
    assert torch.equal(mask, changed) and torch.equal(mask.rows(slice(0, 1)), changed[:1])
    for other in independent:
        assert not other.changed and torch.equal(other, wanted())


@pytest.mark.parametrize("inference", [False, True])
def test_each_way_to_change_it_is_seen(inference: bool) -> None:
    def through_a_view(mask: torch.Tensor) -> None:
        mask[1].logical_not_()

    def through_an_array(mask: torch.Tensor) -> None:
        mask.numpy()[1] = False

    def in_place(mask: torch.Tensor) -> None:
        mask &= torch.zeros(8, dtype=torch.bool)

    with torch.inference_mode(inference):
        for change in (
            through_a_view,
            in_place,
            through_an_array,
            lambda mask: mask.zero_(),
            lambda mask: mask[:1].fill_(True),
        ):
            mask, plain = new(), wanted()
            mask.any()
            assert mask.changed == inference
            change(mask)
            change(plain)
            assert mask.changed and torch.equal(mask, plain)


def test_rows_of_a_batch(made: list[DeferredMask]) -> None:
    batch = {"input_ids": torch.zeros(3, 8, dtype=torch.long), "attention_mask": new()}
    parts = [part["attention_mask"] for part in split_batch(batch, 2, 2)]
    assert not made and all(type(part) is DocumentMask for part in parts)
    assert torch.equal(parts[0], wanted()[:2]) and torch.equal(parts[1], wanted()[2:])
    assert parts[1].documents.lengths == [2, 6]


def test_aliases_are_made_once() -> None:
    mask = new()
    assert mask.detach().made() is mask.detach().made() is mask.made()
    assert mask.clone().made() is not mask.made()


def test_another_device(made: list[DeferredMask]) -> None:
    moved = new().to("meta", non_blocking=True)
    moved.record_stream(torch.Stream(CPU))
    assert type(moved) is DocumentMask and moved.device == META and not made
    assert moved.made().device == META and moved.documents.lengths == [3, 1, 4, 8, 2, 6]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_does_not_read_it(reentrant: bool, made: list[DeferredMask]) -> None:
    seen: list[torch.Tensor] = []

    def layer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append(mask)
        return x.sin()

    x = torch.rand(3, requires_grad=True)
    checkpoint(layer, x, new(), use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2 and all(type(mask) is DocumentMask for mask in seen) and not made


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(rows), "attention_mask": new([LENGTHS[row] for row in rows])}


@pytest.mark.cases(1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_send_it_without_making_it(start: str, made: list[DeferredMask]) -> None:
    context = multiprocessing.get_context(start)
    loader = DataLoader([0, 1, 2], 2, collate_fn=collate, num_workers=1, multiprocessing_context=context)  # type: ignore[var-annotated, arg-type]
    masks = [batch["attention_mask"] for batch in loader]
    assert [type(mask) for mask in masks] == [DocumentMask] * 2 and not made
    assert torch.equal(torch.cat(masks), wanted())


def between_ranks() -> tuple[list[str], list[int]]:
    """What happens on a rank, and the samples in the mask that it has in the end."""
    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        original = DeferredMask.made
        patch.setattr(DeferredMask, "made", lambda mask: events.append("made") or original(mask))
        patch.setattr(dist, "broadcast", lambda *args, **more: events.append("message") or broadcast(*args, **more))
        group = dist.group.WORLD
        assert group is not None
        batch: dict[str, Any] = {"attention_mask": new(((16,) * 1024,))}
        if dist.get_rank() == 0:
            send(batch, group)
        else:
            batch = receive(group)
        events.append(type(batch["attention_mask"]).__name__)
        return events, batch["attention_mask"].documents.lengths


broadcast = dist.broadcast


@pytest.mark.extended
def test_ranks_of_a_replica_send_it_in_one_small_message() -> None:
    for events, lengths in pool(2).run(between_ranks):
        assert events == ["message", "DocumentMask"] and lengths == [16] * 1024


def test_accelerate_moves_it(made: list[DeferredMask]) -> None:
    from accelerate.utils import send_to_device

    moved = send_to_device({"attention_mask": new()}, META, non_blocking=True)["attention_mask"]
    assert type(moved) is DocumentMask and moved.device == META and not made


def test_its_size_does_not_grow_with_pairs() -> None:
    row = new(((16,) * 1024,))
    assert row.numel() == 2**28 and len(pickle.dumps(row)) < 8000


def test_a_saved_batch_has_the_mask(tmp_path: Path) -> None:
    save_batches(tmp_path / "batch.pt", {}, [{"attention_mask": new()}])
    (batch,) = torch.load(tmp_path / "batch.pt", weights_only=True)["batches"]
    assert type(batch["attention_mask"]) is torch.Tensor and torch.equal(batch["attention_mask"], wanted())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_that_is_compiled_gets_the_mask(backend: str) -> None:
    """Models of the user that are compiled: ours are told not to defer it."""

    @torch.compile(backend=backend)
    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.rand(3, 2, 8, 4)
    plain = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=wanted())
    torch.testing.assert_close(attend(x, new()), plain)
