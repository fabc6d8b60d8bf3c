"""Where the states lie that are put back, shown on device meta: a GPU takes no counter on the host for a fused step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ds_trainer.engine.state.client_state import read_client_state, write_client_state
from ds_trainer.engine.state.flat_partitions import FlatPartition, ParameterFragment
from ds_trainer.engine.state.state_shards import MASTER, _write_partition
from ds_trainer.parallel.shard_slices import ShardSlice

SHAPE = (4, 3)


class Saved(NamedTuple):
    """The state of one parameter as a checkpoint has it: in host memory."""

    states: dict[str, Any]

    def kinds(self, name: str) -> dict[str, torch.dtype]:
        return {MASTER: torch.float32, **{k: v.dtype for k, v in self.states.items() if self._elementwise(v)}}

    def _elementwise(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == SHAPE

    def fill(self, name: str, kind: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        if kind != MASTER:
            target.copy_(self.states[kind].flatten()[: len(shard_slice)])

    def scalars(self, name: str) -> dict[str, Any]:
        return {k: v for k, v in self.states.items() if not isinstance(v, torch.Tensor) or v.dim() == 0} | {
            k: v for k, v in self.states.items() if isinstance(v, (int, float))
        }

    def extras(self, name: str) -> dict[str, Any]:
        known = {*self.kinds(name), *self.scalars(name)}
        return {k: v for k, v in self.states.items() if k not in known}


class OnlyExtras(Saved):
    """What bitsandbytes keeps beside its blocks."""

    def scalars(self, name: str) -> dict[str, Any]:
        return {}

    def extras(self, name: str) -> dict[str, Any]:
        return dict(self.states)


def unit_on(device: str, make: Callable[..., torch.optim.Optimizer], **settings: Any) -> FlatPartition:
    """A unit whose group lists no tensor, as ZeRO-3 leaves it between two steps."""
    tensor = nn.Parameter(torch.zeros(SHAPE, device=device))
    optimizer = make([tensor], lr=1e-3)
    group = optimizer.param_groups[0]
    group.update(settings, params=[])
    members = [ParameterFragment("weight", tensor, ShardSlice.whole(SHAPE), 0)]
    return FlatPartition(tensor, tensor.numel(), members, optimizer, group, replicated=True)


def after_a_step(make: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    parameter = nn.Parameter(torch.ones(SHAPE))
    optimizer = make([parameter], lr=1e-3)
    parameter.grad = torch.ones(SHAPE)
    optimizer.step()
    return dict(optimizer.state[parameter])


def by_torch(make: Callable[..., torch.optim.Optimizer], saved: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """What ``Optimizer.load_state_dict`` makes of the same state."""
    parameter = nn.Parameter(torch.zeros(SHAPE, device="meta"))
    optimizer = make([parameter], lr=1e-3)
    written = optimizer.state_dict()
    written["state"] = {0: saved}
    for group in written["param_groups"]:
        group.update(settings)
    optimizer.load_state_dict(written)
    return dict(optimizer.state[parameter])


def devices_and_dtypes(states: dict[str, Any]) -> dict[str, Any]:
    return {k: (v.device.type, v.dtype) if isinstance(v, torch.Tensor) else type(v) for k, v in states.items()}


OPTIMIZERS = [
    *(torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.ASGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop),
]


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_states_are_on_the_device_where_torch_puts_them(make: Any, settings: dict[str, Any]) -> None:
    saved = after_a_step(make)
    unit = unit_on("meta", make, **settings)
    _write_partition(unit, Saved(saved))
    assert devices_and_dtypes(unit.states) == devices_and_dtypes(by_torch(make, saved, **settings))
    assert unit.states["step"].device.type == ("meta" if settings else "cpu")


def test_offloaded_master_weights_have_all_states_in_host_memory() -> None:
    for settings in ({}, {"fused": True}):
        unit = unit_on("cpu", torch.optim.AdamW, **settings)
        saved = after_a_step(torch.optim.AdamW)
        _write_partition(unit, Saved(saved))
        assert {value.device.type for value in unit.states.values()} == {"cpu"}
        assert unit.states["step"] == 1.0
        assert unit.states["step"] is not saved["step"]  # the optimizer adds to it in place


def test_nested_states_of_another_shape_are_on_the_device_of_the_parameter() -> None:
    unit = unit_on("meta", torch.optim.SGD)
    absmax, qmap = torch.ones(7), torch.arange(256.0)
    _write_partition(unit, OnlyExtras({"absmax1": absmax, "deep": {"maps": [qmap, (qmap, 3)]}, "name": "x"}))
    assert unit.states["absmax1"].device.type == "meta"
    assert unit.states["deep"]["maps"][0].device.type == "meta"
    assert unit.states["deep"]["maps"][1][0].device.type == "meta"
    assert unit.states["deep"]["maps"][1][1] == 3
    assert unit.states["name"] == "x"


class Projector:
    """As GaLore's."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix, self.rank, self.both = matrix, 2, [matrix, matrix]


