"""Reads checkpoints of transformers.Trainer without DeepSpeed: weights of ``save_pretrained``, and ``optimizer.pt``.

The optimizer state numbers the parameters without naming them. The model and the parameter groups of the resuming run
identify them, and shapes must match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_trainer.checkpoint.converters.deepspeed_reader import ConvertedState, whole_shard, without_parameters
from ds_trainer.checkpoint.loading.saved_weights import SavedAdapterWeights, SavedModelWeights
from ds_trainer.checkpoint.protocol.other_formats import load_deepspeed_pickle
from ds_trainer.checkpoint.weights.adapter_files import saves_adapters
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.engine.state.buffers import persistent_buffers
from ds_trainer.engine.state.state_shards import BUFFER, WEIGHT, StateShard, scalar_state_keys
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json

_OPTIMIZER = "optimizer.pt"
_ADAM, _QUANTIZED = frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"state1", "state2", "qmap1", "absmax1"})
_STATES = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam"), _ADAM),
    "sgd": frozenset({"momentum_buffer"}),
    "adagrad": frozenset({"sum"}),
    "rmsprop": frozenset({"square_avg"}),
}
"""Elementwise states of each optimizer; it may have more."""
_METRIC = frozenset({"num_bad_epochs", "window"})  # keys in the state of a metric-driven schedule


class RunningModel(NamedTuple):
    """The model of the resuming run.

    Attributes:
        model: the module; only names and shapes are used.
        groups: names of the trained parameters, one list per parameter group of the optimizer, in order.
        optimizer: name of the optimizer.
        follows_metric: whether the schedule steps on a metric instead of with the optimizer.
    """

    model: nn.Module
    groups: Sequence[Sequence[str]]
    optimizer: str
    follows_metric: bool = False


class TransformersCheckpoint:
    """A ``checkpoint-N`` of transformers.Trainer.

    Args:
        directory: the directory of the checkpoint.
        running_model: the model of the resuming run.
        trusted: unpickle arbitrary objects in the checkpoint.

    Attributes:
        state: counters and settings.
        group_indices: indices of the optimizer's parameter groups that have parameters.
        notes: messages on what is not converted.

    Raises:
        ConfigError: the checkpoint does not fit the resuming run; the message states the reason.
    """

    def __init__(self, directory: Path, running_model: RunningModel, trusted: bool) -> None:
        self._directory = directory
        self._running_model = running_model
        self.notes: list[str] = []
        path = self._directory / _OPTIMIZER
        if not path.is_file():
            raise ConfigError(
                f"{self._directory} has no {_OPTIMIZER} (it was written with save_only_model=True or FSDP), so the "
                f"optimizer cannot be restored. {self._remedy}"
            )
        content = load_deepspeed_pickle(path, trusted)
        if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
            raise ConfigError(f"{path} is not the state of a torch optimizer. {self._remedy}")
        self._states, groups = content["state"], content["param_groups"]
        self.group_indices = [index for index, group in enumerate(groups) if group["params"]]
        groups = [groups[index] for index in self.group_indices]
        self._numbers = self._numbers_by_name([list(group["params"]) for group in groups])
        self._check_states()
        self.weights = (SavedAdapterWeights if saves_adapters(running_model.model) else SavedModelWeights)(
            directory, running_model.model
        )
        rounded = sorted({str(t).removeprefix("torch.") for t in self.weights.types if t.itemsize == 2})
        if rounded:
            self.notes.append(f"weights in {' and '.join(rounded)}: master weights start from these rounded values")
        if (directory / "scaler.pt").is_file():
            self.notes.append("NOT converted: loss scale (scaler.pt). It starts from its initial value")
        # The counters in the format of a DeepSpeed model file.
        ranks = max(1, len(list(self._directory.glob("rng_state_*.pth"))))
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        precision = next((half[one] for one in self.weights.types if one in half), None)
        config = {} if precision is None else {precision: {"enabled": True}}
        step = parse_json((self._directory / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        self.state = ConvertedState(
            {"global_steps": step, "dp_world_size": ranks, "ds_config": config}, without_parameters(groups), {}
        )

    @property
    def base(self) -> BaseDigest | None:
        """The base of adapters, without digests of elements; None if the checkpoint has the whole model."""
        return self.weights.base if isinstance(self.weights, SavedAdapterWeights) else None

    def state_shards(self) -> Iterator[StateShard]:
        """Yields all tensors, one at a time, and fills :attr:`ConvertedState.scalars`.

        Raises:
            ConfigError: a weight is missing, or its shape differs.
        """
        model = self._running_model.model
        parameters, buffers = dict(model.named_parameters()), dict(persistent_buffers(model))
        self.weights.check({**parameters, **buffers})
        shapes = {name: torch.empty(full_shape(parameters[name]), device="meta") for name in self._numbers}
        scalar_keys = scalar_state_keys((shapes[name], self._state_of(name)) for name in shapes)
        for name, shape in shapes.items():
            master = self._weight(name, shape.shape, torch.float32)
            for shard in self.state.shards_of(name, master, self._state_of(name), scalar_keys):
                # A 16-bit model has 16-bit states; states of master weights are float32.
                is_float = shard.tensor.is_floating_point()
                yield shard._replace(tensor=shard.tensor.float()) if is_float else shard
        for name, tensor in (*parameters.items(), *buffers.items()):
            if name not in shapes and self.weights.has(name):
                weight = self._weight(name, full_shape(tensor), tensor.dtype)
                yield whole_shard(name, BUFFER if name in buffers else WEIGHT, weight)
        self.weights.close()

    def schedule(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of the schedule without empty parameter groups, which transformers keeps.

        Raises:
            ConfigError: only one of the saved schedule and the schedule of the run follows a metric.
        """
        follows = not _METRIC.isdisjoint(saved)
        if follows != self._running_model.follows_metric:
            raise ConfigError(
                f"{self._directory / 'scheduler.pt'} belongs to a schedule that {_follows(follows)}, but the schedule "
                f"of this run {_follows(not follows)}. Set lr_scheduler_type to the value that wrote it."
            )
        state = dict(saved)
        for key in ("base_lrs", "_last_lr", "lr_lambdas"):
            if isinstance(state.get(key), list):
                state[key] = [value for index, value in enumerate(state[key]) if index in self.group_indices]
        return state

    def _weight(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        whole = ShardSlice.whole(shape)
        target = torch.empty(len(whole), dtype=dtype)
        self.weights.fill(name, whole, target)
        return target.view(tuple(shape))

    @property
    def _remedy(self) -> str:
        where = repr(str(self._directory))
        if saves_adapters(self._running_model.model):
            return f"Start a new run with its adapters: PeftModel.from_pretrained(base, {where}, is_trainable=True)."
        if any(self._directory.glob("model*.safetensors")):
            return f"Start a new run from its weights: start_from_weights={where}."
        return f"Start a new run with from_pretrained({where})."

    def _numbers_by_name(self, groups: list[list[int]]) -> dict[str, int]:
        own_groups = [list(group) for group in self._running_model.groups if group]
        if [len(group) for group in groups] != [len(group) for group in own_groups]:
            raise ConfigError(
                f"{self._directory / _OPTIMIZER} has parameter groups of {_sizes(groups)} parameters, but the "
                f"optimizer of this run has groups of {_sizes(own_groups)}, so the parameters cannot be identified. "
                "Train the same parameters of the same model in the same groups (requires_grad, adapters, weight "
                f"decay). {self._remedy}"
            )
        pairs = zip(chain.from_iterable(own_groups), chain.from_iterable(groups), strict=True)
        return dict(pairs)

    def _state_of(self, name: str) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._states.get(self._numbers[name], {})
        return state

    def _check_states(self) -> None:
        path, optimizer = self._directory / _OPTIMIZER, self._running_model.optimizer
        parameters = dict(self._running_model.model.named_parameters())
        keys: set[str] = set()
        for name in self._numbers:
            shape, states = full_shape(parameters[name]), self._state_of(name)
            tensors = {key: value for key, value in states.items() if isinstance(value, torch.Tensor)}
            if quantized := _QUANTIZED.intersection(tensors):
                raise ConfigError(
                    f"{path} contains 8-bit states ({', '.join(sorted(quantized))}), which are quantized in blocks and "
                    f"cannot be sharded. {self._remedy}"
                )
            for key, value in tensors.items():
                if value.dim() and tuple(value.shape) != shape:
                    raise ConfigError(
                        f"{path}: the state {key} of {name} has shape {list(value.shape)}, but the parameter has shape "
                        f"{list(shape)}. The checkpoint belongs to a different model, or its optimizer has factored "
                        f"states (Adafactor), which cannot be sharded. {self._remedy}"
                    )
            keys.update(key for key, value in tensors.items() if value.dim() or not shape)
        required = _STATES.get(optimizer.lower())
        if required is None:
            self.notes.append(f"optimizer states, unchanged; it is not known whether {optimizer} uses the same states")
        elif keys and not required <= keys:
            raise ConfigError(
                f"{path} contains the states {', '.join(sorted(keys))}, but {optimizer} requires "
                f"{', '.join(sorted(required))}. Set optim to the optimizer that wrote them. {self._remedy}"
            )


def _sizes(groups: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(len(group)) for group in groups) or "no"


def _follows(metric: bool) -> str:
    return "follows a metric" if metric else "follows the steps"
