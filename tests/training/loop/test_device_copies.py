"""Copies of micro-batches to the device: their order, what is copied, and that only the host's queue is touched.

Streams, events, ``record_stream`` and ``is_pinned`` are stand-ins that write down what they are asked; the copies
themselves are real, to the meta device or to other memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.loop.device_copies import CopyStream, DeviceCopies
from tests.support.compare import assert_equal
from tests.support.host_syncs import DEVICE
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import compatibility_of
from tests.training.test_host_syncs import ours, watched_run

META = torch.device("meta")


class Event:
    def __init__(self, number: int) -> None:
        self.number = number


class Streams:
    """The side stream, and the compute stream."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.events = log, 0

    def __enter__(self) -> None:
        self.log.append("side stream")

    def __exit__(self, *error: object) -> None:
        self.log.append("compute stream")

    def record_event(self) -> Event:
        self.events += 1
        self.log.append(f"record {self.events}")
        return Event(self.events)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"wait {event.number}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    streams, to = Streams(found), torch.Tensor.to
    monkeypatch.setattr(torch, "Stream", lambda device: streams)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.append("keep"))

    def noting(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        found.append(f"copy {tuple(tensor.shape)}" + ("" if keywords.get("non_blocking") else " and wait"))
        return to(tensor, *args, **keywords)

    monkeypatch.setattr(torch.Tensor, "to", noting)
    return found


def batch(rows: int) -> dict[str, Any]:
    return {"x": torch.ones(rows), "more": [torch.zeros(rows, 2, dtype=torch.long), "name"]}


def test_the_order_of_two_micro_batches(log: list[str]) -> None:
    copies, (first, second) = DeviceCopies.to(META), (batch(1), batch(2))
    copies.float_type = torch.bfloat16
    copies.begin(first)
    assert log == ["side stream", "copy (1, 2)", "copy (1,)", "compute stream", "record 1"]
    log.clear()
    found = copies.take(first)
    assert log == ["wait 1", "keep", "keep"]
    assert found["x"].device == META and found["x"].dtype == torch.bfloat16
    assert found["more"][0].dtype == torch.long and found["more"][1] == "name"
    log.clear()
    copies.begin(second)
    copies.take(second)
    assert log == ["side stream", "copy (2, 2)", "copy (2,)", "compute stream", "record 2", "wait 2", "keep", "keep"]


def test_a_changed_or_new_tensor_is_copied_again(log: list[str]) -> None:
    copies, own = DeviceCopies.to(META), batch(1)
    copies.begin(own)
    own["x"].add_(1)
    own["new"] = torch.ones(3)
    log.clear()
    copies.take(own)
    assert log == ["wait 1", "copy (1,)", "keep", "copy (3,)"]
    log.clear()
    copies.take(own)  # a second time: the first ones are somebody else's
    assert log == ["copy (1,)", "copy (1, 2)", "copy (3,)"]


def test_one_micro_batch_at_a_time_and_none_if_nobody_asks(log: list[str]) -> None:
    copies = DeviceCopies.to(META)
    for _ in range(2):
        copies.begin(batch(1))
        copies.take(batch(2))  # somebody else's tensors: the copy is asked for, and not used
    copies.begin(batch(1))
    assert len(copies._held) == 2 and copies.ahead  # those of one batch
    copies.begin(batch(1))
    assert not copies._held and not copies.ahead
    log.clear()
    copies.begin(batch(1))
    assert log == []


def test_cpu_and_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    own = batch(1)
    copies = DeviceCopies.to(torch.device("cpu"))
    copies.begin(own)
    assert not copies.ahead and copies.take(own)["x"] is own["x"]
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    copies = DeviceCopies.to(META)
    copies.begin(own)
    assert not copies._held and copies.take(own)["x"].device == META


class Recorded(CopyStream):
    """Copies to other memory of the CPU. The memory of a copy holds rubbish until the compute stream has waited."""

    def __init__(self, log: list[str], waits: bool = True) -> None:
        self.log, self.waits, self.under_way = log, waits, []  # type: ignore[var-annotated]

    def copies(self, tensors: list[torch.Tensor], float_type: torch.dtype | None) -> tuple[list[torch.Tensor], Any]:
        self.log.append("copy")
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        self.under_way = list(zip(targets, tensors, strict=True))
        return targets, None

    def wait_for(self, event: Any) -> None:
        self.log.append("wait")
        for target, source in self.under_way if self.waits else []:
            target.copy_(source)

    def computes_with(self, tensor: torch.Tensor) -> None: ...


@contextmanager
def pinned() -> Iterator[None]:
    original = torch.Tensor.is_pinned
    torch.Tensor.is_pinned = lambda tensor: True  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.is_pinned = original  # type: ignore[method-assign]


def train(output_dir: str, ahead: bool, waits: bool = True, sizes: dict[str, Any] | None = None) -> Any:
    """Ragged data: three micro-batches of a step, the last step of an epoch incomplete, stopped and resumed."""
    log: list[str] = []

    def trainer(steps: int) -> Trainer:
        args = TrainingArguments(
            output_dir,
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            max_steps=steps,
            logging_steps=1,
            save_steps=3,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            **(sizes or {}),
        )
        found = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(21))
        if ahead:
            found._ds_trainer.engines.copies = DeviceCopies(found._ds_trainer.device, Recorded(log, waits))
        return found

    with pinned():
        first = trainer(3)
        first.train()
        first.engine.close()
        second = trainer(5)
        second.train(resume_from_checkpoint=True)
    report = compatibility_of(second)
    second.engine.close()
    return report, log


LAYOUTS: dict[str, dict[str, Any]] = {"dp": {}, "cp": {"context_parallel_size": 2}}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_are_equal_and_resume_exactly(name: str, tmp_path: Path) -> None:
    sizes = {**LAYOUTS[name], "eval_strategy": "no"}
    plain = pool(2).run(train, str(tmp_path / "plain"), False, True, sizes, timeout=120)
    ahead = pool(2).run(train, str(tmp_path / "ahead"), True, True, sizes, timeout=120)
    for (expected, none), (found, log) in zip(plain, ahead, strict=True):
        assert_equal(found, expected)
        assert not none and log == ["copy", "wait"] * (len(log) // 2)  # never two copies ahead, each waited for
        assert len(log) >= 2 * (5 * 3 - 4 - (name == "cp"))


def test_a_forgotten_wait_is_noticed(tmp_path: Path) -> None:
    (expected, _), *_ = pool(2).run(train, str(tmp_path / "plain"), False)
    (found, _), *_ = pool(2).run(train, str(tmp_path / "ahead"), True, False)
    with pytest.raises(AssertionError):
        assert_equal(found, expected)


class CopiesOfPretendedDevice(CopyStream):
    """Copies of the real class, on no stream."""

    def __init__(self) -> None:
        self._device, self._stream = DEVICE, Streams([])  # type: ignore[assignment]

    def wait_for(self, event: Any) -> None: ...

    def computes_with(self, tensor: torch.Tensor) -> None: ...


class AheadTrainer(Trainer):
    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._ds_trainer.engines.copies = DeviceCopies(DEVICE, CopiesOfPretendedDevice())


def watched(output_dir: str) -> Any:
    with pinned():
        return watched_run(output_dir, trainer_class=AheadTrainer, zero_stage=1)


def test_the_host_waits_for_nothing(tmp_path: Path) -> None:
    for found in pool(2).run(watched, str(tmp_path)):
        assert not ours(found)
