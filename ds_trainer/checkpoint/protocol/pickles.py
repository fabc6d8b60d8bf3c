"""Reading files of ``torch.save`` without running code that they may contain."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ds_trainer.utils.errors import ConfigError


def load_pickle(path: Path, trusted: bool) -> Any:
    """Returns the object that ``torch.save`` wrote to ``path``, on the CPU.

    Tensors and plain values are read without unpickling code. Only a file that holds more (for example, the state of a
    user's own schedule) is fully unpickled, and only if it is ``trusted``, because that may run any code.

    Args:
        path: of the file.
        trusted: an intact manifest of this package lists the file, or the user vouched for it.

    Raises:
        ConfigError: the file holds more than plain values and is not trusted.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trusted:
            raise ConfigError(
                f"{path} holds more than tensors and plain values. Reading it may run any code, and no intact manifest "
                f"lists it. If you trust its source, set trust_checkpoint=True. ({str(error).splitlines()[0]})"
            ) from None
    return torch.load(path, map_location="cpu", weights_only=False)
