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
        (lambda h: h["a"].update(shape=[2, 4]), r"assigns 24 bytes to a, but \[2, 4\] of F32 takes 32"),
        (lambda h: h["b"].update(dtype="BF16"), r"assigns 16 bytes to b, but \[4\] of BF16 takes 8"),
        (lambda h: h["b"].update(data_offsets=[20, 36], shape=[4]), r"has \d+ bytes, but its header requires"),
        (lambda h: h["a"].update(data_offsets=[8, 32]), r"at byte \d+ instead of \d+"),
        (lambda h: h["a"].update(data_offsets=[-24, 0]), r"a at byte \d+ instead of \d+"),
        (lambda h: h.pop("a"), r"b at byte \d+ instead of \d+"),
        (lambda h: h.pop("b"), r"has \d+ bytes, but its header requires"),
    ],
)
def test_a_wrong_header_is_rejected(change: Any, message: str, tmp_path: Path) -> None:
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


def test_old_and_unsafe_bin_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"torch before 1.6.*save_pretrained"):
        stored_tensors(tmp_path)
    torch.save({"a": Path("x")}, path)
    with pytest.raises(ConfigError, match="more than tensors and plain values"):
        stored_tensors(tmp_path)
    torch.save([torch.ones(3)], path)
    with pytest.raises(ConfigError, match="contains a list instead of a dictionary of tensors"):
        stored_tensors(tmp_path)


def test_an_index_is_read_and_checked(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lists 2 files, 1 of which are missing: y.safetensors"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "aa": "x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lists aa in x\.safetensors, but that file does not contain it"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ConfigError, match="no weight_map"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert list(stored_tensors(tmp_path)) == ["a"]


def test_safetensors_is_preferred_to_bin(tmp_path: Path) -> None:
    torch.save({"bin": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(stored_tensors(tmp_path)) == ["bin"]
    save_file({"safe": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(stored_tensors(tmp_path)) == ["safe"]


def test_a_dtype_that_torch_does_not_have_is_none(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", lambda header: header["a"].update(dtype="F4", shape=[48]))
    assert stored_tensors(tmp_path)["a"].dtype is None
