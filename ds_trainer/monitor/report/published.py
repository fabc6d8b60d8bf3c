"""Published speeds of training runs, as MFU, to judge that of a run. Pure data.

The sources give tokens per second and device. The MFU is computed from that with the FLOPs of
:mod:`ds_trainer.planner.flops` (attention counted in full, recomputation not counted; 4 instead of 6 operations for a
frozen weight) and the dense bf16 peak of an H100 or H200 (989.4 TFLOP/s).
"""

from __future__ import annotations

from dataclasses import dataclass

_SIMILAR = 0.2  # two models have the same shape if their numbers of parameters differ by less


@dataclass(frozen=True)
class PublishedRun:
    """A published run.

    Attributes:
        parameters: of the model.
        adapters: whether only adapters are trained.
        device: word in the device's name.
        devices: number of devices.
        length: tokens of a sequence.
        tokens_per_second: of one device.
        mfu: 0 to 1.
        source: where it was published.
    """

    parameters: float
    adapters: bool
    device: str
    devices: int
    length: int
    tokens_per_second: float
    mfu: float
    source: str


PUBLISHED = tuple(
    PublishedRun(*row)
    for row in (
        (8.03e9, False, "H100", 8, 8192, 5762, 0.337, "torchtitan benchmarks, Llama 3 8B, 2024-12"),
        (8.03e9, True, "H100", 1, 4096, 12473, 0.461, "NeMo AutoModel performance summary, Llama 3 8B LoRA"),
        (7.62e9, True, "H100", 1, 4096, 14110, 0.475, "NeMo AutoModel performance summary, Qwen2.5 7B LoRA"),
        (32.8e9, True, "H100", 8, 4096, 2250, 0.328, "NeMo AutoModel performance summary, Qwen2.5 32B LoRA"),
        (70.6e9, True, "H100", 8, 4096, 1092, 0.343, "NeMo AutoModel performance summary, Llama 3 70B LoRA"),
        (70.6e9, False, "H100", 64, 8192, 867, 0.422, "NeMo AutoModel performance summary, Llama 3 70B"),
        (70.6e9, False, "H100", 256, 8192, 652, 0.317, "torchtitan asyncTP, Llama 3 70B bf16, 2025-06"),
        (14.8e9, False, "H200", 8, 2048, 810, 0.073, "DeepSpeed pull request 8186, Qwen3 14B, ZeRO-Offload"),
    )
)


def best_published(parameters: float, adapters: bool, device: str) -> PublishedRun | None:
    """The published run with the highest MFU for a model of that size on such a device; None if there is none."""
    similar = [
        run
        for run in PUBLISHED
        if run.adapters == adapters
        and run.device.lower() in device.lower()
        and abs(run.parameters - parameters) <= _SIMILAR * run.parameters
    ]
    return max(similar, key=lambda run: run.mfu, default=None)
