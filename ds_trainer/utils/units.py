"""Numbers for people: 25.3M parameters, 12.3k tok/s, 3 min 20 s, and what they write: 5GB, 64K."""

from __future__ import annotations

import math
import re

_PREFIXES = ("", "k", "M", "B", "T")  # B, not G: parameters and tokens are counted in billions


def whole_number(text: str) -> int | None:
    """The number that ``text`` is; None if it is not 1 to 18 digits. ``int`` takes other digits, and fails for many."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _decimal(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18}", text) else None


def human_count(number: float) -> str:
    """Three significant digits and a prefix: ``842``, ``12.3k``, ``25.3M``, ``7B``, ``1.01T``.

    Whole numbers below 1000 stay as they are. NaN and infinity come back as ``nan`` and ``inf``.
    """
    if not math.isfinite(number):
        return str(number)
    scaled, index = abs(number), 0
    while scaled >= 999.5 and index < len(_PREFIXES) - 1:  # 999.6 would be rounded to 1000: use the next prefix
        scaled, index = scaled / 1000, index + 1
    digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    text = f"{scaled:.{digits}f}"
    if digits:
        text = text.rstrip("0").rstrip(".")
    return f"{'-' if number < 0 else ''}{text}{_PREFIXES[index]}"


def human_operations(number: float) -> str:
    """Floating-point operations with SI prefixes: ``842 FLOP``, ``6.3 GFLOP``, ``989 TFLOP``."""
    text = human_count(number)
    prefix = {"k": "k", "M": "M", "B": "G", "T": "T"}.get(text[-1], "")
    return f"{text.removesuffix('B').rstrip('kMT')} {prefix}FLOP"


def human_bytes(number: float) -> str:
    """Bytes with decimal prefixes: ``842 B``, ``12.3 kB``, ``16.1 GB``."""
    text = human_count(number)
    prefix = {"k": "k", "M": "M", "B": "G", "T": "T"}.get(text[-1], "")
    return f"{text.rstrip('kMBT')} {prefix}B"


def human_duration(seconds: float) -> str:
    """``0.42 s``, ``12.3 s``, ``3 min 20 s``, ``2 h 05 min``, ``3 d 04 h``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 step``, ``1,000 steps``. ``plural`` is for other endings and for verbs: ``entries``, ``files are``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


_SIZE_UNITS = {"B": 1}
_SIZE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_SIZE_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``"5GB"`` or ``"200MiB"``. Raises ValueError for anything else."""
    compact = text.replace(" ", "").upper()
    for unit in sorted(_SIZE_UNITS, key=len, reverse=True):
        number = compact.removesuffix(unit)
        if number != compact and (size := _decimal(number)):
            return int(size * _SIZE_UNITS[unit])
    raise ValueError(f"{text!r} is not a size; use a form like '5GB' or '200MB'")


def parse_tokens(text: str) -> int:
    """Tokens of a length such as ``"64K"``, ``"1M"`` or ``"131072"``; K is 1024 and M is 1024 K, as lengths of contexts
    are given. Raises ValueError for anything else, and for fractions of a token.
    """
    compact = text.replace(" ", "").replace("_", "").upper()
    unit = {"K": 2**10, "M": 2**20}.get(compact[-1:], 1)
    tokens = (_decimal(compact[:-1] if unit > 1 else compact) or 0) * unit
    if tokens == int(tokens) > 0:
        return int(tokens)
    raise ValueError(f"{text!r} is not a number of tokens; use a form like '64K', '1M' or '131072'")
