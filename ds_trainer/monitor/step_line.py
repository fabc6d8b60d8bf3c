"""Logs and metrics as text: a line such as ``step 40/300  epoch 0.13  loss 2.314  grad norm 0.84``, and a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ds_trainer.monitor.metrics_file import LOSSES, plain
from ds_trainer.utils.printable import one_line
from ds_trainer.utils.secrets import redacted
from ds_trainer.utils.units import human_bytes, human_count, human_duration

_HIDDEN = ("step", "epoch", "total_flos")  # the first two start the line; the third is not for the console

# Formats by the end of the name: "tokens_per_second", "eval_tokens_per_second", ...
_SUFFIXES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("tokens_per_second", lambda rate: f"{human_count(rate)} tok/s"),
    ("samples_per_second", lambda rate: f"{human_count(rate)} samples/s"),
    ("steps_per_second", lambda rate: f"{human_count(rate)} steps/s"),
    ("tflops_per_device", lambda speed: f"{_significant(speed)} TFLOP/s"),
    ("mfu", lambda fraction: f"MFU {_percent(fraction)}"),
    ("data_wait", lambda fraction: f"data wait {_percent(fraction)}"),
    ("num_input_tokens_seen", lambda count: f"{human_count(count)} tokens seen"),
    ("memory_gb", lambda size: f"{size:.2f} GB"),
    ("alloc_delta", lambda size: f"alloc delta {human_bytes(size)}"),
    ("peaked_delta", lambda size: f"peaked delta {human_bytes(size)}"),
    ("init_mem_cpu", lambda size: f"init mem cpu {human_bytes(size)}"),
    ("bytes_read", lambda size: f"{human_bytes(size)} read"),
    ("bytes", human_bytes),
    ("step_seconds", lambda seconds: f"{_significant(seconds)} s/step"),
    ("seconds", human_duration),
    ("learning_rate", lambda rate: f"lr {rate:.1e}"),
    ("runtime", lambda seconds: f"time {human_duration(seconds)}"),
    ("grad_norm", lambda norm: f"grad norm {_decimal(norm, 2)}"),
    ("loss", lambda loss: f"loss {_decimal(loss, 3)}"),
)


LONGEST = 110
"""Characters of a line on the console."""

_FIRST = (*LOSSES, "grad_norm", "learning_rate", "tokens_per_second", "samples_per_second", "mfu", "memory_gb")
_RECORDED = re.compile(
    r"step_seconds|tflops_per_device|eval_.*_per_second|eval_items|eval_.*model_preparation_time|(load|packing)_.*|"
    r"experts/.*|expert_.*|dead_experts|"
    r"(predicted|measured)_(step_seconds|peak_memory_bytes)|(step_seconds|peak_memory)_error"
)
_MUCH_WAITING = 0.1


def step_line(logs: Mapping[str, Any], step: int, max_steps: int, max_str_len: int = 100, end: str = "") -> str:
    """The whole line: step and epoch, values by their importance as far as they fit into :data:`LONGEST`, and ``end``.

    Other measures of the speed, and what a run reports about its start, are in ``metrics.jsonl`` alone.

    Args:
        logs: the values.
        step: the optimizer step.
        max_steps: steps of the run; 0 if that is unknown.
        max_str_len: characters of a string that are shown.
        end: the last part, such as the remaining time.
    """
    parts = [f"step {step}/{max_steps}" if max_steps > 0 else f"step {step}"]
    epoch = plain(logs.get("epoch"))
    if isinstance(epoch, (int, float)):
        parts.append(f"epoch {epoch:.2f}")
    values = [one_line(redacted(text)) for text in phrases(_shown(logs), max_str_len)]
    tail, hidden = [end] if end else [], 0
    while len(line := "  ".join([*parts, *values, *tail])) > LONGEST and len(values) > 1:
        values.pop()
        hidden += 1
        tail = [f"(+{hidden} in metrics.jsonl)", *([end] if end else [])]
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def _shown(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The values for the console, the most important first; losses of the sources of a mixture come last."""
    left_out = {
        f"{stage}{unit}_per_second"
        for stage in ("", "train_")
        for unit in ("samples", "steps")
        if f"{stage}tokens_per_second" in logs
    }
    waits = plain(logs.get("data_wait"))
    if not (isinstance(waits, (int, float)) and waits > _MUCH_WAITING):
        left_out.add("data_wait")
    names = [name for name in logs if name not in left_out and not _RECORDED.fullmatch(name)]
    order = {name: place for place, name in enumerate(_FIRST)}
    names.sort(key=lambda name: (order.get(name, len(order)), "loss/" in name))
    return {name: logs[name] for name in names}


def phrases(logs: Mapping[str, Any], max_str_len: int = 100) -> list[str]:
    """Every value of ``logs`` with its name or unit, in order; step and epoch are left out.

    Strings longer than ``max_str_len`` characters are truncated.
    """
    return [_phrase(name, plain(value), max_str_len) for name, value in logs.items() if name not in _HIDDEN]


def _phrase(name: str, value: Any, max_str_len: int) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for suffix, form in _SUFFIXES:
            prefix = name[: -len(suffix)]
            if name.endswith(suffix) and (not prefix or prefix.endswith("_")):
                return f"{prefix.replace('_', ' ')}{form(value)}"
    label = name.replace("_", " ")
    if isinstance(value, float):
        return f"{label} {value:.4g}"
    text = str(value)
    if len(text) > max_str_len:
        text = f"{text[:max_str_len]}... ({len(text)} characters)"
    return f"{label} {text}"


def _percent(fraction: float) -> str:
    """A percentage: one decimal below 10 %, since more would be noise."""
    return f"{100 * fraction:.{1 if abs(fraction) < 0.0995 else 0}f} %"


def _significant(value: float) -> str:
    """Three significant digits: ``412``, ``0.0123``, ``3.2e-04``."""
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def _decimal(value: float, digits: int) -> str:
    """``digits`` decimals, or three significant digits if those would all be zeros."""
    if value != 0 and abs(value) < 10.0**-digits:
        return f"{value:.2e}"
    return f"{value:.{digits}f}"


_MEBIBYTE, _GIBI = 2**20, 2**30


def format_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """``metrics`` with readable values.

    Bytes (``_mem_`` in the name) become whole MB of 2**20 bytes, rounded down; seconds (``_runtime``) become
    ``h:mm:ss.hundredths``; ``total_flos`` becomes whole GF of 2**30 operations; other floats have four decimals.
    Metrics that transformers does not have: ``load_seconds`` is formatted as a runtime, and ``load_..._bytes`` and
    ``load_bytes_read`` as in the header, with decimal prefixes.
    """
    return {name: _formatted(name, value) for name, value in metrics.items()}


def metrics_table(title: str, metrics: Mapping[str, Any]) -> str:
    """:func:`format_metrics` as lines, sorted by name, under ``***** <title> metrics *****``."""
    shown = {name: str(value) for name, value in format_metrics(metrics).items()}
    names = max((len(name) for name in shown), default=0)
    values = max((len(value) for value in shown.values()), default=0)
    rows = [f"  {name:<{names}} = {shown[name]:>{values}}" for name in sorted(shown)]
    return "\n".join([f"***** {title} metrics *****", *rows])


def _formatted(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{int(value) // _MEBIBYTE}MB"
    if name.startswith("load_") and name.endswith(("_bytes", "_bytes_read")):
        return human_bytes(value)
    if "_runtime" in name or name == "load_seconds":
        whole = int(value)
        return f"{timedelta(seconds=whole)}.{int(abs(value - whole) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) // _GIBI}GF"
    return round(value, 4) if isinstance(value, float) else value
