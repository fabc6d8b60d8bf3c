"""What files say that they hold, and files that lie or are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds_trainer.checkpoint.loading.stored_tensors import stored_tensors
from ds_trainer.utils.errors import ConfigError


def write(path: Path, change: Any) -> None:
    """A file of two tensors whose header was changed."""
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0)}, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_safetensors(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", lambda header: None)
    found = stored_tensors(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    b = found["b"]
    assert (b.dtype, b.shape, b.strides, b.nbytes) == (torch.float32, (4,), (1,), 16)
    assert raw[b.offset : b.offset + 16] == torch.arange(4.0).numpy().tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["a"].update(shape=[2, 4]), r"gives a 24 bytes, and \[2, 4\] of F32 are 32"),
        (lambda h: h["b"].update(dtype="BF16"), r"gives b 16 bytes, and \[4\] of BF16 are 8"),
        (lambda h: h["b"].update(data_offsets=[20, 36], shape=[4]), r"has \d+ bytes, and its header says"),
        (lambda h: h["a"].update(data_offsets=[8, 32]), r"begins at byte \d+, not at \d+"),
        (lambda h: h["a"].update(data_offsets=[-24, 0]), r"a begins at byte \d+, not at \d+"),
        (lambda h: h.pop("a"), r"b begins at byte \d+, not at \d+"),
        (lambda h: h.pop("b"), r"has \d+ bytes, and its header says"),
    ],
)
def test_a_header_that_lies(change: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", change)
    with pytest.raises(ConfigError, match=message):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file(name: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(100, 100)}
    path = tmp_path / name
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    assert list(stored_tensors(tmp_path)) == ["a"]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=name):
        stored_tensors(tmp_path)


def test_an_old_or_a_dangerous_bin_file(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"torch before 1.6.*save_pretrained"):
        stored_tensors(tmp_path)
    torch.save({"a": Path("x")}, path)
    with pytest.raises(ConfigError, match="more than tensors and plain values"):
        stored_tensors(tmp_path)
    torch.save([torch.ones(3)], path)
    with pytest.raises(ConfigError, match="holds list instead of tensors by name"):
        stored_tensors(tmp_path)


def test_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(ConfigError, match=r"names 1 of 2 file\(s\) that are not there: y.safetensors"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "aa": "x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"says that x\.safetensors has aa, which it has not"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ConfigError, match="no weight_map"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert list(stored_tensors(tmp_path)) == ["a"]


def test_the_order_of_the_formats(tmp_path: Path) -> None:
    torch.save({"bin": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(stored_tensors(tmp_path)) == ["bin"]
    save_file({"safe": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(stored_tensors(tmp_path)) == ["safe"]


def test_a_type_that_torch_does_not_have(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", lambda header: header["a"].update(dtype="F4", shape=[48]))
    assert stored_tensors(tmp_path)["a"].dtype is None
