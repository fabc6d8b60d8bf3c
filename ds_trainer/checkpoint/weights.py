"""Weights as safetensors, in files of a bounded size with an index: what ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ds_trainer.checkpoint.adapters import save_adapters, saves_adapters
from ds_trainer.engine.weights import full_numel, host_copies, plan_shards, saved_tensors
from ds_trainer.utils import distributed
from ds_trainer.utils.files import write_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def save_weights(model: nn.Module, directory: Path, max_shard_bytes: int) -> None:
    """Write the weights of ``model`` to ``directory``. Collective: all ranks call it, the main process writes.

    Under ZeRO-3 one file's parameters are gathered at a time. Weight files of an earlier save that this one does not
    replace are removed, so that a reader never finds two models in one directory. Of a PEFT model the adapters are
    written, and nothing else.

    Args:
        model: the module, whole or sharded by ZeRO-3; not the engine around it.
        directory: made if missing.
        max_shard_bytes: largest size of one file; a single tensor may exceed it.
    """
    from safetensors.torch import save_file

    if saves_adapters(model):
        save_adapters(model, directory)
        return
    main = distributed.rank() == 0
    tensors = saved_tensors(model)
    shards = plan_shards(tensors, max_shard_bytes)
    names = _file_names(len(shards))
    if main:
        directory.mkdir(parents=True, exist_ok=True)
    for name, whole in zip(names, host_copies(tensors, shards, keep=main), strict=True):
        if main:
            partial = directory / f".{name}.partial"
            save_file(whole, partial, metadata={"format": "pt"})
            partial.chmod(0o644)  # safetensors makes private files; weights are meant to be read by others
            partial.replace(directory / name)
    if main:
        if len(names) > 1:
            total = sum(full_numel(tensor) * tensor.element_size() for tensor in tensors.values())
            where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where})
        else:
            (directory / INDEX_FILE).unlink(missing_ok=True)
        for stale in {path for path in directory.glob("model*.safetensors")} - {directory / name for name in names}:
            stale.unlink()
    distributed.barrier()


def save_pretrained_parts(model: nn.Module, processing_class: Any, directory: Path) -> None:
    """Everything beside the weights that makes ``directory`` loadable: configurations and tokenizer. Main process.

    A PEFT model's configuration is the adapters', written with their weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own = () if saves_adapters(model) else (getattr(model, "config", None), getattr(model, "generation_config", None))
    for part in (*own, processing_class):
        if part is not None and hasattr(part, "save_pretrained"):
            part.save_pretrained(str(directory))


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
