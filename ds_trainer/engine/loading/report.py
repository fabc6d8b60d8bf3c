"""What loading the weights of a model took: for the header, the metrics and the records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from ds_trainer.engine.loading.weight_source import WeightSource, attached_weights
from ds_trainer.utils import distributed
from ds_trainer.utils.threads import new_thread

_SAMPLING_SECONDS = 0.005


@dataclass(frozen=True)
class LoadReport:
    """One load of a model's weights from files.

    Attributes:
        source: the directory or hub name.
        tensors: parameters that came from a weight source, each once.
        bytes_read: from the files; of all ranks.
        seconds: from the first parameter until the engine is built, of the slowest rank.
        host_peak_bytes: largest private memory of a process meanwhile, of the rank with the most.
        device_peak_bytes: the same of the device's memory as torch's allocator counts it; 0 on the CPU.
    """

    source: str
    tensors: int
    bytes_read: int
    seconds: float
    host_peak_bytes: int
    device_peak_bytes: int

    def metrics(self) -> dict[str, float]:
        """What the metrics of a training say of it."""
        return {
            "load_seconds": round(self.seconds, 4),
            "load_bytes_read": self.bytes_read,
            "load_host_peak_bytes": self.host_peak_bytes,
            "load_device_peak_bytes": self.device_peak_bytes,
        }

    def of_all_ranks(self) -> LoadReport:
        """Bytes of all ranks together, time and memory of the rank that took the most. Collective."""
        largest = distributed.agree(
            torch.tensor([int(self.seconds * 1e6), self.host_peak_bytes, self.device_peak_bytes], dtype=torch.int64)
        )
        group = distributed.host_group()
        read = torch.tensor(self.bytes_read, device="cpu" if group is not None else distributed.collective_device())
        distributed.all_reduce_sum(read, group=group)
        seconds, host, device = largest[0] / 1e6, largest[1], largest[2]
        return replace(self, seconds=seconds, host_peak_bytes=host, device_peak_bytes=device, bytes_read=int(read))


class LoadMeter:
    """Measures a load while it goes on; ``report`` is there when it has ended.

    Private memory is what the process has for itself: pages of files that it has mapped can be dropped at any time and
    are left out. It is sampled by a thread, so that short peaks can be missed.
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
        """Measures inside."""
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
    """A meter for the load of ``model``, which is on meta; None for a model that has its weights."""
    source = attached_weights(model)
    tensors = sum(parameter.is_meta for parameter in model.parameters())
    return LoadMeter(source, name, tensors) if source is not None and tensors else None


def bytes_read(source: WeightSource) -> int:
    """What ``source``, and the sources that it is made of, have read from files so far."""
    own = getattr(source, "bytes_read", None)
    if own is not None:
        return int(own)
    return sum(bytes_read(part) for part in getattr(source, "sources", ()))
