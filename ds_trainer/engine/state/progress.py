"""What an engine has counted and adapted so far: steps, loss scale, settings. Small, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.engine.state.devices import on_device
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# How an optimizer computes is this run's choice: where its counters lie follows from it.
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scalers(engine: DeepSpeedEngine) -> Iterator[Any]:
    """Whatever holds a loss scale: of ZeRO, of stage 0."""
    for name in ("loss_scaler", "loss_scale_config"):
        scaler = getattr(engine.optimizer, name, None)
        if scaler is not None:
            yield scaler


def _stateful(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any]]:
    """Parts that know how to write down their own state."""
    if engine.lr_scheduler is not None:
        yield "schedule", engine.lr_scheduler
    if engine.random_ltd_enabled():
        yield "random_ltd", engine.random_ltd_scheduler


def _optimizer(engine: DeepSpeedEngine) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter group. Moments that an optimizer reaches through its groups too are pieces, no settings."""
    own = optimizer.state
    return [{k: v for k, v in group.items() if k != "params" and v is not own} for group in optimizer.param_groups]


def _device(engine: DeepSpeedEngine, group: Mapping[str, Any]) -> torch.device:
    """Where the tensors lie that are stepped. ZeRO-3 empties the groups between steps."""
    for parameter in group["params"]:
        return torch.device(parameter.device)
    return torch.device("cpu") if engine.zero_use_cpu_optimizer() else torch.device(engine.device)


def _setting(present: Any, saved: Any, device: torch.device) -> Any:
    """A setting of a parameter group. A tensor, as a learning rate may be, stays the same object on its device."""
    if isinstance(present, torch.Tensor) and isinstance(saved, (torch.Tensor, int, float)):
        with torch.no_grad():
            return present.copy_(torch.as_tensor(saved))
    if isinstance(present, (list, tuple)) and isinstance(saved, (list, tuple)) and len(present) == len(saved):
        return type(saved)(_setting(one, other, device) for one, other in zip(present, saved, strict=True))
    return on_device(saved, device)


def read_progress(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Counters, loss scale, states of schedules and the settings of each parameter group."""
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "scales": [{name: getattr(s, name) for name in _SCALES if hasattr(s, name)} for s in _scalers(engine)],
        "parts": {name: part.state_dict() for name, part in _stateful(engine)},
        "groups": _settings(_optimizer(engine)),
    }


def write_progress(engine: DeepSpeedEngine, progress: Mapping[str, Any], keep: Collection[str] = ()) -> None:
    """Put back what :func:`read_progress` gave.

    Args:
        engine: whose counters and settings are changed.
        progress: the result of :func:`read_progress`.
        keep: settings of parameter groups that stay as they are now; with ``"schedule"`` the schedules stay too.

    Raises:
        ConfigError: the optimizer has other parameter groups.
    """
    groups = _optimizer(engine).param_groups
    if len(groups) != len(progress["groups"]):
        raise ConfigError(
            f"The checkpoint's optimizer has {len(progress['groups'])} parameter groups, this one has {len(groups)}: "
            "make them alike (what decay_parameters and create_optimizer choose), or start anew from its weights."
        )
    for group, saved in zip(groups, progress["groups"], strict=True):
        for key, value in saved.items():
            if key not in keep and key not in _IMPLEMENTATION:
                group[key] = _setting(group.get(key), value, _device(engine, group))
    for name, value in progress["counters"].items():
        setattr(engine, name, value)
    for scaler, values in zip(_scalers(engine), progress["scales"], strict=False):
        for name, value in values.items():
            setattr(scaler, name, value)
    for name, part in _stateful(engine):
        if name in progress["parts"] and name not in keep:
            part.load_state_dict(progress["parts"][name])
