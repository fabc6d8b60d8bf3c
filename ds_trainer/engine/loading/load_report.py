"""Time, bytes and memory of loading a model's weights, for the run header, metrics and records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import WeightSource, attached_weight_source
from ds_trainer.utils import distributed
from ds_trainer.utils.threads import new_thread

_SAMPLING_SECONDS = 0.005


@dataclass(frozen=True)
class LoadReport:
    """One load of a model's weights from files.

    Attributes:
        source: the directory or hub name.
        tensors: number of parameters loaded from a weight source; tied weights count once.
        bytes_read: bytes read from the files, over all ranks.
        seconds: time from the first parameter until the engine is built, on the slowest rank.
        host_peak_bytes: peak private memory of a process during the load, on the rank with the most.
        device_peak_bytes: peak device memory in torch's allocator, on the rank with the most; 0 on the CPU.
    """

    source: str
    tensors: int
    bytes_read: int
    seconds: float
    host_peak_bytes: int
    device_peak_bytes: int

    def metrics(self) -> dict[str, float]:
        """Returns the entries for the training metrics."""
        return {
            "load_seconds": round(self.seconds, 4),
            "load_bytes_read": self.bytes_read,
            "load_host_peak_bytes": self.host_peak_bytes,
            "load_device_peak_bytes": self.device_peak_bytes,
        }

    def of_all_ranks(self) -> LoadReport:
        """Returns the report of all ranks: the sum of bytes, and the maximum of time and memory. Collective."""
        largest = distributed.agree(
            torch.tensor([int(self.seconds * 1e6), self.host_peak_bytes, self.device_peak_bytes], dtype=torch.int64)
        )
        group = distributed.host_group()
        read = torch.tensor(self.bytes_read, device="cpu" if group is not None else distributed.collective_device())
        distributed.all_reduce_sum(read, group=group)
        seconds, host, device = largest[0] / 1e6, largest[1], largest[2]
        return replace(self, seconds=seconds, host_peak_bytes=host, device_peak_bytes=device, bytes_read=int(read))


class LoadMeter:
    """Measures a load; :attr:`report` is set when it has finished.

    Private memory excludes the pages of memory-mapped files, which the kernel can drop at any time. A thread samples
    it, so short peaks can be missed.
    """

    def __init__(self, source: WeightSource, name: str, tensors: int) -> None:
        self._source, self._name, self._tensors = source, name, tensors
        self.report: LoadReport | None = None
        self._process = psutil.Process()
        self._peak = 0
        self._done = threading.Event()

    def _sample(self) -> None:
        memory = self._process.memory_info()
        self._peak = max(self._peak, memory.rss - getattr(memory, "shared", 0))

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLING_SECONDS):
            self._sample()

    @contextmanager
    def running(self) -> Iterator[LoadMeter]:
        """Measures the block."""
        read, began = bytes_read(self._source), time.perf_counter()
        on_device = torch.cuda.is_available()
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        self._sample()
        thread = new_thread(self._watch, name="ds_trainer-load")
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()
            self._sample()
        self.report = LoadReport(
            self._name,
            self._tensors,
            bytes_read(self._source) - read,
            time.perf_counter() - began,
            self._peak,
            int(torch.cuda.max_memory_allocated()) if on_device else 0,
        )


def load_meter(model: nn.Module, name: str) -> LoadMeter | None:
    """Returns a meter for loading ``model``; None if no parameter is on meta with a weight source."""
    source = attached_weight_source(model)
    tensors = sum(parameter.is_meta for parameter in model.parameters())
    return LoadMeter(source, name, tensors) if source is not None and tensors else None


def bytes_read(source: WeightSource) -> int:
    """Returns the bytes that ``source`` and its component sources have read from files so far."""
    count = getattr(source, "bytes_read", None)
    if count is not None:
        return int(count)
    return sum(bytes_read(part) for part in getattr(source, "sources", ()))
