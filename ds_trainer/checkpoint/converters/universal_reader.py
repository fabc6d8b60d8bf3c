"""Reads DeepSpeed's universal checkpoints as state shards, counters and settings of this package.

DeepSpeed itself assembles its shards (``deepspeed.checkpoint.ds_to_universal``). This module reads the resulting files:
``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, ``zero/optimizer_state.pt``, and the tensors in the model files
that no optimizer steps. Checkpoints of ZeRO stage 0 have no shards:
:mod:`ds_trainer.checkpoint.converters.zero0_reader`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.protocol.other_formats import load_deepspeed_pickle
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT, StateShard
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class ConvertedState:
    """The state of an engine apart from its tensors.

    Attributes:
        model: the first rank's model file of DeepSpeed, which also contains the counters.
        groups: settings of the parameter groups, without parameters.
        scale: state of the loss scaler.
        scalars: scalar optimizer states by parameter.
    """

    model: Mapping[str, Any]
    groups: list[dict[str, Any]]
    scale: dict[str, Any]
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of completed optimizer steps, including skipped ones."""
        return int(self.model["global_steps"])

    def client_state(self) -> dict[str, Any]:
        """Returns the client state in the format of :func:`ds_trainer.engine.state.client_state.read_client_state`."""
        model, config = self.model, self.model.get("ds_config")
        accumulation = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
        accumulation = accumulation if isinstance(accumulation, int) else 1
        parts = {"schedule": model.get("lr_scheduler"), "random_ltd": model.get("random_ltd")}
        return {
            "counters": {
                "global_steps": self.step,
                "global_samples": int(model.get("global_samples") or 0),
                "micro_steps": self.step * accumulation,
                "skipped_steps": int(model.get("skipped_steps") or 0),
            },
            "scales": [self.scale] if self.scale else [],
            "parts": {name: state for name, state in parts.items() if state},
            "groups": self.groups,
        }


def model_files(directory: Path) -> list[Path]:
    """Returns DeepSpeed's model files: one per tensor-parallel rank; under ZeRO-3, one per rank."""
    return sorted(directory.glob("mp_rank_*_model_states.pt")) or sorted(
        directory.glob("zero_pp_rank_*_model_states.pt"), key=lambda path: int(path.name.split("_")[3])
    )


def scale_of(scaler: Any) -> dict[str, Any]:
    """Returns the state of a loss scaler."""
    return {name: getattr(scaler, name) for name in _SCALES if hasattr(scaler, name)}


def without_parameters(groups: Any) -> list[dict[str, Any]]:
    """Returns the settings of parameter groups, without the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


class UniversalCheckpoint:
    """A checkpoint in DeepSpeed's universal format.

    Args:
        directory: the directory with ``zero/`` and the model files.
        trusted: unpickle arbitrary objects in the files.

    Raises:
        ConfigError: a file or setting is missing, or a file requires ``trusted``.
    """

    def __init__(self, directory: Path, trusted: bool) -> None:
        self._zero = directory / "zero"
        self._trusted = trusted
        files = model_files(directory)
        self._sharded = files[0].name.startswith("zero_")
        self._models = files if self._sharded else files[:1]
        self._tensor_parallel = len({path.name.split("mp_rank_")[1] for path in files}) > 1
        self._model = load_deepspeed_pickle(files[0], trusted)
        optimizer = load_deepspeed_pickle(self._zero / "optimizer_state.pt", trusted)
        self._steps = (optimizer.get("optimizer_state_dict") or {}).get("state") or {}
        groups = optimizer.get("param_groups") or (optimizer.get("optimizer_state_dict") or {}).get("param_groups")
        if groups is None:
            raise ConfigError(
                f"{self._zero / 'optimizer_state.pt'} contains no parameter groups: the checkpoint is incomplete."
            )
        self.state = ConvertedState(self._model, without_parameters(groups), scale_of(optimizer.get("loss_scaler")))

    def state_shards(self) -> Iterator[StateShard]:
        """Yields all full tensors, memory-mapped, and fills :attr:`ConvertedState.scalars`.

        Raises:
            ConfigError: required state is missing.
        """
        stepped: set[str] = set()
        for shapes in self._model["param_shapes"] or ():
            for name, shape in shapes.items():
                stepped.add(name)
                yield from self._of_parameter(name, tuple(shape))
        yield from self._not_stepped(stepped)

    def _of_parameter(self, name: str, shape: tuple[int, ...]) -> Iterator[StateShard]:
        directory = self._zero / name
        if not (directory / "fp32.pt").is_file():
            raise ConfigError(f"{directory} has no fp32.pt, but {name} was trained: the checkpoint is incomplete.")
        for path in sorted(directory.glob("*.pt")):
            value = load_deepspeed_pickle(path, self._trusted)
            if path.stem == "step":
                self.state.scalars.setdefault(name, {})["step"] = value
                continue
            if isinstance(value, dict):
                value = value["param"] if shape else value["param"].reshape(())
            elif value.numel() != math.prod(shape):
                raise ConfigError(
                    f"{path} has {value.numel()} elements, but {name} has shape {list(shape)}: the checkpoint is "
                    "damaged."
                )
            else:
                value = value.view(shape)  # ds_to_universal leaves ZeRO-3 tensors flat
            kind = MASTER if path.stem == "fp32" else path.stem
            yield StateShard(name, kind, ShardSlice.whole(value.shape), value.reshape(-1))
        first: dict[str, Any] = next(iter(self._steps.values()), {})  # ZeRO-3 stores one common step
        if "step" in first and (directory / "exp_avg.pt").is_file():
            self.state.scalars.setdefault(name, {}).setdefault("step", first["step"])

    def _not_stepped(self, stepped: set[str]) -> Iterator[StateShard]:
        model = self._model
        buffers, shared = set(model.get("buffer_names") or ()), set(model.get("shared_params") or ())
        for name in sorted(buffers & set(model["module"])):
            yield StateShard(
                name, BUFFER, ShardSlice.whole(model["module"][name].shape), model["module"][name].reshape(-1)
            )
        if self._sharded:
            frozen = dict(self._gathered_frozen())
        else:
            names = set(model["module"]) - stepped - buffers - shared
            frozen = {name: model["module"][name] for name in sorted(names)}
        if frozen and self._tensor_parallel:
            raise ConfigError(
                f"{self._zero.parent}: {len(frozen)} parameters are frozen ({next(iter(frozen))}, ...), and its "
                "tensor-parallel ranks hold slices of them without recording how they were partitioned. Save without "
                "tensor parallelism."
            )
        for name, tensor in frozen.items():
            yield StateShard(name, WEIGHT, ShardSlice.whole(tensor.shape), tensor.reshape(-1))

    def _gathered_frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = self._model.get("frozen_param_shapes") or {}
        if shapes:
            parts = [load_deepspeed_pickle(path, self._trusted)["frozen_param_fragments"] for path in self._models]
            for name, shape in shapes.items():
                flat = torch.cat([part[name].reshape(-1) for part in parts])[: math.prod(shape)]
                yield name, flat.view(tuple(shape))
