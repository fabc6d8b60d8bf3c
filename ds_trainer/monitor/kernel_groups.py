"""Kernels of profiled steps by group, beside what the device can do at best for the model.

On a CPU the operators of torch take the place of kernels. Pure arithmetic over recorded times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

Interval = tuple[float, float]

PRODUCTS, ATTENTION, LOSS, NORMS, OTHERS = "matrix products", "attention", "softmax and loss", "norms", "element-wise"
OPTIMIZER, COPIES, IDLE = "optimizer", "copies", "idle"
EXPOSED, HIDDEN = "communication, exposed", "communication, hidden"
GROUPS = (PRODUCTS, ATTENTION, LOSS, NORMS, OTHERS, OPTIMIZER, COPIES, EXPOSED, HIDDEN, IDLE)
"""*Hidden* communication overlaps with other kernels. *Idle* is time in which nothing ran: the host's."""

# The first that matches counts. Kernels of cuDNN's and cutlass' attention have the words of both.
_NAMES = (
    (COPIES, r"^mem(cpy|set)"),
    (OPTIMIZER, r"adam|lamb|lion|multi_tensor|_foreach|_fused_(sgd|adagrad)"),
    (ATTENTION, r"flash|fmha|attention|attn|sdpa"),
    (LOSS, r"softmax|cross_entropy|nll_loss|logsumexp"),
    (NORMS, r"(?<!distribution_)norm(?!al)|rsqrt|rms"),
    (
        PRODUCTS,
        r"gemm|gemv|cutlass|nvjet|xmma|cijk|splitk|triton_tem|conv(?!ert)|^mkl"
        r"|^aten::(mm|bmm|addmm|baddbmm|mv|addmv|dot|matmul|linear|_grouped_mm|_scaled_mm)\b",
    ),
)

# Parts of the planner's step (planner/step_time.py) by group.
_PLANNED = {
    "matrix products": PRODUCTS,
    "uneven experts": PRODUCTS,
    "attention": ATTENTION,
    "element-wise": OTHERS,
    **dict.fromkeys(("optimizer", "optimizer on the host"), OPTIMIZER),
    **dict.fromkeys(("ZeRO communication", "tensor and sequence parallelism", "exchange of tokens"), EXPOSED),
    **dict.fromkeys(("offload transfers", "offloaded activations"), COPIES),
    **dict.fromkeys(("weights from NVMe", "optimizer states on NVMe"), COPIES),
}

_SETTINGS = {
    PRODUCTS: "Set bf16=True if it is off, and increase per_device_train_batch_size: small products do not fill "
    "the device.",
    ATTENTION: 'Set attn_implementation="flash_attention_2", or pack samples instead of padding them: a mask keeps '
    "the fastest kernels away.",
    OTHERS: "Set torch_compile_regional=True: norms, activations and residuals become fewer kernels.",
    OPTIMIZER: "Increase gradient_accumulation_steps, or set optim='adamw_torch_fused'.",
    COPIES: "Turn offload off where memory allows, or increase gradient_accumulation_steps.",
    EXPOSED: "Increase gradient_accumulation_steps or the micro-batch, or use a lower ZeRO stage if memory allows.",
    IDLE: "Increase the micro-batch, turn activation_checkpointing off if memory allows, or set "
    "torch_compile_regional=True: the host cannot start kernels as fast as they end.",
}


def group_of(name: str) -> str:
    """The group of a kernel or an operator that computes; what no pattern knows is element-wise."""
    return next((group for group, pattern in _NAMES if re.search(pattern, name.lower())), OTHERS)


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    length, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


def group_seconds(
    computed: Sequence[tuple[str, float, float, float]],
    communication: Sequence[Interval],
    updates: Sequence[Interval],
    window: Interval,
    steps: int,
) -> dict[str, float]:
    """Seconds of each of :data:`GROUPS` in a step. All times are microseconds.

    Args:
        computed: ``(name, start, end, time of its own)`` of what computed.
        communication: when collectives were in progress.
        updates: when the optimizer ran: what began there belongs to it.
        window: from the start of the first step to the end of the last one; what lies outside is left out.
        steps: number of steps.
    """
    begin, end = window
    wires = [(max(one[0], begin), min(one[1], end)) for one in communication if one[0] < end and one[1] > begin]
    inside, seconds = [row for row in computed if row[1] < end and row[2] > begin], dict.fromkeys(GROUPS, 0.0)
    for name, start, _, own in inside:
        seconds[OPTIMIZER if any(one <= start < last for one, last in updates) else group_of(name)] += own
    kernels = [(max(start, begin), min(last, end)) for _, start, last, _ in inside]
    busy, both = covered(kernels), covered([*kernels, *wires])
    seconds[EXPOSED] = both - busy
    seconds[HIDDEN] = covered(wires) - seconds[EXPOSED]
    seconds[IDLE] = end - begin - both
    return {group: value / 1e6 / steps for group, value in seconds.items()}


def table(seconds: Mapping[str, float], best: Mapping[str, float] | None) -> list[str]:
    """The groups as a table in Markdown; with ``best``, the parts of the planner's fastest step, what lacks most."""
    whole = sum(value for group, value in seconds.items() if group != HIDDEN) or 1.0
    at_best = dict.fromkeys(GROUPS, 0.0)
    for part, value in (best or {}).items():
        at_best[_PLANNED.get(part, IDLE)] += value
    lines = ["| group | ms | share |" + " at best, ms |" * bool(best), "|---|---:|---:|" + "---:|" * bool(best)]
    for group, value in seconds.items():
        share = "" if group == HIDDEN else f"{100 * value / whole:.1f} %"
        reached = f" {1e3 * at_best[group]:.2f} |" if group not in (HIDDEN, NORMS, LOSS) else " |"
        lines.append(f"| {group} | {1e3 * value:.2f} | {share} |" + reached * bool(best))
    if best:
        gaps = {group: seconds[group] - at_best[group] for group in _SETTINGS}
        gaps[OTHERS] = seconds[OTHERS] + seconds[NORMS] + seconds[LOSS] - at_best[OTHERS]
        largest = max(gaps, key=lambda group: gaps[group])
        text = "*At best* is what the planner counts for this model if kernels are as fast as they get; that of "
        lines += ["", f"{text}element-wise kernels includes norms, softmax and loss."]
        if gaps[largest] > 0:
            lines += ["", f"**Largest gap: {largest}**, {1e3 * gaps[largest]:.1f} ms. {_SETTINGS[largest]}"]
    return [*lines, ""]
