"""Reading what ``torch.save`` wrote without running what a stranger may have put into it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ds_trainer.utils.errors import ConfigError


def load_pickle(path: Path, trusted: bool) -> Any:
    """What ``torch.save`` wrote to ``path``, on the CPU.

    Tensors and plain values are read without unpickling code. Only what needs more (an object of a schedule of the
    user's own) is unpickled as it is, and only where it is ``trusted``: then it may run any code.

    Args:
        path: of the file.
        trusted: an intact manifest of this package lists the file, or the user said so.

    Raises:
        ConfigError: it needs more and is not trusted.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trusted:
            raise ConfigError(
                f"{path} holds more than tensors and plain values, so that reading it may run any code, and nothing "
                "vouches for it. If you know where it comes from, set trust_checkpoint=True. "
                f"({str(error).splitlines()[0]})"
            ) from None
    return torch.load(path, map_location="cpu", weights_only=False)
