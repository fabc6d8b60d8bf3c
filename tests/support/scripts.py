"""A script on a rank of ``pool.py``, which costs no imports."""

from __future__ import annotations

import runpy
import sys


def run_script(path: str, arguments: list[str]) -> None:
    """The script as ``__main__`` of this rank, whose launcher's variables are those of the pool."""
    given, sys.argv = sys.argv, [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = given
