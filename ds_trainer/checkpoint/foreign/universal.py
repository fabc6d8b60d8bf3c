"""A checkpoint of ours written in DeepSpeed's universal form.

Plain DeepSpeed reads it with ``"checkpoint": {"load_universal": true}``, in any number of ranks, at ZeRO stages 1, 2
and 3: what its own converter makes of a checkpoint of stage 1 or 2, stage 3 does not find.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.pieces.engine_files import PROGRESS_FILE
from ds_trainer.checkpoint.pieces.file import PiecesFile
from ds_trainer.checkpoint.pieces.piece_map import PieceMap, summary
from ds_trainer.checkpoint.pieces.source import PiecesSource
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_text_atomic

_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # of stages 1 and 2, of 3


def write_universal(checkpoint: Path, directory: Path, step: int) -> Path:
    """Write ``directory/global_step<step>`` and ``directory/latest_universal``; one tensor at a time in memory.

    Raises:
        ConfigError: it exists, or the optimizer has states that DeepSpeed's form does not know.
    """
    if any(checkpoint.glob("extras_*.pt")):
        raise ConfigError(
            f"{checkpoint}: the optimizer has states that are not one number for each element of a parameter; "
            "DeepSpeed's universal form has no place for them."
        )
    paths = sorted(checkpoint.glob("rank_*.safetensors"))
    if not paths:
        raise ConfigError(f"{checkpoint} holds no rank_*.safetensors: there is no engine's state in it.")
    final = directory / f"global_step{step}"
    if final.exists():
        raise ConfigError(f"{final} exists. Name another directory, or remove it.")
    partial = directory / f".global_step{step}.partial"
    disk.remove_tree(partial)
    (partial / "zero").mkdir(parents=True)
    try:
        _write(checkpoint, paths, partial, step)
        for path in [*partial.rglob("*"), partial]:
            disk.flush_file(path)
        disk.rename(partial, final)
    except BaseException:
        disk.remove_tree(partial)
        raise
    write_text_atomic(directory / "latest_universal", f"{final.name}")
    return final


def _write(checkpoint: Path, paths: list[Path], directory: Path, step: int) -> None:
    files = [PiecesFile(path) for path in paths]
    source = PiecesSource(paths, piece_map=PieceMap({file.path.name: summary(file) for file in files}), opened=files)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for key, place in file.places.items():
            shapes.setdefault(key.rpartition("/")[0], place.shape)
    stepped: dict[str, torch.Size] = {}
    rest: dict[str, torch.Tensor] = {}
    buffers: list[str] = []
    counted: Any = None
    for name, shape in shapes.items():
        kinds = source.kinds(name)
        if MASTER not in kinds:
            (kind,) = kinds  # WEIGHT or BUFFER
            rest[name] = _whole(source, name, kind, shape, kinds[kind])
            buffers.extend([name] if kind == BUFFER else [])
            if kind == WEIGHT:
                _save({"param": rest[name].float()}, directory / "zero" / name / "fp32.pt")
            continue
        stepped[name] = torch.Size(shape)
        for kind, dtype in kinds.items():
            file_name = "fp32" if kind == MASTER else kind
            _save({"param": _whole(source, name, kind, shape, dtype)}, directory / "zero" / name / f"{file_name}.pt")
        if "step" in (scalars := source.scalars(name)):
            counted = scalars["step"]
            _save(counted, directory / "zero" / name / "step.pt")
    progress = torch.load(checkpoint / PROGRESS_FILE, weights_only=True)
    _save(_optimizer(progress, counted), directory / "zero" / "optimizer_state.pt")
    schedule = torch.load(checkpoint / "scheduler.pt", weights_only=True)
    model = _model(progress, schedule, stepped, rest, buffers, step)
    for file_name in _MODEL_FILES:
        _save(model, directory / file_name)


def _whole(source: PiecesSource, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.empty(math.prod(shape), dtype=dtype)
    source.fill(name, kind, Place.whole(shape), flat)
    return flat.view(shape)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)


def _optimizer(progress: Mapping[str, Any], counted: Any) -> dict[str, Any]:
    """What DeepSpeed reads for all parameters: stages 1 and 2 the first level, stage 3 the second."""
    from deepspeed import __version__

    groups = [{**group, "params": []} for group in progress["groups"]]
    # Stage 3 gives the settings of the first group to all of them: so it must only find what is common to all, and
    # keeps the rest (a weight decay, say) as the user's own groups have it.
    common = {key: value for key, value in groups[0].items() if all(group.get(key) == value for group in groups)}
    values: dict[str, Any] = {
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": counted}}, "param_groups": [common]},
        "ds_version": __version__,
    }
    if progress["scales"] and "last_overflow_iter" in progress["scales"][0]:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        values["loss_scaler"] = scaler = DynamicLossScaler(init_scale=1.0, scale_window=1000)
        vars(scaler).update(progress["scales"][0])
        values["dynamic_loss_scale"] = True
    return values


def _model(
    progress: Mapping[str, Any],
    schedule: Mapping[str, Any],
    stepped: Mapping[str, torch.Size],
    rest: Mapping[str, torch.Tensor],
    buffers: list[str],
    step: int,
) -> dict[str, Any]:
    from deepspeed import __version__

    counters = progress["counters"]
    return {
        "module": dict(rest),
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [dict(stepped)],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": progress["parts"].get("schedule") or dict(schedule),
        "data_sampler": None,
        "random_ltd": progress["parts"].get("random_ltd"),
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": __version__,
    }
