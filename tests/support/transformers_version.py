"""The version of transformers whose API is the reference: older ones have other arguments."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

REFERENCE = (5, 23)


def _installed() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("transformers").split(".")[:2])
    except PackageNotFoundError:
        return (0,)


needs_the_reference = pytest.mark.skipif(
    _installed() < REFERENCE, reason="compares with transformers 5.23; an older version is installed"
)


def _admits_peft() -> bool:
    try:
        from transformers.integrations.peft import MIN_PEFT_VERSION
    except ImportError:
        return False
    wanted, found = (tuple(map(int, text.split(".")[:2])) for text in (MIN_PEFT_VERSION, version("peft")))
    return found >= wanted


needs_add_adapter = pytest.mark.skipif(
    not _admits_peft(), reason="add_adapter of this version of transformers asks for another version of peft"
)
"""transformers 5.24.0 asks for peft 0.22, when 0.21.2 is the newest; the methods of peft itself work."""
