"""Compares the kernels of ring attention on one device with the attention of torch: ratios, forward and backward.

On one context-parallel rank nothing is sent. The measurement shows what ring attention adds on every rank: the division
into blocks, the merging, the masks. Both sides must compute the same tensors, which is checked first. Then they take
turns, and the result is the ratio of each pair of turns. ``again`` is torch's attention a second time, which shows the
measurement error.

If torch needs a mask (windows, documents), the mask is created in advance, as transformers creates it once for all
layers. Ring attention creates the masks of its blocks in every call, and skips empty blocks.

    python benchmarks/ring_kernels.py                       every case, on the GPU if there is one
    python benchmarks/ring_kernels.py --quick               does it run here?
    python benchmarks/ring_kernels.py --device cpu --cases causal window --out ring.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kept_results import Results
from torch import Tensor

from ds_trainer.parallel.attention_blocks import attention_blocks
from ds_trainer.parallel.document_runs import DocumentRuns
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.ring_attention import ring_attention
from ds_trainer.parallel.sequence_plan import SequencePlan

SIDES = ("torch", "again", "ring")
PASSES = ("forward", "both")  # forward alone, and forward with backward
SEED = 42
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}  # relative to the largest value of each tensor


@dataclass(frozen=True)
class Case:
    """One line of the table. ``documents``: how many a sequence is packed from, 1 for none."""

    name: str
    batch: int
    heads: int
    key_heads: int
    tokens: int
    head_dim: int
    dtype: str
    causal: bool = True
    window: int | None = None
    documents: int = 1
    rounds: int = 40
    warmup: int = 5


def cases(device: str) -> list[Case]:
    """What is measured on such a device: plain cases first, for which the two ought to be equal."""
    dtype, tokens = ("bfloat16", 8192) if device == "cuda" else ("float32", 512)
    causal = (
        Case("causal", 1, 32, 8, tokens, 128, dtype) if device == "cuda" else Case("causal", 1, 8, 2, tokens, 64, dtype)
    )
    return [
        causal,
        replace(causal, name="causal, long", tokens=4 * tokens, rounds=20),
        replace(causal, name="causal, short", batch=8, tokens=tokens // 4),
        replace(causal, name="full", causal=False),
        replace(causal, name="window", window=tokens // 8),
        replace(causal, name="packed", documents=4),
    ]


# -- the two sides -------------------------------------------------------------------------------------------------


def inputs(case: Case, device: str) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and a gradient of the output; the same at every call."""
    draw = torch.Generator().manual_seed(SEED)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    made = [torch.randn(case.batch, number, case.tokens, case.head_dim, generator=draw) for number in heads]
    *leaves, grad_out = (tensor.to(device, getattr(torch, case.dtype)) for tensor in made)
    return [leaf.requires_grad_() for leaf in leaves], grad_out


