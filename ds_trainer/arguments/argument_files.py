"""Command-line arguments that are kept in files: ``train.args`` beside ``train.py``, or files named by a flag."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from ds_trainer.utils.files import read_user_file


def args_of_files(argv: list[str], look: bool, filename: str | None, flag: str | None) -> list[str]:
    """The arguments in the files, in their order: see :meth:`HfArgumentParser.parse_args_into_dataclasses`."""
    files = [filename] if filename else []
    default = Path(sys.argv[0]).with_suffix(".args") if sys.argv[0] else None
    if not filename and look and default is not None and default.is_file():
        files.append(str(default))
    if flag:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(flag, action="append", default=[], dest="files")
        files += finder.parse_known_args(argv)[0].files
    return [text for name in files for text in shlex.split(read_user_file(name, name, "text file"), comments=True)]


def without_flag(argv: list[str], flag: str) -> list[str]:
    """``argv`` without ``flag`` and its values."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, action="append")
    return finder.parse_known_args(argv)[1]
