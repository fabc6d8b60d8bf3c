"""Time and memory of head and loss on one GPU: whole logits against tiles, in bf16.

One head of Llama-3.2-1B (2,048 by 128,256) and 16,384 tokens. *whole* is ``cross_entropy(linear(hidden).float())``,
*tiles* is :func:`ds_trainer.parallel.linear_cross_entropy.linear_cross_entropy`, with Triton's kernels and without,
*one pass* :func:`ds_trainer.parallel.one_pass_cross_entropy.one_pass_cross_entropy`, with chunks of several sizes.
``host`` is the time until the host has started all kernels: where it is that of the step, the GPU waits for the host.

    python benchmarks/gpu_loss.py --out loss.json
    python benchmarks/gpu_loss.py --device cpu          the same code, small: does it run?
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from gpu_throughput import synchronize
from kept_results import Results
from torch.nn import functional as F

from ds_trainer.parallel import linear_cross_entropy as module
from ds_trainer.parallel.linear_cross_entropy import TileSettings, linear_cross_entropy
from ds_trainer.parallel.one_pass_cross_entropy import one_pass_cross_entropy

ROUNDS, WARMUP = 5, 2
TILES = ((4096, 4096), (1024, 16384), (1024, 4096), (2048, 8192), (8192, 4096), (4096, 16384))
CHUNKS = (1024, 512, 2048, 4096)
TOLERANCE = 1e-3  # relative, of the loss


def milliseconds(device: str, work: Callable[[], object]) -> tuple[float, float]:
    """Of ``work``: until the device has done it, and until the host has started it."""
    for _ in range(WARMUP):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        work()
    started = time.perf_counter() - began
    synchronize(device)
    return 1e3 * (time.perf_counter() - began) / ROUNDS, 1e3 * started / ROUNDS


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    device = options.device
    tokens, width, classes = (16384, 2048, 128256) if device == "cuda" else (256, 32, 512)
    torch.manual_seed(42)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, width, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_()
    targets = torch.randint(0, classes, (tokens,), device=device)

    def whole() -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def tiles(settings: TileSettings) -> Callable[[], torch.Tensor]:
        return lambda: linear_cross_entropy([(hidden, weight)], None, targets, settings).mean()

    def one_pass(chunk: int) -> Callable[[], torch.Tensor]:
        return lambda: one_pass_cross_entropy([(hidden, weight)], None, targets, TileSettings(chunk))[0] / tokens

    class NoKernels(module.Products):
        def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
            super().__init__(dtype, device)
            self.has_kernels = False

    cases = [("whole", whole, module.Products)]
    cases += [(f"tiles {a} x {b}", tiles(TileSettings(a, b)), module.Products) for a, b in TILES]
    cases[2:2] = [(f"one pass {chunk}", one_pass(chunk), module.Products) for chunk in CHUNKS]
    cases += [("tiles 4096 x 4096, without kernels", tiles(TileSettings(4096, 4096)), NoKernels)]
    results = Results(options.out, device, options.minutes, tokens=tokens, width=width, classes=classes)
    wanted, right = float(whole().detach()), True
    for name, loss, products in cases:
        if results.out_of_time:
            break
        with mock.patch.object(module, "Products", products):
            same = abs(float(loss().detach()) - wanted) <= TOLERANCE * wanted
            right &= same
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            both, host = milliseconds(device, lambda loss=loss: torch.autograd.grad(loss(), [hidden, weight]))
            peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if device == "cuda" else None
            with torch.no_grad():
                forward, _ = milliseconds(device, loss)
        results.add({"case": name, "ms": both, "host_ms": host, "forward_ms": forward, "peak_gb": peak, "same": same})
        print(results.cases[-1], flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
