"""Reading a checkpoint runs no untrusted code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_trainer.checkpoint.protocol.checkpoint_file import load_pickle
from ds_trainer.utils.errors import ConfigError


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _harm, (str(self.path),)


def _harm(path: str) -> str:
    Path(path).write_text("done")
    return path


def test_tensors_and_plain_values_need_no_trust(tmp_path: Path) -> None:
    value = {"a": torch.arange(3), "b": [1, 2.5, "x", None, (True,)]}
    torch.save(value, tmp_path / "file.pt")
    loaded = load_pickle(tmp_path / "file.pt", trusted=False)
    assert torch.equal(loaded["a"], value["a"]) and loaded["b"] == value["b"]  # type: ignore[arg-type]


def test_code_runs_only_if_trusted(tmp_path: Path) -> None:
    target = tmp_path / "victim"
    torch.save({"x": Harmful(target)}, tmp_path / "file.pt")
    with pytest.raises(ConfigError, match="Reading it may run any code, and no intact manifest lists it"):
        load_pickle(tmp_path / "file.pt", trusted=False)
    assert not target.exists()
    load_pickle(tmp_path / "file.pt", trusted=True)
    assert target.exists()
