"""``MemoryTracker``: memory use of the Trainer's stages.

For a stage (``init``, ``train``, ``eval``, ``test``) the report has, in bytes,

- ``<stage>_mem_cpu_alloc_delta``: resident memory at the end minus that at the beginning; negative if memory was
  freed;
- ``<stage>_mem_cpu_peaked_delta``: the peak minus the memory at the end. The sum of both is what the stage needed.
- the same with ``gpu`` on a CUDA device, from torch's allocator, without the memory of kernels and other libraries.

A thread samples the CPU's peak, so short peaks can be missed. The allocator has one peak counter, which a stage resets.
Therefore a stage within another one (an evaluation during training) is not measured and counts toward the outer one.
The memory of ``init`` is reported with the first stage that ends after it, together with the memory in use before
(``before_init_mem_cpu``, ``before_init_mem_gpu``).

Source of names and meanings: transformers 5, ``skip_memory_metrics``.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch

from ds_trainer.utils.threads import new_thread

SAMPLING_SECONDS = 0.002  # often enough to see tensors in use, and no load on the GIL


@dataclass(frozen=True)
class _Usage:
    """Bytes before, after and at the peak of a stage."""

    before: int
    after: int
    peak: int

    def metrics(self, stage: str, kind: str) -> dict[str, int]:
        return {
            f"{stage}_mem_{kind}_alloc_delta": self.after - self.before,
            f"{stage}_mem_{kind}_peaked_delta": max(0, self.peak - self.after),
        }


class MemoryTracker:
    """Measures stages, one at a time.

    Args:
        device: the model's device.
        enabled: whether to measure; otherwise stages are empty and cost nothing.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device = device
        self.enabled = enabled
        self._running: weakref.ref[Stage] | None = None
        self._unreported: dict[str, int] = {}

    def stage(self, name: str) -> Stage:
        """Begin a stage: a context manager, or an object whose :meth:`Stage.end` you call.

        It is not measured if the tracker is disabled or another stage is in progress.
        """
        outer = None if self._running is None else self._running()
        measured = self.enabled and (outer is None or outer.ended)
        stage = Stage(self, name, measured)
        if measured:
            self._running = weakref.ref(stage)
        return stage

    def _report(self, name: str, usages: dict[str, _Usage]) -> dict[str, int]:
        """The metrics of a finished stage; those of ``init`` are held back until the next one."""
        metrics: dict[str, int] = {}
        for kind, usage in usages.items():
            metrics.update(usage.metrics(name, kind))
        if name == "init":
            before = {f"before_init_mem_{kind}": usage.before for kind, usage in usages.items()}
            self._unreported = {**metrics, **before}
            return {}
        earlier, self._unreported = self._unreported, {}
        return {**earlier, **metrics}


class Stage:
    """A stage being measured. It ends with its block, with :meth:`end`, or when it is no longer referenced (after a
    constructor raised).
    """

    def __init__(self, tracker: MemoryTracker, name: str, measured: bool) -> None:
        self._tracker = tracker
        self._name = name
        self.ended = not measured
        if not measured:
            return
        gc.collect()
        self._on_gpu = tracker.device.type == "cuda"
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(tracker.device)
            self._gpu_before = torch.cuda.memory_allocated(tracker.device)
        self._process = psutil.Process()
        self._cpu_before = self._cpu_peak = self._resident()
        self._stop = threading.Event()
        thread = new_thread(_sample, weakref.ref(self), self._stop, name="ds_trainer-memory")
        thread.start()
        self._thread = thread
        weakref.finalize(self, self._stop.set)

    def end(self) -> dict[str, int]:
        """End the stage. The first call returns its metrics; empty if it is not measured."""
        if self.ended:
            return {}
        self.ended = True
        self._stop.set()
        self._thread.join()
        self.sample()
        gc.collect()
        after = self._resident()
        usages = {"cpu": _Usage(self._cpu_before, after, self._cpu_peak)}
        if self._on_gpu:
            device = self._tracker.device
            torch.cuda.empty_cache()
            peak = torch.cuda.max_memory_allocated(device)
            usages["gpu"] = _Usage(self._gpu_before, torch.cuda.memory_allocated(device), peak)
        return self._tracker._report(self._name, usages)

    def sample(self) -> None:
        """Sample the resident memory."""
        self._cpu_peak = max(self._cpu_peak, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def _sample(stage: weakref.ref[Stage], stop: threading.Event) -> None:
    while not stop.wait(SAMPLING_SECONDS):
        alive = stage()
        if alive is None:
            return
        alive.sample()
        del alive  # otherwise this thread would keep the stage alive while it waits
