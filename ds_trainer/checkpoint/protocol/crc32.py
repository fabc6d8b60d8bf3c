"""CRC-32 of a file whose parts are checksummed by different ranks.

The CRC-32 register is linear over GF(2): the register of a file is the XOR of the registers of its parts, each computed
as if all other bytes were zero. A part's register is multiplied by x**8 for every byte that follows the part (as in
zlib's ``crc32_combine``). zlib also inverts the register before the first byte and after the last one;
:func:`finalize` does that once for the whole file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zlib.crc32, lowest power in the highest bit
_ALL = 0xFFFFFFFF


def register(data: bytes | memoryview, start: int = 0) -> int:
    """Returns the register after ``data``, beginning at ``start``: :func:`zlib.crc32` without its inversions."""
    return zlib.crc32(data, start ^ _ALL) ^ _ALL


def append_zeros(value: int, size: int) -> int:
    """Returns the register ``value`` after ``size`` further zero bytes."""
    return _product(_power(size), value) if value else 0


def finalize(value: int, size: int) -> int:
    """Returns ``zlib.crc32`` of a file of ``size`` bytes; ``value`` is the XOR of the registers of its parts."""
    return value ^ append_zeros(_ALL, size) ^ _ALL


def register_of_rows(rows: Iterable[bytes | memoryview], stride: int) -> int:
    """Returns the register after the last of ``rows``, which have equal sizes and zero bytes between them.

    Args:
        rows: in order.
        stride: bytes from the end of one row to the end of the next.
    """
    a, b, c, d = _tables(stride)
    value = 0
    for row in rows:
        value = a[value & 255] ^ b[value >> 8 & 255] ^ c[value >> 16 & 255] ^ d[value >> 24]
        value ^= zlib.crc32(row, _ALL) ^ _ALL
    return value


def _product(one: int, other: int) -> int:
    """The product of two polynomials modulo the CRC-32 polynomial."""
    result, bit = 0, 1 << 31
    while one:
        if one & bit:
            result ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return result


@lru_cache(maxsize=4096)
def _power(size: int) -> int:
    """x**(8 * size)."""
    result, index = 1 << 31, 3
    while size:
        if size & 1:
            result = _product(_SQUARES[index % 32], result)
        size >>= 1
        index += 1
    return result


def _squares() -> list[int]:
    squares = [1 << 30]  # x
    while len(squares) < 32:  # x**(2**32) is x again
        squares.append(_product(squares[-1], squares[-1]))
    return squares


_SQUARES = _squares()


@lru_cache(maxsize=64)
def _tables(size: int) -> tuple[list[int], ...]:
    """The results of :func:`append_zeros` by ``size``, for each value of each of the four bytes."""
    power = _power(size)
    tables = []
    for byte in range(4):
        bits = [_product(power, 1 << 8 * byte + bit) for bit in range(8)]
        table = [0]
        for bit in bits:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tuple(tables)
