"""CRC-32 of a file whose parts are summed by many.

The register of CRC-32 is linear over GF(2): that of a whole file is the exclusive or of those of its parts, each as if
all other bytes were zero. A part's register is multiplied by x**8 for every byte that comes after it (as zlib's
``crc32_combine`` does). What zlib does to the register before the first and after the last byte is done once, by
:func:`finished`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zlib.crc32, lowest power in the highest bit
_ALL = 0xFFFFFFFF


def register(data: bytes | memoryview, before: int = 0) -> int:
    """The register after ``data``, where it was ``before``: :func:`zlib.crc32` without its conditioning."""
    return zlib.crc32(data, before ^ _ALL) ^ _ALL


def shifted(found: int, size: int) -> int:
    """A register after ``size`` further bytes that are zero."""
    return _product(_power(size), found) if found else 0


def finished(found: int, size: int) -> int:
    """``zlib.crc32`` of a file of ``size`` bytes, of whose parts ``found`` is the exclusive or."""
    return found ^ shifted(_ALL, size) ^ _ALL


def register_of_rows(rows: Iterable[bytes | memoryview], apart: int) -> int:
    """The register after the last of ``rows`` of the same size, between which bytes are zero.

    Args:
        rows: in order.
        apart: bytes from the end of a row to the end of the next.
    """
    a, b, c, d = _tables(apart)
    found = 0
    for row in rows:
        found = a[found & 255] ^ b[found >> 8 & 255] ^ c[found >> 16 & 255] ^ d[found >> 24]
        found ^= zlib.crc32(row, _ALL) ^ _ALL
    return found


def _product(one: int, other: int) -> int:
    """Product of two polynomials, modulo that of CRC-32."""
    found, bit = 0, 1 << 31
    while one:
        if one & bit:
            found ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return found


@lru_cache(maxsize=4096)
def _power(size: int) -> int:
    """x**(8 * size)."""
    found, index = 1 << 31, 3
    while size:
        if size & 1:
            found = _product(_SQUARES[index % 32], found)
        size >>= 1
        index += 1
    return found


def _squares() -> list[int]:
    found = [1 << 30]  # x
    while len(found) < 32:  # x**(2**32) is x again
        found.append(_product(found[-1], found[-1]))
    return found


_SQUARES = _squares()


@lru_cache(maxsize=64)
def _tables(size: int) -> tuple[list[int], ...]:
    """What :func:`shifted` by ``size`` gives, for each value of each of the four bytes."""
    power = _power(size)
    tables = []
    for byte in range(4):
        bits = [_product(power, 1 << 8 * byte + bit) for bit in range(8)]
        table = [0]
        for bit in bits:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tuple(tables)
