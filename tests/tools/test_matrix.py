"""The list of tests that run with ``-m matrix`` only names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.matrix import MATRIX

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", MATRIX)
def test_every_matrix_test_exists(name: str) -> None:
    path, _, function = name.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    bare = function.partition("[")[0]
    assert not bare or re.search(rf"^def {bare}\(", text, re.MULTILINE)
    assert ("[" not in function) or f"def {bare}()" not in text


def test_every_replacement_test_exists() -> None:
    for reason in MATRIX.values():
        for path in re.findall(r"tests/[\w/]+(?:\.py)?", reason):
            assert (ROOT / path).exists(), path
