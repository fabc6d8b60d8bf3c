"""Converts a checkpoint and adds a manifest: in a hidden directory to resume from, or published as checkpoint-N."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.converters.conversion import ConversionResult, other_format_at, write_native
from ds_trainer.checkpoint.converters.deepspeed_reader import model_files
from ds_trainer.checkpoint.converters.transformers_reader import RunningModel
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.checkpoint.protocol.manifest import Manifest, records_by_name, versions
from ds_trainer.checkpoint.protocol.other_formats import (
    CheckpointFormat,
    ConvertibleCheckpoint,
    check_pickles,
    load_deepspeed_pickle,
)
from ds_trainer.checkpoint.shards.engine_files import CLIENT_STATE_FILE
from ds_trainer.checkpoint.shards.shard_file import ShardFile
from ds_trainer.checkpoint.shards.shard_map import ShardMap, shard_summary
from ds_trainer.checkpoint.shards.shard_source import ShardSource
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json, write_text_atomic


def import_hidden(
    checkpoint: ConvertibleCheckpoint,
    directory: CheckpointDirectory,
    trusted: bool,
    node: int = 0,
    nodes: int = 1,
    save_id: str = "",
    running_model: RunningModel | None = None,
) -> tuple[Path, ConversionResult]:
    """Convert ``checkpoint`` to a complete checkpoint with a manifest, in a hidden directory inside ``directory``.

    If the process is killed, :meth:`CheckpointDirectory.tidy` removes the remains.

    Args:
        checkpoint: the checkpoint to convert.
        directory: the parent of the hidden directory.
        trusted: unpickle arbitrary objects in the checkpoint.
        node, nodes, save_id: values for the manifest if each node converts its own copy.
        running_model: the model of the resuming run; required for transformers.Trainer checkpoints without DeepSpeed.

    Raises:
        ConfigError: the checkpoint cannot be converted or written; partial files are removed.
    """
    check_pickles(checkpoint.files, trusted)
    step = _step_of(checkpoint, trusted)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        partial = directory.begin(step)
        try:
            files = CheckpointFileWriter(partial)
            converted = write_native(checkpoint, files, trusted, running_model)
            Manifest(
                step=converted.step,
                generation=directory.next_generation(),
                save_id=save_id or partial.name.split(".")[2],
                node=node,
                nodes=nodes,
                arguments="",
                written=time.time(),
                versions=versions(),
                files=records_by_name(files.records),
                **converted.facts,
            ).write(files)
            disk.flush_file(partial)
        except BaseException:
            disk.remove_tree(partial)
            raise
    except OSError as error:
        raise ConfigError(f"{checkpoint.path} could not be converted in {directory.path}: {error}.") from error
    return partial, converted


def _step_of(checkpoint: ConvertibleCheckpoint, trusted: bool) -> int:
    if checkpoint.format is CheckpointFormat.HF_TRAINER:
        return int(read_json(checkpoint.path / "trainer_state.json")["global_step"])
    return int(load_deepspeed_pickle(model_files(checkpoint.files)[0], trusted)["global_steps"])


def import_checkpoint(source: Path, to: Path, trusted: bool = False) -> tuple[Path, ConversionResult]:
    """Convert a checkpoint of DeepSpeed or transformers into ``to/checkpoint-<step>``.

    Raises:
        ConfigError: the target exists, or as :func:`import_hidden`.
    """
    checkpoint, directory = other_format_at(source), CheckpointDirectory(to)
    check_pickles(checkpoint.files, trusted)
    final = to / f"checkpoint-{_step_of(checkpoint, trusted)}"
    if final.exists():
        raise ConfigError(f"{final} already exists. Choose another directory, or remove it.")
    partial, converted = import_hidden(checkpoint, directory, trusted)
    directory.publish(partial, converted.step)
    return final, converted


def export_universal(checkpoint: Path, to: Path) -> Path:
    """Write a native checkpoint in DeepSpeed's universal format; returns the directory of the step.

    Raises:
        ConfigError: it contains only weights, or DeepSpeed wrote its engine state.
        BrokenCheckpoint: it is not a checkpoint, or it is damaged.
    """
    manifest = Manifest.read(checkpoint)
    if manifest.only_model or manifest.engine != "pieces":
        content = "only weights" if manifest.only_model else "engine state that DeepSpeed wrote"
        raise ConfigError(f"{checkpoint} contains {content}, which cannot be written in DeepSpeed's universal format.")
    return write_universal(checkpoint, to, manifest.step)


# Writes a native checkpoint in DeepSpeed's universal format.
#
# Plain DeepSpeed reads the result with ``"checkpoint": {"load_universal": true}``, on any number of ranks, at ZeRO
# stages 1, 2 and 3. (Stage 3 cannot read what DeepSpeed's own converter writes for a checkpoint of stage 1 or 2.)


_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # stages 1 and 2; stage 3


def write_universal(checkpoint: Path, directory: Path, step: int) -> Path:
    """Write ``directory/global_step<step>`` and ``directory/latest_universal``; one tensor at a time in memory.

    Raises:
        ConfigError: the target exists, or DeepSpeed's format does not support the optimizer's states.
    """
    if any(checkpoint.glob("extras_*.pt")):
        raise ConfigError(
            f"{checkpoint}: the optimizer has states that are not elementwise, which DeepSpeed's universal format "
            "does not support."
        )
    paths = sorted(checkpoint.glob("rank_*.safetensors"))
    if not paths:
        raise ConfigError(
            f"{checkpoint} contains no rank_*.safetensors, so it has no engine state. Pass a checkpoint-N directory."
        )
    final = directory / f"global_step{step}"
    if final.exists():
        raise ConfigError(f"{final} already exists. Choose another directory, or remove it.")
    partial = directory / f".global_step{step}.partial"
    is_new = not directory.exists()
    disk.remove_tree(partial)
    (partial / "zero").mkdir(parents=True)
    try:
        _write(checkpoint, paths, partial, step)
        for path in [*partial.rglob("*"), partial]:
            disk.flush_file(path)
        disk.rename(partial, final)
    except BaseException:
        disk.remove_tree(directory if is_new else partial)
        raise
    write_text_atomic(directory / "latest_universal", f"{final.name}")
    return final


def _write(checkpoint: Path, paths: list[Path], directory: Path, step: int) -> None:
    files = [ShardFile(path) for path in paths]
    source = ShardSource(
        paths, shard_map=ShardMap({file.path.name: shard_summary(file) for file in files}), opened=files
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for key, shard_slice in file.slices.items():
            shapes.setdefault(key.rpartition("/")[0], shard_slice.shape)
    stepped: dict[str, torch.Size] = {}
    other_tensors: dict[str, torch.Tensor] = {}
    buffers: list[str] = []
    step_count: Any = None
    for name, shape in shapes.items():
        kinds = source.kinds(name)
        if MASTER not in kinds:
            (kind,) = kinds  # WEIGHT or BUFFER
            other_tensors[name] = _whole(source, name, kind, shape, kinds[kind])
            buffers.extend([name] if kind == BUFFER else [])
            if kind == WEIGHT:
                _save({"param": other_tensors[name].float()}, directory / "zero" / name / "fp32.pt")
            continue
        stepped[name] = torch.Size(shape)
        for kind, dtype in kinds.items():
            file_name = "fp32" if kind == MASTER else kind
            value = _whole(source, name, kind, shape, dtype)
            # DeepSpeed 0.19.8 chunks the tensor, and torch cannot chunk scalars.
            _save({"param": value if shape else value.reshape(1)}, directory / "zero" / name / f"{file_name}.pt")
        if "step" in (scalars := source.scalars(name)):
            step_count = scalars["step"]
            _save(step_count, directory / "zero" / name / "step.pt")
    client_state = torch.load(checkpoint / CLIENT_STATE_FILE, weights_only=True)
    _save(_optimizer(client_state, step_count), directory / "zero" / "optimizer_state.pt")
    schedule = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    model = _model(client_state, schedule, stepped, other_tensors, buffers, step)
    for file_name in _MODEL_FILES:
        _save(model, directory / file_name)


def _whole(source: ShardSource, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.empty(math.prod(shape), dtype=dtype)
    source.fill(name, kind, ShardSlice.whole(shape), flat)
    return flat.view(shape)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:  # an error of a stream names the reason
        torch.save(value, stream)


def _optimizer(client_state: Mapping[str, Any], step_count: Any) -> dict[str, Any]:
    """Returns the state of all parameters: DeepSpeed's stages 1 and 2 read the first level, stage 3 the second."""
    from deepspeed import __version__

    groups = [{**group, "params": []} for group in client_state["groups"]]
    # Stage 3 copies the settings of the first group to all groups. So it only gets the settings that are common to all;
    # for the others, such as weight decay, it keeps those of the user's groups.
    common = {key: value for key, value in groups[0].items() if all(group.get(key) == value for group in groups)}
    values: dict[str, Any] = {
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step_count}}, "param_groups": [common]},
        "ds_version": __version__,
    }
    if client_state["scales"] and "last_overflow_iter" in client_state["scales"][0]:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        values["loss_scaler"] = scaler = DynamicLossScaler(init_scale=1.0, scale_window=1000)
        vars(scaler).update(client_state["scales"][0])
        values["dynamic_loss_scale"] = True
    return values


def _model(
    client_state: Mapping[str, Any],
    schedule: Mapping[str, Any],
    stepped: Mapping[str, torch.Size],
    other_tensors: Mapping[str, torch.Tensor],
    buffers: list[str],
    step: int,
) -> dict[str, Any]:
    from deepspeed import __version__

    counters = client_state["counters"]
    return {
        "module": dict(other_tensors),
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [dict(stepped)],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": client_state["parts"].get("schedule") or dict(schedule),
        "data_sampler": None,
        "random_ltd": client_state["parts"].get("random_ltd"),
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": __version__,
    }
