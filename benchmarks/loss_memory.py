"""Peak memory and time of the loss of a language model with a large vocabulary: whole logits, tiles, one pass.

Memory: every allocation of the forward and backward pass of head and loss is counted, with 4,096 tokens and 131,072
classes, beside the weight and the input of the head. The gradients of both are counted: with whole logits they are made
when the largest tensors are gone, in tiles they are most of the peak, so the last ratio leaves them out there. The
allocations are those of tensors without data (PyTorch's fake tensors): the same operations run, and a laptop can count
10 GB.

Time: CPU seconds of the same passes on real tensors with fewer tokens and classes, medians, the ways in turn.

    python benchmarks/loss_memory.py                                  the table
    python benchmarks/loss_memory.py --json benchmarks/results/loss_memory.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kept_results import Results
from live_tensors import LiveTensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from ds_trainer.parallel.linear_cross_entropy import TileSettings, linear_cross_entropy
from ds_trainer.parallel.one_pass_cross_entropy import chunk_tokens, one_pass_cross_entropy

TOKENS, CLASSES = 4096, 131072
WIDTHS = (1024, 2048, 4096)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As models of transformers compute it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def tiles(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As the Trainer computes it with ``loss_chunk_tokens``."""
    return linear_cross_entropy([(hidden, weight)], None, targets, TileSettings()).sum()


def one_pass(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As the Trainer computes a sum where there is room for the gradient of the weight."""
    settings = TileSettings(chunk_tokens(len(weight), hidden.device))
    return one_pass_cross_entropy([(hidden, weight)], None, targets, settings)[0]


WAYS = {"plain": plain, "tiles": tiles, "one_pass": one_pass}


def leaves(tokens: int, classes: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Input, weight and targets."""
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(classes, width).div(width**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, classes, (tokens,))


def peak(loss: Callable[..., torch.Tensor], width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes at most allocated in the two passes; and those of the gradients, which are among them."""
    with FakeTensorMode():
        inputs = leaves(TOKENS, CLASSES, width, dtype)
        with LiveTensors() as live:
            for one in inputs:
                one.detach()  # seen now, so that they count as what exists before
            before = live.now
            loss(*inputs).backward()
        return live.peak - before, sum(one.grad.nbytes for one in inputs[:2] if one.grad is not None)


def seconds(width: int, dtype: torch.dtype, tokens: int, classes: int, repetitions: int) -> dict[str, float]:
    """Median CPU seconds of the two passes, of each way."""
    inputs = leaves(tokens, classes, width, dtype)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for repetition in range(repetitions + 1):
        for name, loss in WAYS.items():
            start = time.process_time()
            loss(*inputs).backward()
            if repetition:  # the first one warms up
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Measure, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--timed", type=int, nargs=2, default=[512, 32768], metavar=("TOKENS", "CLASSES"))
    options = parser.parse_args()
    results = Results(options.json, "cpu", tokens=TOKENS, classes=CLASSES, timed=options.timed)
    names = ("weights", "width", "plain MB", "tiles MB", "their gradients", "ratio", "without them", "one pass MB")
    print(f"| {' | '.join(names)} | plain s | tiles s | one pass s |")
    print(f"|---|{9 * '---:|'}---:|")
    for name, dtype in DTYPES.items():
        for width in options.widths:
            (before, gradients), (now, _), (most, _) = (peak(loss, width, dtype) for loss in WAYS.values())
            case: dict[str, Any] = {"dtype": name, "width": width, "plain_bytes": before, "tiles_bytes": now}
            case["one_pass_bytes"] = most
            case |= {"gradient_bytes": gradients, "ratio": now / before}
            case["ratio_without_gradients"] = (now - gradients) / before
            if width == options.widths[0]:
                case["seconds"] = seconds(width, dtype, *options.timed, options.repetitions)
            results.add(case)
            times = [f"{case['seconds'][way]:.2f}" if "seconds" in case else "" for way in WAYS]
            numbers = [f"{one / 1e6:,.0f}" for one in (before, now, gradients)]
            numbers += [f"{case[ratio]:.3f}" for ratio in ("ratio", "ratio_without_gradients")]
            numbers.append(f"{most / 1e6:,.0f}")
            print(f"| {name} | {width} | {' | '.join([*numbers, *times])} |")


if __name__ == "__main__":
    main()
