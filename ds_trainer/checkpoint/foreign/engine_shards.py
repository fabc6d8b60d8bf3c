"""What DeepSpeed's checkpoints hold, as pieces, numbers and settings of this package.

Shards are put together by DeepSpeed itself (``deepspeed.checkpoint.ds_to_universal``); here its universal files are
read: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, ``zero/optimizer_state.pt``, and of the model's files what
no optimizer steps. A checkpoint of ZeRO stage 0 is no shards: :mod:`ds_trainer.checkpoint.foreign.unsharded`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_trainer.checkpoint.protocol.foreign_formats import read_foreign
from ds_trainer.engine.state.pieces import BUFFER, MASTER, WEIGHT, Piece
from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError

_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class ForeignState:
    """An engine's state, whole tensors.

    Attributes:
        model: DeepSpeed's file of the model and of counters; of the first rank.
        groups: settings of the parameter groups, without their parameters.
        scale: the loss scaler's numbers.
        scalars: the one-number states of parameters.
    """

    model: Mapping[str, Any]
    groups: list[dict[str, Any]]
    scale: dict[str, Any]
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones among them."""
        return int(self.model["global_steps"])

    def progress(self) -> dict[str, Any]:
        """As :func:`ds_trainer.engine.state.progress.read_progress` gives it."""
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
    """DeepSpeed's files of the model: one for each tensor-parallel rank, under ZeRO-3 one for each rank."""
    return sorted(directory.glob("mp_rank_*_model_states.pt")) or sorted(
        directory.glob("zero_pp_rank_*_model_states.pt"), key=lambda path: int(path.name.split("_")[3])
    )


def scale_of(scaler: Any) -> dict[str, Any]:
    """The numbers of a loss scaler."""
    return {name: getattr(scaler, name) for name in _SCALES if hasattr(scaler, name)}


def without_parameters(groups: Any) -> list[dict[str, Any]]:
    """Settings of parameter groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


class UniversalFiles:
    """A directory in DeepSpeed's universal form.

    Args:
        directory: with ``zero/`` and the files of the model.
        trusted: unpickle whatever is in them.

    Raises:
        ConfigError: something is missing, or needs trust.
    """

    def __init__(self, directory: Path, trusted: bool) -> None:
        self._zero = directory / "zero"
        self._trusted = trusted
        files = model_files(directory)
        self._sharded = files[0].name.startswith("zero_")
        self._models = files if self._sharded else files[:1]
        self._tensor_parallel = len({path.name.split("mp_rank_")[1] for path in files}) > 1
        self._model = read_foreign(files[0], trusted)
        optimizer = read_foreign(self._zero / "optimizer_state.pt", trusted)
        self._steps = (optimizer.get("optimizer_state_dict") or {}).get("state") or {}
        groups = optimizer.get("param_groups") or (optimizer.get("optimizer_state_dict") or {}).get("param_groups")
        if groups is None:
            raise ConfigError(f"{self._zero / 'optimizer_state.pt'} has no settings of parameter groups.")
        self.state = ForeignState(self._model, without_parameters(groups), scale_of(optimizer.get("loss_scaler")))

    def pieces(self) -> Iterator[Piece]:
        """All tensors, whole, still in their files; fills :attr:`ForeignState.scalars` on the way.

        Raises:
            ConfigError: something that a run needs is missing.
        """
        stepped: set[str] = set()
        for shapes in self._model["param_shapes"] or ():
            for name, shape in shapes.items():
                stepped.add(name)
                yield from self._of_parameter(name, tuple(shape))
        yield from self._not_stepped(stepped)

    def _of_parameter(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        directory = self._zero / name
        if not (directory / "fp32.pt").is_file():
            raise ConfigError(f"{directory} has no fp32.pt, although {name} was trained: the checkpoint is incomplete.")
        for path in sorted(directory.glob("*.pt")):
            value = read_foreign(path, self._trusted)
            if path.stem == "step":
                self.state.scalars.setdefault(name, {})["step"] = value
                continue
            if isinstance(value, dict):
                value = value["param"] if shape else value["param"].reshape(())
            elif value.numel() != math.prod(shape):
                raise ConfigError(f"{path} has {value.numel()} elements, but {name} has the shape {list(shape)}.")
            else:
                value = value.view(shape)  # ds_to_universal leaves those of ZeRO-3 flat
            kind = MASTER if path.stem == "fp32" else path.stem
            yield Piece(name, kind, Place.whole(value.shape), value.reshape(-1))
        first: dict[str, Any] = next(iter(self._steps.values()), {})  # of ZeRO-3 the steps are in one place, all alike
        if "step" in first and (directory / "exp_avg.pt").is_file():
            self.state.scalars.setdefault(name, {}).setdefault("step", first["step"])

    def _not_stepped(self, stepped: set[str]) -> Iterator[Piece]:
        model = self._model
        buffers, shared = set(model.get("buffer_names") or ()), set(model.get("shared_params") or ())
        for name in sorted(buffers & set(model["module"])):
            yield Piece(name, BUFFER, Place.whole(model["module"][name].shape), model["module"][name].reshape(-1))
        if self._sharded:
            frozen = dict(self._gathered_frozen())
        else:
            names = set(model["module"]) - stepped - buffers - shared
            frozen = {name: model["module"][name] for name in sorted(names)}
        if frozen and self._tensor_parallel:
            raise ConfigError(
                f"{self._zero.parent}: {len(frozen)} parameters were not trained ({next(iter(frozen))}, ...), and its "
                "tensor-parallel ranks hold slices of them without saying how they were cut. Save without tensor "
                "parallelism."
            )
        for name, tensor in frozen.items():
            yield Piece(name, WEIGHT, Place.whole(tensor.shape), tensor.reshape(-1))

    def _gathered_frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = self._model.get("frozen_param_shapes") or {}
        if shapes:
            parts = [read_foreign(path, self._trusted)["frozen_param_fragments"] for path in self._models]
            for name, shape in shapes.items():
                flat = torch.cat([part[name].reshape(-1) for part in parts])[: math.prod(shape)]
                yield name, flat.view(tuple(shape))
