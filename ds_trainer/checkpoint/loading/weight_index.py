"""Reads the index of a model whose weights are in several files. Imports nothing heavy: the command line uses it."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import read_json


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns the file name of each tensor, from the index of a model's weights.

    Raises:
        ConfigError: the file is not a weight index.
    """
    try:
        content = read_json(index)
    except ValueError as error:
        raise ConfigError(f"{index} is not valid JSON ({error}). Copy or download the model again.") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ConfigError(
            f"{index} is not a weight index: it has no weight_map of file names. Copy or download the model again."
        )
    return weight_map


def indexed_files(index: Path) -> list[Path]:
    """Returns the weight files listed in an index, sorted by name.

    Raises:
        ConfigError: the file is not a weight index, or a listed file is missing.
    """
    names = sorted(set(read_weight_map(index).values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"{index} lists {len(names)} files, {len(missing)} of which are missing: {listed(missing, 3)}. "
            "Copy or download the model again."
        )
    return [index.parent / name for name in names]
