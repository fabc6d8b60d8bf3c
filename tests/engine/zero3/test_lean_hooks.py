"""Shortened hooks of ZeRO-3 gather and free the same weights as DeepSpeed's own, after each module of each pass."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as library
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_trainer import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine.evaluation_engine import EvaluationEngine
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import gathered
from ds_trainer.engine.zero3.coalesced_collectives import leave_to_deepspeed
from ds_trainer.engine.zero3.parts import lean_hooks
from ds_trainer.engine.zero3.registered_hooks import zero3_hooks
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from tests.support.pool import pool

WIDTH = 6
PASSES = 6  # in the first two DeepSpeed records the order of modules


class Scale(nn.Module):
    """Its weight is read by another module, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """A leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Model(nn.Module):
    """A layer used twice, a recomputed block, a leaf module, a weight used outside of its module, a dictionary."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.way, self.passes = way, 0
        self.first, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.sometimes, self.norm, self.scale = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Scale()
        self.experts = Experts()
        if way == "frozen":
            for parameter in (*self.block.parameters(), self.twice.weight):
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.passes += 1
        hidden = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        hidden = hidden + checkpoint(self.block, hidden, use_reentrant=self.way != "not reentrant")
        if self.way == "other modules" and self.passes % 3 == 0:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.experts(self.scale(self.norm(hidden)))
        return {"loss": (hidden + self.scale.weight).float().square().sum()}


class Watch:
    """The state of all parameters after each fetch and release of a coordinator."""

    def __init__(self, engine: Any) -> None:
        self.found: list[Any] = []
        self._root: Any = engine.module
        self._places: dict[Any, int] = {parameter: i for i, parameter in enumerate(engine.module.parameters())}
        self._coordinator = zero3_hooks(engine).get_param_coordinator()
        for name in ("fetch_sub_module", "release_sub_module"):
            setattr(self._coordinator, name, partial(self._call, name, getattr(self._coordinator, name)))

    def _call(self, name: str, function: Any, module: Any, forward: bool = False) -> None:
        function(module, forward)
        state: Any = {key.rpartition("__")[2]: value for key, value in vars(self._coordinator).items()}
        root: Any = self._root.ds_id  # DeepSpeed counts modules of all engines
        self.found.append(
            (
                *(name, module.ds_id - root, forward, state["step_id"], state["n_available_params"]),
                [self._places[entry.param] for entry in state["param_queue"] or ()],
                [number - root for number in state["active_backward_submodules"]],
                [
                    (p.ds_status.name, tuple(p.data.shape), sorted(number - root for number in p.ds_active_sub_modules))
                    for p in self._places
                ],
            )
        )


SETTINGS: dict[str, dict[str, Any]] = {
    "no prefetch": {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0},
    "short prefetch": {"stage3_prefetch_bucket_size": 40, "stage3_param_persistence_threshold": 8},
    "long reuse": {"stage3_prefetch_bucket_size": 90, "stage3_max_reuse_distance": 10_000},
    "few live": {"stage3_prefetch_bucket_size": 200, "stage3_max_live_parameters": 100, "stage3_max_reuse_distance": 0},
    "hpZ": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0},
}
WAYS = ["", "frozen", "not reentrant", "other modules"]


def is_lean(engine: Any) -> bool:
    return type(zero3_hooks(engine).get_param_coordinator()) is not library.PartitionedParameterCoordinator


def compiled_config(**zero: Any) -> Any:
    args = TrainingArguments(
        "unused",
        use_cpu=True,
        zero_stage=3,
        bf16=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        deepspeed={"zero_allow_untested_optimizer": True, "zero_optimization": zero},
    )
    layout = ParallelLayout(distributed.world_size())
    return compile_config(args, layout, device="cpu", client_optimizer="a test"), layout


