"""Weight files for the benchmarks: models of any size in the layout of the Hub, with random data or with headers only.

``write_random`` holds one file in memory at a time. ``write_headers`` writes real safetensors headers and sparse files
of the right size: the file system stores no blocks for the data, which reads as zero.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.loading.empty_model import empty_model
from ds_trainer.engine.weights import plan_shards, saved_tensors

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def on_meta(config: Any) -> nn.Module:
    """The causal language model of a transformers ``config``, in bfloat16, without memory."""
    from transformers import AutoModelForCausalLM

    return empty_model(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), recorded=False)


def write_random(config: Any, directory: Path, file_bytes: int, seed: int = 0) -> int:
    """Write ``config`` and weights drawn from a normal distribution; bytes of all weight files."""
    from safetensors.torch import save_file

    draws = torch.Generator().manual_seed(seed)
    for path, tensors in _files(config, directory, file_bytes):
        values = {
            name: torch.randn(tensor.shape, generator=draws, dtype=torch.float32).mul_(0.02).to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        save_file(values, path, metadata={"format": "pt"})
    return bytes_of(directory)


def write_headers(config: Any, directory: Path, file_bytes: int = 5 * 10**9) -> int:
    """Write ``config`` and weight files that have headers and no numbers; bytes that the files seem to have."""
    for path, tensors in _files(config, directory, file_bytes):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with path.open("r+b") as file:
            file.truncate(8 + len(text) + end)
    return bytes_of(directory)


def bytes_of(directory: Path) -> int:
    """Bytes of all weight files of a directory."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _files(config: Any, directory: Path, file_bytes: int) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Each file with the tensors that belong into it, on meta; the configuration and the index are written here."""
    directory.mkdir(parents=True, exist_ok=True)
    model = on_meta(config)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    tensors = dict(_as_on_the_hub(saved_tensors(model)))
    groups = plan_shards(tensors, file_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        yield directory / file, {name: tensors[name].detach() for name in names}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _as_on_the_hub(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """With a tensor for each matrix of an expert."""
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if parts is None or not path.endswith(".experts"):
            yield name, tensor
            continue
        for number, expert in enumerate(tensor.detach()):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{path}.{number}.{part}.weight", matrix


class Tokens:
    """Samples of 16 tokens."""

    def __init__(self, samples: int, vocabulary: int) -> None:
        self._samples, self._vocabulary = samples, vocabulary

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = (torch.arange(16) * 7 + index) % self._vocabulary
        return {"input_ids": tokens, "labels": tokens.clone()}


@contextmanager
def seen_when_configured(seen: dict[str, Any]) -> Iterator[None]:
    """Inside, when DeepSpeed is about to move a model to the device: its parameters, those that are whole, the time.

    DeepSpeed does that in ``_configure_distributed_model`` (0.19.8: ``runtime/engine.py``); the engine of ds_trainer
    has made the parameters shards by then.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    real = DeepSpeedEngine._configure_distributed_model

    def configure(engine: Any, model: nn.Module) -> None:
        parameters: list[Any] = list(model.parameters())
        whole = [p for p in parameters if not hasattr(p, "ds_id") or p.numel() > 0]
        seen.update(parameters=len(parameters), whole=len(whole), configured=time.monotonic())
        real(engine, model)

    DeepSpeedEngine._configure_distributed_model = configure
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = real
