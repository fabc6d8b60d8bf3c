"""The index of a model whose weights are in several files. Imports nothing heavy: command lines read it too."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json


def files_of_index(index: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a model's weights says it.

    Raises:
        ConfigError: it is no index.
    """
    try:
        content = read_json(index)
    except ValueError as error:
        raise ConfigError(f"{index} is no JSON ({error}). Copy or download the model again.") from None
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise ConfigError(
            f"{index} is no index of weights: it has no weight_map of file names. Copy or download the model again."
        )
    return where


def indexed_files(index: Path) -> list[Path]:
    """The weight files that an index names, in the order of their names.

    Raises:
        ConfigError: it is no index, or a file is not there.
    """
    names = sorted(set(files_of_index(index).values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise ConfigError(
            f"{index} names {len(absent)} of {len(names)} file(s) that are not there: {', '.join(absent[:3])}{more}. "
            "Copy or download the model again."
        )
    return [index.parent / name for name in names]
