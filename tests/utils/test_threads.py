"""Every thread of the package first selects the GPU of the thread that created it."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.checkpoint.background import snapshot as arenas
from ds_trainer.checkpoint.background.background_save import THREAD_NAME, BackgroundSave
from ds_trainer.checkpoint.background.snapshot import Snapshot, StagingBuffer
from ds_trainer.checkpoint.background.store_barrier import StoreBarrier
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.threads import new_executor, new_thread

PACKAGE = Path(__file__).parents[2] / "ds_trainer"
OWN_DEVICE = 3


class Device:
    """A fake of CUDA's per-thread current device, which records calls and their threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.current = threading.local()
        self.current.index = OWN_DEVICE  # of the test's own thread
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(self.current, "index", 0))
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def note(self, what: str, value: Any) -> None:
        self.calls.append((threading.current_thread().name, what, value))

    def set_device(self, index: int) -> None:
        self.current.index = index
        self.note("set_device", index)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.note("stream", torch.cuda.current_device())
        yield

    def synchronize(self) -> None:
        self.note("synchronize", torch.cuda.current_device())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_background_save_stays_on_its_gpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise device 0 would get a context of every rank: ``torch.cuda.stream`` restores the previous device."""
    monkeypatch.setattr(arenas, "_allocate", lambda size, pinned: torch.empty(size, dtype=torch.uint8))
    weights = torch.arange(4.0)
    piece = StateShard("w", "master", ShardSlice.whole(weights.shape), weights)
    snapshot = Snapshot([ShardContent("x", [piece], {})], StagingBuffer(pinned=True), lambda piece: True)
    save = BackgroundSave(snapshot, lambda contents, gather: Path(next(iter(contents)).name), StoreBarrier())
    assert save.result() == Path("x")
    mine = [(what, value) for thread, what, value in device.calls if thread == THREAD_NAME]
    assert mine == [("set_device", OWN_DEVICE), ("stream", OWN_DEVICE), ("synchronize", OWN_DEVICE)]


def test_without_the_helper_a_thread_has_device_0(device: Device) -> None:
    """Negative control: a new thread has device 0."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_threads_and_executors_select_the_device(device: Device) -> None:
    seen: list[int] = []
    thread = new_thread(lambda number: seen.append(number + torch.cuda.current_device()), 10, name="x")
    assert thread.daemon and thread.name == "x"
    thread.start()
    thread.join()
    assert seen == [10 + OWN_DEVICE]
    with new_executor("many", 2) as executor:
        assert [executor.submit(torch.cuda.current_device).result() for _ in range(4)] == [OWN_DEVICE] * 4


def test_a_process_without_cuda_creates_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    thread = new_thread(lambda: None, name="x")
    thread.start()
    thread.join()
    assert called == [] and not torch.cuda.is_initialized()


def starters(path: Path) -> list[str]:
    """Lines of a file that start threads without the helper."""
    names = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in names:
                found.append(f"{path.name}:{node.lineno}")
    return found


def test_only_the_helper_starts_threads() -> None:
    own = PACKAGE / "utils" / "threads.py"
    assert len(starters(own)) == 2, "what is looked for is found"
    assert [place for path in PACKAGE.rglob("*.py") if path != own for place in starters(path)] == []
