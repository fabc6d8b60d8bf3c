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
    _installed() < REFERENCE, reason="compares with transformers 5.23, which needs Python 3.11"
)
