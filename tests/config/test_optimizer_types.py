"""The table of optimizers against the classes that DeepSpeed or torch would make of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from ds_trainer.config.optimizer_block import BUILT_HERE, OF_NAME, TYPES, OptimizerType
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled

# Read by DeepSpeed itself and taken out before the class sees the rest.
OF_DEEPSPEED = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "muon_lr", "adam_lr"}


def parameters(*classes: Any) -> set[str]:
    return {name for cls in classes for name in inspect.signature(cls.__init__).parameters}


CHECKED = [kind for kind in TYPES.values() if kind.package is None and kind.name != "Muon"]


@pytest.mark.parametrize("kind", CHECKED, ids=lambda kind: kind.name)
def test_every_parameter_exists_in_the_optimizer_class(kind: OptimizerType) -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    own = {
        "Adam": [torch.optim.Adam, DeepSpeedCPUAdam, FusedAdam],
        "AdamW": [torch.optim.AdamW, DeepSpeedCPUAdam, FusedAdam],
        "Adagrad": [torch.optim.Adagrad, DeepSpeedCPUAdagrad],
        "Lamb": [FusedLamb],
        "Lion": [FusedLion, DeepSpeedCPULion],
    }
    known = parameters(*(own.get(kind.name) or [getattr(torch.optim, kind.name)])) | OF_DEEPSPEED
    assert {name for name, _ in kind.arguments} <= known
    assert kind.own <= known


def test_muon_accepts_the_parameters_that_deepspeed_passes() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    known = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS} | OF_DEEPSPEED | {"foreach"}
    kind = TYPES["muon"]
    assert {name for name, _ in kind.arguments} | kind.own <= known


def test_the_table_has_all_optimizers_of_deepspeed() -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    assert set(DEEPSPEED_OPTIMIZERS) <= set(TYPES)
    assert set(TYPES) - set(DEEPSPEED_OPTIMIZERS) <= {name.lower() for name in BUILT_HERE}
    assert set(OF_NAME.values()) <= {kind.name for kind in TYPES.values()}


@pytest.mark.parametrize("name", sorted(map(str, OF_NAME)))
def test_every_name_compiles_to_its_type(name: str) -> None:
    config = compiled(optim=name, device="cuda", learning_rate=0.25, weight_decay=0.5)
    assert config.get("optimizer.type") == OF_NAME[next(key for key in OF_NAME if str(key) == name)]
    assert (config.get("optimizer.params.lr"), config.get("optimizer.params.weight_decay")) == (0.25, 0.5)


@pytest.mark.parametrize("kind", sorted(BUILT_HERE))
def test_optimizers_built_here_can_be_built(kind: str) -> None:
    from ds_trainer.optim.optimizer_builder import build_optimizer, is_built_here

    config = compiled(deepspeed={"optimizer": {"type": kind}}, device="cpu", learning_rate=0.1)
    assert is_built_here(config)
    optimizer = build_optimizer(config, [{"params": [torch.nn.Parameter(torch.ones(2))]}])
    assert type(optimizer).__name__ == kind and optimizer.param_groups[0]["lr"] == 0.1


def test_parameters_of_deepspeeds_adam_choose_it() -> None:
    """A file that only DeepSpeed's Adam understands is not given to torch's, where DeepSpeed's can run."""
    for params in ({"bias_correction": False}, {"fp32_optimizer_states": True}):
        file = {"optimizer": {"type": "Adam", "params": params}}
        assert compiled(device="cuda", deepspeed=file).get("optimizer.params.torch_adam") is False
        with pytest.raises(ConfigError, match="parameters of DeepSpeed's Adam"):
            compiled(device="cpu", deepspeed=file)
    file = {"zero_force_ds_cpu_optimizer": True, "optimizer": {"type": "AdamW"}}
    config = compiled(device="cpu", zero_stage=2, offload_optimizer="cpu", deepspeed=file)
    assert config.get("optimizer.params.torch_adam") is False
    assert config.get("zero_force_ds_cpu_optimizer") is True
