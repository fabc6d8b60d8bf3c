"""Checkpoints of transformers.Trainer without DeepSpeed: weights as ``save_pretrained`` writes them, ``optimizer.pt``.

The optimizer numbers its parameters and does not name them: the model and the parameter groups of the run that goes on
tell which they are, and shapes must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_trainer.checkpoint.foreign.engine_shards import ForeignState, without_parameters
from ds_trainer.checkpoint.foreign.saved_weights import SavedAdapters, SavedModel
from ds_trainer.checkpoint.protocol.foreign_formats import read_foreign
from ds_trainer.checkpoint.weights.adapters import saves_adapters
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Piece, elementwise, numbers_among, persistent_buffers
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError

_OPTIMIZER = "optimizer.pt"
_ADAM, _QUANTIZED = frozenset({"exp_avg", "exp_avg_sq"}), frozenset({"state1", "state2", "qmap1", "absmax1"})
_STATES = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam"), _ADAM),
    "sgd": frozenset({"momentum_buffer"}),
    "adagrad": frozenset({"sum"}),
    "rmsprop": frozenset({"square_avg"}),
}
"""States that an optimizer keeps of every element; it may keep more."""
_METRIC = frozenset({"num_bad_epochs", "window"})  # in the state of a schedule that follows a metric


class RunningModel(NamedTuple):
    """The model that goes on.

    Attributes:
        model: its elements are not looked at, only names and shapes.
        groups: names of the trained parameters, one list for each parameter group of its optimizer, in their order.
        optimizer: the name of its optimizer.
        follows_metric: whether its schedule is stepped with a metric, not with the optimizer.
    """

    model: nn.Module
    groups: Sequence[Sequence[str]]
    optimizer: str
    follows_metric: bool = False


class PlainTrainerFiles:
    """A ``checkpoint-N`` of transformers.Trainer.

    Args:
        directory: of the checkpoint.
        here: what goes on from it.
        trusted: unpickle whatever is in it.

    Attributes:
        state: counters and settings.
        group_places: which of the optimizer's parameter groups have parameters.
        notes: sentences on what is not taken over.

    Raises:
        ConfigError: something in it cannot go on here, and why.
    """

    def __init__(self, directory: Path, here: RunningModel, trusted: bool) -> None:
        self._directory = directory
        self._here = here
        self.notes: list[str] = []
        self._states, groups = self._read_optimizer(trusted)
        self.group_places = [place for place, group in enumerate(groups) if group["params"]]
        groups = [groups[place] for place in self.group_places]
        self._numbers = self._numbers_by_name([list(group["params"]) for group in groups])
        self._check_states()
        self.weights = (SavedAdapters if saves_adapters(here.model) else SavedModel)(directory, here.model)
        self._note_rounding()
        if (directory / "scaler.pt").is_file():
            self.notes.append("NOT the loss scale (scaler.pt): it begins anew")
        self.state = ForeignState(self._counters(), without_parameters(groups), {})

    @property
    def base(self) -> BaseDigest | None:
        """What identifies the base of adapters; of elements nothing is known. None where the whole model is here."""
        return self.weights.base if isinstance(self.weights, SavedAdapters) else None

    def pieces(self) -> Iterator[Piece]:
        """All tensors, one at a time; fills :attr:`ForeignState.scalars` on the way.

        Raises:
            ConfigError: a weight is missing, or has another shape.
        """
        model = self._here.model
        parameters, buffers = dict(model.named_parameters()), dict(persistent_buffers(model))
        self.weights.check({**parameters, **buffers})
        shapes = {name: torch.empty(full_shape(parameters[name]), device="meta") for name in self._numbers}
        numbers = numbers_among((shapes[name], self._state_of(name)) for name in shapes)
        for name in shapes:
            yield self._weight(name, MASTER, shapes[name].shape, torch.float32)
            states = self._state_of(name)
            tensors = elementwise(shapes[name], states, numbers)
            for key, value in tensors.items():
                # A model in 16 bits has states in 16 bits; those of masters are float32.
                flat = value.reshape(-1).float() if value.is_floating_point() else value.reshape(-1)
                yield Piece(name, key, Place.whole(value.shape), flat)
            for key in states.keys() - tensors.keys():
                self.state.scalars.setdefault(name, {})[key] = states[key]
        for name, tensor in (*parameters.items(), *buffers.items()):
            if name not in shapes and self.weights.has(name):
                kind = BUFFER if name in buffers else WEIGHT
                yield self._weight(name, kind, full_shape(tensor), tensor.dtype)
        self.weights.close()

    def schedule(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the schedule without parameter groups that are empty, which transformers keeps.

        Raises:
            ConfigError: one of them follows a metric, the one here and the one that was saved, and the other does not.
        """
        follows = not _METRIC.isdisjoint(saved)
        if follows != self._here.follows_metric:
            raise ConfigError(
                f"{self._directory / 'scheduler.pt'} is of a schedule that {_follows(follows)}, and the one here "
                f"{_follows(not follows)}: choose the lr_scheduler_type that wrote it."
            )
        found = dict(saved)
        for key in ("base_lrs", "_last_lr", "lr_lambdas"):
            if isinstance(found.get(key), list):
                found[key] = [value for place, value in enumerate(found[key]) if place in self.group_places]
        return found

    def _weight(self, name: str, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Piece:
        place = Place.whole(shape)
        target = torch.empty(len(place), dtype=dtype)
        self.weights.fill(name, place, target)
        return Piece(name, kind, place, target)

    def _read_optimizer(self, trusted: bool) -> tuple[Mapping[int, Any], list[dict[str, Any]]]:
        path = self._directory / _OPTIMIZER
        if not path.is_file():
            raise ConfigError(
                f"{self._directory} has no {_OPTIMIZER} (save_only_model=True, or FSDP, wrote it): there is no "
                f"optimizer to go on with. {self._remedy}"
            )
        content = read_foreign(path, trusted)
        if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
            raise ConfigError(f"{path} is not the state of one torch optimizer. {self._remedy}")
        return content["state"], content["param_groups"]

    @property
    def _remedy(self) -> str:
        where = repr(str(self._directory))
        if saves_adapters(self._here.model):
            return f"Begin a new run with its adapters: PeftModel.from_pretrained(base, {where}, is_trainable=True)."
        if any(self._directory.glob("model*.safetensors")):
            return f"Begin a new run from its weights: start_from_weights={where}."
        return f"Begin a new run with the model that from_pretrained({where}) gives."

    def _numbers_by_name(self, groups: list[list[int]]) -> dict[str, int]:
        here = [list(group) for group in self._here.groups if group]
        if [len(group) for group in groups] != [len(group) for group in here]:
            raise ConfigError(
                f"{self._directory / _OPTIMIZER} has parameter groups of {_sizes(groups)} parameters, and the "
                f"optimizer here has groups of {_sizes(here)}: which is which is not known. Train the same parameters "
                f"of the same model in the same groups (requires_grad, adapters, weight decay). {self._remedy}"
            )
        pairs = (pair for one, other in zip(groups, here, strict=True) for pair in zip(other, one, strict=True))
        return dict(pairs)

    def _state_of(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._states.get(self._numbers[name], {})
        return found

    def _check_states(self) -> None:
        path, optimizer = self._directory / _OPTIMIZER, self._here.optimizer
        parameters = dict(self._here.model.named_parameters())
        keys: set[str] = set()
        for name in self._numbers:
            shape, states = full_shape(parameters[name]), self._state_of(name)
            tensors = {key: value for key, value in states.items() if isinstance(value, torch.Tensor)}
            if found := _QUANTIZED.intersection(tensors):
                raise ConfigError(
                    f"{path} holds 8-bit states ({', '.join(sorted(found))}), whose numbers belong together in blocks "
                    f"and cannot be cut into shards. {self._remedy}"
                )
            for key, value in tensors.items():
                if value.dim() and tuple(value.shape) != shape:
                    raise ConfigError(
                        f"{path}: the state {key} of {name} is {list(value.shape)}, the parameter is {list(shape)}: "
                        "either it is another model, or an optimizer with factored states (Adafactor), which cannot be "
                        f"cut into shards. {self._remedy}"
                    )
            keys.update(key for key, value in tensors.items() if value.dim() or not shape)
        wanted = _STATES.get(optimizer.lower())
        if wanted is None:
            self.notes.append(f"the optimizer's states as they are; whether {optimizer} keeps the same is not known")
        elif keys and not wanted <= keys:
            raise ConfigError(
                f"{path} holds the states of another optimizer ({', '.join(sorted(keys))}) than {optimizer} here, "
                f"which keeps {', '.join(sorted(wanted))}. Choose the optimizer that wrote them (optim). {self._remedy}"
            )

    def _note_rounding(self) -> None:
        rounded = sorted({str(t).removeprefix("torch.") for t in self.weights.types if t.itemsize == 2})
        if rounded:
            self.notes.append(f"the weights in {' and '.join(rounded)}: masters begin from these rounded numbers")

    def _counters(self) -> dict[str, Any]:
        """In the form of DeepSpeed's file of a model."""
        ranks = max(1, len(list(self._directory.glob("rng_state_*.pth"))))
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        precision = next((half[one] for one in self.weights.types if one in half), None)
        config = {} if precision is None else {precision: {"enabled": True}}
        step = json.loads((self._directory / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        return {"global_steps": step, "dp_world_size": ranks, "ds_config": config}


def _sizes(groups: Sequence[Sequence[Any]]) -> str:
    return " and ".join(str(len(group)) for group in groups) or "no"


def _follows(metric: bool) -> str:
    return "follows a metric" if metric else "follows the steps"
