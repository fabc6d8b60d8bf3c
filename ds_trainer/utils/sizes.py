"""Human-readable sizes in bytes."""

from __future__ import annotations

_SIZE_UNITS = {"B": 1}
_SIZE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_SIZE_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``"5GB"`` or ``"200MiB"``. Raises ValueError for anything else."""
    compact = text.replace(" ", "").upper()
    for unit in sorted(_SIZE_UNITS, key=len, reverse=True):
        number = compact.removesuffix(unit)
        if number != compact and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * _SIZE_UNITS[unit])
    raise ValueError(f"{text!r} is not a size; use a form like '5GB' or '200MB'")


def parse_tokens(text: str) -> int:
    """Tokens of a length such as ``"64K"``, ``"1M"`` or ``"131072"``; K is 1024 and M is 1024 K, as lengths of contexts
    are given. Raises ValueError for anything else, and for fractions of a token.
    """
    compact = text.replace(" ", "").replace("_", "").upper()
    unit = {"K": 2**10, "M": 2**20}.get(compact[-1:], 1)
    number = compact[:-1] if unit > 1 else compact
    if number.replace(".", "", 1).isdecimal() and (tokens := float(number) * unit) == int(tokens) > 0:
        return int(tokens)
    raise ValueError(f"{text!r} is not a number of tokens; use a form like '64K', '1M' or '131072'")
