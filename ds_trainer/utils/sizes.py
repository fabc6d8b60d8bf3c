"""Sizes in bytes, as people write them."""

from __future__ import annotations

_SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of a size like ``"5GB"`` or ``"200MiB"``. Raises ValueError for anything else."""
    compact = text.replace(" ", "").upper()
    for unit in sorted(_SIZE_UNITS, key=len, reverse=True):
        number = compact.removesuffix(unit)
        if number != compact and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * _SIZE_UNITS[unit])
    raise ValueError(f"{text!r} is no size; write it like '5GB' or '200MB'")
