"""The engine's client state: step counters, loss scale, parameter-group settings. Small, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.engine.expert_parallel import EXPERT_MARKS, of_divided_groups, of_whole_groups, schedule_state
from ds_trainer.engine.state.state_devices import on_device
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# This run's choice of implementation, which also determines the device of the counters.
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
_OWN = frozenset({"params", *EXPERT_MARKS})  # of this run
_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _scalers(engine: DeepSpeedEngine) -> Iterator[Any]:
    """The objects that hold a loss scale: ZeRO's or stage 0's."""
    for name in ("loss_scaler", "loss_scale_config"):
        scaler = getattr(engine.optimizer, name, None)
        if scaler is not None:
            yield scaler


def _stateful(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any]]:
    """Components with a ``state_dict``, by name."""
    if engine.lr_scheduler is not None:
        yield "schedule", engine.lr_scheduler
    if engine.random_ltd_enabled():
        yield "random_ltd", engine.random_ltd_scheduler


def _optimizer(engine: DeepSpeedEngine) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """Settings of each parameter group. Excludes a reference to the optimizer's state, which is saved as shards."""
    state = optimizer.state
    return [{k: v for k, v in group.items() if k not in _OWN and v is not state} for group in optimizer.param_groups]


def _device(engine: DeepSpeedEngine, group: Mapping[str, Any]) -> torch.device:
    """Device of the stepped tensors. ZeRO-3 empties the groups between steps."""
    for parameter in group["params"]:
        return torch.device(parameter.device)
    return torch.device("cpu") if engine.zero_use_cpu_optimizer() else torch.device(engine.device)


def _setting(present: Any, saved: Any, device: torch.device) -> Any:
    """The restored setting of a parameter group. A tensor, such as a learning rate, stays the same object."""
    if isinstance(present, torch.Tensor) and isinstance(saved, (torch.Tensor, int, float)):
        with torch.no_grad():
            return present.copy_(torch.as_tensor(saved))
    if isinstance(present, (list, tuple)) and isinstance(saved, (list, tuple)) and len(present) == len(saved):
        return type(saved)(_setting(one, other, device) for one, other in zip(present, saved, strict=True))
    return on_device(saved, device)


def read_client_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Returns counters, loss scale, schedule states and the settings of each parameter group."""
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "scales": [{name: getattr(s, name) for name in _SCALES if hasattr(s, name)} for s in _scalers(engine)],
        "parts": {
            name: schedule_state(part.state_dict(), _optimizer(engine).param_groups, of_whole_groups)
            for name, part in _stateful(engine)
        },
        "groups": of_whole_groups(_settings(_optimizer(engine)), _optimizer(engine).param_groups),
    }


def write_client_state(engine: DeepSpeedEngine, client_state: Mapping[str, Any], keep: Collection[str] = ()) -> None:
    """Restores a result of :func:`read_client_state`.

    Args:
        engine: the engine whose counters and settings are changed.
        client_state: the result of :func:`read_client_state`.
        keep: settings of parameter groups to leave unchanged; with ``"schedule"`` also the schedules.

    Raises:
        ConfigError: the number of parameter groups differs.
    """
    groups = _optimizer(engine).param_groups
    whole = of_whole_groups(groups, groups)
    if len(whole) != len(client_state["groups"]):
        raise ConfigError(
            f"The checkpoint's optimizer has {len(client_state['groups'])} parameter groups, this one has "
            f"{len(whole)}: make them equal (decay_parameters and create_optimizer choose them), or start a new run "
            "from the checkpoint's weights."
        )
    for group, saved in zip(groups, of_divided_groups(client_state["groups"], groups), strict=True):
        for key, value in saved.items():
            if key not in keep and key not in _OWN and key not in _IMPLEMENTATION:
                group[key] = _setting(group.get(key), value, _device(engine, group))
    for name, value in client_state["counters"].items():
        setattr(engine, name, value)
    for scaler, values in zip(_scalers(engine), client_state["scales"], strict=False):
        for name, value in values.items():
            setattr(scaler, name, value)
    for name, part in _stateful(engine):
        if name in client_state["parts"] and name not in keep:
            part.load_state_dict(schedule_state(client_state["parts"][name], groups, of_divided_groups))