def test_tensors_inside_a_state_object_are_on_the_device_of_the_parameter() -> None:
    unit = unit_on("meta", torch.optim.SGD)
    projector = Projector(torch.ones(3))
    _write_partition(unit, OnlyExtras({"projector": projector, "kind": Projector}))
    assert unit.states["projector"] is projector
    assert projector.matrix.device.type == projector.both[1].device.type == "meta"
    assert projector.rank == 2
    assert unit.states["kind"] is Projector


def test_a_rollback_keeps_the_devices_that_the_optimizer_chose() -> None:
    """The optimizer has stepped: its own tensor says where it keeps this state."""
    unit = unit_on("meta", torch.optim.NAdam)
    unit.states["mu_product"] = torch.ones(())  # NAdam keeps it on the host unless it is capturable
    _write_partition(unit, Saved({"mu_product": torch.full((), 0.5)}))
    assert unit.states["mu_product"].device.type == "cpu"
    assert unit.states["mu_product"] == 0.5


class CountsInIntegers(torch.optim.SGD):
    """As DeepSpeed's CPUAdam, which is not built here."""


CountsInIntegers.__module__ = "deepspeed.ops.adam.cpu_adam"


def test_a_step_counter_has_the_type_that_the_optimizer_uses() -> None:
    """With offload switched on or off, DeepSpeed's Adam and torch's read each other's states."""
    unit = unit_on("meta", torch.optim.AdamW, fused=True)
    _write_partition(unit, Saved({"step": 3}))
    assert (unit.states["step"].device.type, unit.states["step"].dtype) == ("meta", torch.float32)
    unit = unit_on("cpu", CountsInIntegers)
    _write_partition(unit, Saved({"step": torch.tensor(3.0)}))
    assert unit.states["step"] == 3
    assert type(unit.states["step"]) is int


# -- settings of parameter groups -------------------------------------------------------------------------------------


def engine_of(optimizer: torch.optim.Optimizer) -> Any:
    counters = dict(global_steps=0, global_samples=0, micro_steps=0, skipped_steps=0)
    return SimpleNamespace(
        **counters,
        optimizer=optimizer,
        lr_scheduler=None,
        random_ltd_enabled=lambda: False,
        zero_use_cpu_optimizer=lambda: False,
        device=torch.device("meta"),
    )


@pytest.fixture(params=["listed", "emptied"])
def group_with_tensors(request: Any) -> Iterator[torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(SHAPE, device="meta"))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    group = optimizer.param_groups[0]
    group["lr"] = torch.tensor(1e-3, device="meta")
    group["betas"] = (torch.tensor(0.9, device="meta"), 0.99)
    group["fused"] = True
    if request.param == "emptied":
        group["params"] = []
    yield optimizer


def test_tensors_in_parameter_groups_stay_the_same_objects(group_with_tensors: torch.optim.Optimizer) -> None:
    engine = engine_of(group_with_tensors)
    group = group_with_tensors.param_groups[0]
    rate, beta = group["lr"], group["betas"][0]
    saved = read_client_state(engine)
    saved["groups"] = [
        {**saved["groups"][0], "lr": torch.tensor(5e-4), "betas": (torch.tensor(0.8), 0.95), "sum": torch.ones(2)}
    ]
    write_client_state(engine, saved)
    assert group["lr"] is rate
    assert group["betas"][0] is beta
    assert group["betas"][1] == 0.95
    assert group["sum"].device.type == "meta"


def test_the_optimizer_implementation_is_not_read_from_a_checkpoint() -> None:
    """A run that was written with fused=False must not move a fused one's counters to the wrong device."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(SHAPE))], lr=1e-3, foreach=False)
    engine = engine_of(optimizer)
    saved = read_client_state(engine)
    saved["groups"] = [{**saved["groups"][0], "lr": 5e-4, "fused": True, "foreach": True, "capturable": True}]
    write_client_state(engine, saved)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"], group["capturable"]) == (5e-4, None, False, False)