def trained(deepspeeds: bool, way: str, zero: dict[str, Any]) -> tuple[list[Any], list[torch.Tensor], bool]:
    """All states, all losses and the last weights, and whether hooks were shortened."""
    config, layout = compiled_config(**zero)
    leave_to_deepspeed(deepspeeds)
    try:
        model = Model(way)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = TrainingEngine(model, torch.optim.AdamW(trainable, lr=0.1), config, layout)
        shortened = is_lean(engine.deepspeed)
        watch = Watch(engine.deepspeed)
        generator = torch.Generator().manual_seed(distributed.rank())
        values = []
        for number in range(PASSES):
            inputs = torch.randn(2, WIDTH, generator=generator).bfloat16().requires_grad_()
            engine.begin_micro_batch(last=number % 2 == 1)
            loss = engine.deepspeed(inputs)["loss"]
            engine.backward(loss)
            values.append(loss.detach())
            if number % 2:
                engine.step()
            if number == 3:  # an evaluation between
                with torch.no_grad():
                    values.append(engine.deepspeed(inputs)["loss"])
        with gathered(list(model.parameters())):
            values += [parameter.detach().clone() for parameter in model.parameters()]
        engine.close()
        return watch.found, values, shortened
    finally:
        leave_to_deepspeed(False)


def compared(way: str, settings: str) -> tuple[bool, ...]:
    theirs, expected, unused = trained(True, way, SETTINGS[settings])
    states, found, used = trained(False, way, SETTINGS[settings])
    return used and not unused, states == theirs, all(map(torch.equal, found, expected)), len(states) > 100


CASES = [(way, "short prefetch") for way in WAYS] + [("frozen", settings) for settings in SETTINGS]


@pytest.mark.parametrize(("way", "settings"), list(dict.fromkeys(CASES)))
def test_the_same_weights_are_there_after_each_module(way: str, settings: str) -> None:
    for found in pool(2).run(partial(compared, way, settings)):
        assert found == (True, True, True, True)


def closed() -> list[str]:
    """What is left of the shortened hooks after a training and an evaluation engine are closed."""
    config, layout = compiled_config(**SETTINGS["short prefetch"])
    model = Model("")
    left = []
    for kind in ("evaluation", "training"):
        if kind == "training":
            engine: Any = TrainingEngine(model, torch.optim.AdamW(model.parameters()), config, layout)
        else:
            engine = EvaluationEngine(model, config, layout)
        offload = zero3_hooks(engine.deepspeed)
        functions = [vars(module)["pre_bwd_fn"] for module in model.modules() if "pre_bwd_fn" in vars(module)]
        for _ in range(4):
            loss = engine.deepspeed(torch.ones(2, WIDTH).bfloat16())["loss"]
            if kind == "training":
                engine.backward(loss)
        assert is_lean(engine.deepspeed)
        assert all("apply" in vars(function) for function in functions)
        engine.close()
        left += [name for name in vars(offload) if "sub_module" in name]
        left += ["class"] if is_lean(engine.deepspeed) else []
        left += ["apply" for function in functions if "apply" in vars(function)]
    return left


def test_a_closed_engine_has_deepspeeds_hooks_again() -> None:
    assert pool(2).run(closed) == [[], []]


def left_to_deepspeed() -> list[bool]:
    from deepspeed.utils.logging import logger

    config, layout = compiled_config(**SETTINGS["short prefetch"])
    model = Model("")
    engine = EvaluationEngine(model, config, layout)
    offload = zero3_hooks(engine.deepspeed)
    assert engine._zero3 is not None
    engine._zero3._parts.pop().close()  # of the engine
    found = []

    def asked(compiled: bool = False) -> None:
        hooks = lean_hooks(engine.deepspeed, compiled)
        found.append(hooks is None)
        if hooks is not None:
            hooks.close()

    asked()
    asked(compiled=True)
    patch = pytest.MonkeyPatch()
    patch.setattr(offload, "zenflow", True)
    asked()
    patch.undo()
    patch.setattr(offload, "offload_device", "nvme")
    asked()
    patch.undo()
    model.first._compiled_call_impl = lambda *args: None
    asked()
    model.first._compiled_call_impl = None
    level = logger.level
    logger.setLevel(logging.DEBUG)
    asked()
    logger.setLevel(level)
    asked()
    engine.close()
    return found


def test_compiled_models_and_the_like_are_left_to_deepspeed() -> None:
    assert pool(2).run(left_to_deepspeed) == [[False, True, True, True, True, True, False]] * 2
