"""The metrics of a run as a readable table, with the names and formats of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ds_trainer.monitor.units import human_bytes

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
