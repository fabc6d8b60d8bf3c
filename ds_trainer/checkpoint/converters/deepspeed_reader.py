"""Reads DeepSpeed's checkpoints as state shards, counters and settings of this package.

ZeRO 1 to 3: DeepSpeed assembles its shards (``deepspeed.checkpoint.ds_to_universal``). :class:`UniversalCheckpoint`
reads the resulting files: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, ``zero/optimizer_state.pt``, and the
tensors in the model files that no optimizer steps. ZeRO 0 has no shards: one file, whose optimizer numbers parameters
without names (:class:`Zero0Checkpoint`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.protocol.other_formats import load_deepspeed_pickle
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT, StateShard, elementwise, scalar_state_keys
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

    def shards_of(
        self, name: str, master: torch.Tensor, states: Mapping[str, Any], scalar_keys: set[str]
    ) -> Iterator[StateShard]:
        """Yields the shards of a parameter that the optimizer steps, and fills :attr:`scalars`."""
        tensors = elementwise(master, states, scalar_keys)
        for kind, value in {MASTER: master, **tensors}.items():
            yield whole_shard(name, kind, value)
        for key in states.keys() - tensors.keys():
            self.scalars.setdefault(name, {})[key] = states[key]

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


def whole_shard(name: str, kind: str, tensor: torch.Tensor) -> StateShard:
    """Returns all elements of a tensor as one shard."""
    return StateShard(name, kind, ShardSlice.whole(tensor.shape), tensor.reshape(-1))


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
            yield whole_shard(name, kind, value)
        first: dict[str, Any] = next(iter(self._steps.values()), {})  # ZeRO-3 stores one common step
        if "step" in first and (directory / "exp_avg.pt").is_file():
            self.state.scalars.setdefault(name, {}).setdefault("step", first["step"])

    def _not_stepped(self, stepped: set[str]) -> Iterator[StateShard]:
        model = self._model
        buffers, shared = set(model.get("buffer_names") or ()), set(model.get("shared_params") or ())
        for name in sorted(buffers & set(model["module"])):
            yield whole_shard(name, BUFFER, model["module"][name])
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
            yield whole_shard(name, WEIGHT, tensor)

    def _gathered_frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = self._model.get("frozen_param_shapes") or {}
        if shapes:
            parts = [load_deepspeed_pickle(path, self._trusted)["frozen_param_fragments"] for path in self._models]
            for name, shape in shapes.items():
                flat = torch.cat([part[name].reshape(-1) for part in parts])[: math.prod(shape)]
                yield name, flat.view(tuple(shape))


class Zero0Checkpoint:
    """A checkpoint of stage 0, in float32 or with one master weight tensor per parameter.

    Args:
        directory: the directory with ``mp_rank_00_model_states.pt``.
        trusted: unpickle arbitrary objects in the file.

    Raises:
        ConfigError: it has no optimizer, contains tensor-parallel slices, or was written by a fused 16-bit optimizer.
    """

    def __init__(self, directory: Path, trusted: bool) -> None:
        files = model_files(directory)
        if len(files) > 1:
            raise ConfigError(
                f"{directory} contains slices of {len(files)} tensor-parallel ranks at ZeRO stage 0, which DeepSpeed's "
                "converter does not support. Save it with ZeRO stage 1 or higher."
            )
        model = load_deepspeed_pickle(files[0], trusted)
        wrapper = model.get("optimizer")
        if not wrapper:
            raise ConfigError(f"{files[0]} contains only weights and no optimizer, so training cannot resume from it.")
        if "fp32_groups_flat" in wrapper:
            raise ConfigError(
                f"{files[0]} was written at ZeRO stage 0 with a fused 16-bit optimizer, which flattens parameters "
                "without recording their order. Save it with ZeRO stage 1 or higher."
            )
        self._masters: Sequence[torch.Tensor] = [
            tensor for group in wrapper.get("fp32_groups") or () for tensor in group
        ]
        self._optimizer = wrapper.get("optimizer_state_dict", wrapper)
        self._model = model
        self._path = files[0]
        scale = {name: wrapper[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter") if name in wrapper}
        self.state = ConvertedState(model, without_parameters(self._optimizer["param_groups"]), scale)

    def state_shards(self) -> Iterator[StateShard]:
        """Yields all tensors and fills :attr:`ConvertedState.scalars`.

        Raises:
            ConfigError: the order of the optimizer's parameters is unknown.
        """
        module, buffers = self._model["module"], set(self._model.get("buffer_names") or ())
        named = {name: tensor for name, tensor in module.items() if name not in buffers}
        names = self._names(named)
        stepped = set(names.values())
        masters = self._masters or [named[name] for name in names.values()]
        states = [self._optimizer["state"].get(number, {}) for number in names]
        scalar_keys = scalar_state_keys(zip(masters, states, strict=True))
        for name, master, state in zip(names.values(), masters, states, strict=True):
            yield from self.state.shards_of(name, master, state, scalar_keys)
        for name, tensor in module.items():
            if name not in stepped and not _is_tied(tensor, named, stepped):
                yield whole_shard(name, BUFFER if name in buffers else WEIGHT, tensor)

    def _names(self, named: Mapping[str, torch.Tensor]) -> dict[int, str]:
        """Maps the optimizer's parameter numbers to names, in the order of the parameter groups.

        Parameters are numbered group by group. All trainers use one of two groupings, in the order of the model: all
        parameters in one group, or one group with weight decay and one without (biases and norms). Shapes must match.
        """
        groups = [list(group["params"]) for group in self._optimizer["param_groups"]]
        numbers = [number for group in groups for number in group]
        unique = {n: t for i, (n, t) in enumerate(named.items()) if not _is_tied(t, named, set(list(named)[:i]))}
        with_decay = [name for name, tensor in unique.items() if tensor.dim() > 1]
        without_decay = [name for name in unique if name not in set(with_decay)]
        orders = {1: list(unique), 2: [*with_decay, *without_decay]}
        ordered = orders.get(len(groups), [])
        state = self._optimizer["state"]
        matches = len(ordered) == len(numbers) and all(
            any(getattr(value, "shape", None) == unique[name].shape for value in state[number].values())
            for number, name in zip(numbers, ordered, strict=True)
            if state.get(number)
        )
        if not matches or (len(groups) == 2 and len(groups[0]) != len(with_decay)):
            raise ConfigError(
                f"{self._path} was written at ZeRO stage 0, where DeepSpeed numbers the optimizer's parameters without "
                f"naming them. Its {len(groups)} parameter groups with {len(numbers)} parameters match neither one "
                f"group with all {len(unique)} parameters of the model nor two groups with and without weight decay. "
                "Save it with ZeRO stage 1 or higher."
            )
        return dict(zip(numbers, ordered, strict=True))


def _is_tied(tensor: torch.Tensor, named: Mapping[str, torch.Tensor], before: set[str]) -> bool:
    """Whether ``tensor`` is another name of one of the tensors named ``before``."""
    return any(
        named[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and named[name].storage_offset() == tensor.storage_offset()
        for name in before & set(named)
    )