def documents_of(case: Case) -> Tensor | None:
    """The document of each token: ``[batch, tokens]``."""
    if case.documents == 1:
        return None
    return (torch.arange(case.tokens) * case.documents // case.tokens).expand(case.batch, -1)


def plan_of(case: Case) -> SequencePlan:
    """The plan of one context-parallel rank."""
    return SequencePlan(ParallelLayout(1), case.tokens, DocumentRuns.of(documents_of(case)))


def of_torch(case: Case, device: str) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` with a mask only where it needs one."""
    mask = None
    if case.window is not None or case.documents > 1:
        query, key = torch.arange(case.tokens)[:, None], torch.arange(case.tokens)[None, :]
        mask = key <= query if case.causal else torch.ones(case.tokens, case.tokens, dtype=torch.bool)
        if case.window is not None:
            mask = mask & ((query - key < case.window) if case.causal else ((query - key).abs() <= case.window))
        documents = documents_of(case)
        if documents is not None:
            mask = mask & (documents[0][:, None] == documents[0][None, :])
        mask = mask[None, None].to(device)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        causal = case.causal and mask is None
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)

    return attention


def of_ring(case: Case) -> Callable[..., Tensor]:
    """``ring_attention`` of one rank; one plan, as for the layers of a micro-batch."""
    plan = plan_of(case)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(
            query, key, value, plan=plan, group=None, cp_rank=0, causal=case.causal, window=case.window
        )

    return attention


# -- measuring -----------------------------------------------------------------------------------------------------


def seconds(device: str, work: Callable[[], Any]) -> float:
    """Wall clock of ``work``, until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def differences(leaves: list[Tensor], grad_out: Tensor, sides: dict[str, Callable[..., Tensor]]) -> dict[str, float]:
    """Largest difference of output and gradients between the sides, relative to the largest value."""
    results = {}
    for name in ("torch", "ring"):
        out = sides[name](*leaves)
        results[name] = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    pairs = zip(("out", "query", "key", "value"), results["torch"], results["ring"], strict=True)
    return {name: float((a.float() - b.float()).abs().max() / a.float().abs().max()) for name, a, b in pairs}


def measure(case: Case, device: str) -> dict[str, Any]:
    """Check that both sides compute the same, then time them in turns."""
    leaves, grad_out = inputs(case, device)
    theirs = of_torch(case, device)
    sides: dict[str, Callable[..., Tensor]] = {"torch": theirs, "again": theirs, "ring": of_ring(case)}
    check = differences(leaves, grad_out, sides)

    def run(name: str, what: str) -> Callable[[], Any]:
        if what == "forward":
            return lambda: sides[name](*leaves)
        return lambda: torch.autograd.grad(sides[name](*leaves), leaves, grad_out)

    draw = np.random.default_rng(SEED)
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in SIDES} for what in PASSES}
    for number in range(case.warmup + case.rounds):
        for what in PASSES:
            for name in draw.permutation(SIDES):
                took = seconds(device, run(str(name), what))
                if number >= case.warmup:
                    times[what][str(name)].append(took)
    blocks = attention_blocks(plan_of(case), 0, case.causal, case.window)
    return {
        **asdict(case),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "blocks": len(blocks.of[0]),
        "check": {**check, "passed": all(value <= TOLERANCE[case.dtype] for value in check.values())},
        **{what: summary(of_pass) for what, of_pass in times.items()},
    }


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median milliseconds of each side, and of the ratios to torch's turn of the same round, with intervals."""
    base = np.asarray(times["torch"])
    ratios = {}
    for name in SIDES[1:]:
        of_rounds = np.asarray(times[name]) / base
        resamples = np.random.default_rng(SEED).choice(of_rounds, (2000, len(of_rounds)))
        interval = np.quantile(np.median(resamples, axis=1), [0.025, 0.975]).tolist()
        ratios[name] = {"median": float(np.median(of_rounds)), "interval_95": interval}
    return {"median_ms": {name: 1000 * float(np.median(times[name])) for name in SIDES}, "ratio": ratios}


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown: milliseconds of torch's attention, and ratios to it."""
    lines = [
        "| case | batch x heads/key heads x tokens x width | dtype | blocks | torch forward | again | ring "
        "| torch both passes | again | ring | same results |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [
            result["name"],
            "{batch} x {heads}/{key_heads} x {tokens} x {head_dim}".format(**result),
            result["dtype"],
            str(result["blocks"]),
        ]
        for what in PASSES:
            cells.append(f"{result[what]['median_ms']['torch']:.2f} ms")
            for name in SIDES[1:]:
                ratio = result[what]["ratio"][name]
                low, high = ratio["interval_95"]
                cells.append(f"{ratio['median']:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {' | '.join(cells)} | {'yes' if result['check']['passed'] else 'NO'} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run; the exit code is 1 where the two sides did not compute the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it work, not to believe the numbers")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", help="names of cases; all by default")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    chosen = cases(options.device)
    names = [case.name for case in chosen]
    if unknown := set(options.cases or []) - set(names):
        parser.error(f"unknown cases {sorted(unknown)}; there are {names}")
    results = Results(options.out, options.device, options.minutes)
    for case in chosen:
        if results.out_of_time or (options.cases and case.name not in options.cases):
            continue
        if options.quick:
            case = replace(case, rounds=3, warmup=1)
        results.add(measure(case, options.device))
        print(table(results.cases[-1:]), json.dumps(results.cases[-1]["check"]), sep="\n", flush=True)
    print("\n" + table(results.cases))
    return 0 if all(result["check"]["passed"] for result in results.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
