"""Stages are measured where memory was really taken."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from ds_trainer.monitor.memory_tracker import MemoryTracker

CPU = torch.device("cpu")
MB = 2**20


def block(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes, MB // 4)


def samplers() -> int:
    return sum(thread.name == "ds_trainer-memory" for thread in threading.enumerate())


def test_allocated_and_peak_memory_are_reported() -> None:
    tracker = MemoryTracker(CPU)
    with tracker.stage("train") as stage:
        kept = block(64)
        brief = block(128)
        time.sleep(0.05)
        del brief
        metrics = stage.end()
    assert kept.shape[0] == 64
    assert set(metrics) == {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"}
    assert 60 * MB < metrics["train_mem_cpu_alloc_delta"] < 80 * MB
    assert 120 * MB < metrics["train_mem_cpu_peaked_delta"] < 140 * MB


def test_freed_memory_is_negative_but_peaks_are_not() -> None:
    blocks: list[Any] = [block(64)]
    with MemoryTracker(CPU).stage("eval") as stage:
        blocks.clear()
        metrics = stage.end()
    assert metrics["eval_mem_cpu_alloc_delta"] < -50 * MB
    assert metrics["eval_mem_cpu_peaked_delta"] >= 0


def test_init_is_reported_once_with_the_first_stage() -> None:
    tracker = MemoryTracker(CPU)
    assert tracker.stage("init").end() == {}
    first, second = tracker.stage("eval").end(), tracker.stage("train").end()
    init = {"init_mem_cpu_alloc_delta", "init_mem_cpu_peaked_delta", "before_init_mem_cpu"}
    assert init < set(first) and len(first) == 5
    assert first["before_init_mem_cpu"] > 50 * MB  # torch alone is more
    assert set(second) == {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"}


def test_a_nested_stage_counts_for_the_outer_one() -> None:
    tracker = MemoryTracker(CPU)
    with tracker.stage("train") as outer:
        with tracker.stage("eval") as inner:
            kept = block(64)
            assert inner.end() == {}
        assert samplers() == 1
        metrics = outer.end()
    assert kept is not None and metrics["train_mem_cpu_alloc_delta"] > 60 * MB
    assert tracker.stage("eval").end() != {}


def test_only_the_first_end_reports() -> None:
    stage = MemoryTracker(CPU).stage("train")
    assert stage.end() != {} and stage.end() == {}


def test_a_disabled_tracker_reports_nothing() -> None:
    stage = MemoryTracker(CPU, enabled=False).stage("train")
    assert samplers() == 0
    assert stage.end() == {}


def test_no_thread_outlives_its_stage() -> None:
    tracker = MemoryTracker(CPU)
    with pytest.raises(KeyError), tracker.stage("train"):
        assert samplers() == 1
        raise KeyError
    assert samplers() == 0
    stage = tracker.stage("init")  # of a constructor that raises
    assert samplers() == 1
    del stage
    deadline = time.monotonic() + 5.0
    while samplers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert samplers() == 0
    assert tracker.stage("train").end() != {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_is_reported() -> None:
    device = torch.device("cuda", 0)
    with MemoryTracker(device).stage("train") as stage:
        kept = block(64).to(device)
        brief = block(128).to(device)
        del brief
        metrics = stage.end()
    assert kept.shape[0] == 64
    assert metrics["train_mem_gpu_alloc_delta"] == 64 * MB
    assert metrics["train_mem_gpu_peaked_delta"] == 128 * MB
