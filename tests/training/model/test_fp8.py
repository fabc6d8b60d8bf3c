"""``fp8``: which layers are converted, what is refused, and that training stays within a band around bfloat16.

The tests that convert a model run where torchao is installed, with its emulation of 8-bit products on the CPU.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model import fp8
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import relative
from tests.support.expert_models import maker
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
ARGUMENTS: dict[str, Any] = {"bf16": True, "learning_rate": 1e-2, "per_device_train_batch_size": 4}


def llama() -> nn.Module:
    """Its products have sizes of 32 and 64, except those of a layer with 40."""
    model: Any = tiny_llama()
    model.model.layers[0].mlp.gate_proj = nn.Linear(32, 40, bias=False)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 40, bias=False)
    model.model.layers[0].mlp.down_proj = nn.Linear(40, 32, bias=False)
    return model


def test_the_head_and_layers_of_other_sizes_are_left_out() -> None:
    names = set(fp8._chosen(llama()))
    assert "lm_head" not in names and "model.layers.0.mlp.up_proj" not in names
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"} <= names


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}


def test_it_is_refused_in_words(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, fp8=True)
    with pytest.raises(ConfigError) as refusal:
        Trainer(Odd(), args, train_dataset=[{"x": torch.zeros(10), "labels": torch.zeros(())}])
    text = str(refusal.value)
    for part in ("NVIDIA GPU with 8-bit products", "training in fp32", "no linear layer of Odd besides its head"):
        assert part in text
    installed = importlib.util.find_spec("torchao") is not None
    assert ("pip install torchao" in text) is not installed


def test_tensor_parallelism_is_refused() -> None:
    args = TrainingArguments("out", use_cpu=True, bf16=True)
    trainer = Trainer(tiny_llama(), args)
    args.fp8 = True
    assert any(
        "tensor_parallel_size=2" in text
        for text in fp8.fp8_problems(trainer.model, args, trainer._ds_trainer.compiled, 2)
    )


def test_a_difference_outside_the_band_is_refused() -> None:
    fp8.check_band(3.0, 3.01)
    with pytest.raises(ConfigError, match=r"differs from that in bfloat16 by a relative 0\.05"):
        fp8.check_band(3.15, 3.0)
    for broken in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="by a relative inf"):
            fp8.check_band(broken, 3.0)
    fp8.check_band(float("nan"), float("nan"))  # what is wrong is not the number format


def emulated(*arguments: Any, scale: float = 1.0, **keywords: Any) -> Any:
    """:func:`train_and_report` with emulated products; wrong by a factor of ``scale`` if asked."""
    from torchao.float8.float8_linear import Float8Linear

    forward, problem, config = Float8Linear.forward, fp8._device_problem, fp8._config
    calls = []

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return scale * forward(self, x)

    def emulates(kind: Any) -> Any:
        found = config(kind)
        object.__setattr__(found, "emulate", True)
        return found

    Float8Linear.forward, fp8._device_problem, fp8._config = counted, lambda *_: None, emulates
    try:
        report = train_and_report(*arguments, **keywords)
    finally:
        Float8Linear.forward, fp8._device_problem, fp8._config = forward, problem, config
    assert calls
    return report


@needs_torchao
@pytest.mark.parametrize("stage", [1, 3])
def test_losses_stay_in_a_band_around_bfloat16(stage: int, tmp_path: Path) -> None:
    job = [tiny_llama, partial(RaggedTokens, 37), str(tmp_path)]
    (wanted,) = pool(1).run(partial(train_and_report, *job, **ARGUMENTS))
    more = {**ARGUMENTS, "per_device_train_batch_size": 2, "zero_stage": stage, "fp8": True}
    for found in pool(2).run(partial(emulated, *job, **more)):
        assert 0 < relative(found.losses, wanted.losses) < fp8.BAND
        assert relative(found.grad_norms, wanted.grad_norms) < 0.1
        assert found.weights.keys() == wanted.weights.keys()


@needs_torchao
@pytest.mark.parametrize("stage", [1, 3])
def test_divided_experts_give_the_losses_of_whole_ones(stage: int, tmp_path: Path) -> None:
    """Attention in 8 bits, experts in bfloat16: their products are summed in another order."""
    job = [maker("qwen3_moe"), partial(RaggedTokens, 37), str(tmp_path)]
    more = {**ARGUMENTS, "zero_stage": stage, "fp8": True, "learning_rate": 1e-3, "max_steps": 3, "self_test": "never"}
    divided, whole = (pool(2).run(partial(emulated, *job, **more, expert_parallel_size=size))[0] for size in (2, 1))
    assert relative(divided.losses, whole.losses) < 2e-3
    assert relative(divided.grad_norms, whole.grad_norms) < 0.02


@needs_torchao
def test_packed_samples_stay_apart(tmp_path: Path) -> None:
    """Each token has a scale of its own: the comparison of packed samples with samples alone passes."""
    job = [tiny_llama, partial(RaggedTokens, 37), str(tmp_path)]
    more = {**ARGUMENTS, "fp8": True, "packing": True, "max_length": 64, "max_steps": 2}
    pool(1).run(partial(emulated, *job, **more))


@needs_torchao
def test_wrong_products_are_refused_before_the_first_step(tmp_path: Path) -> None:
    job = [certain, partial(RaggedTokens, 37), str(tmp_path)]
    with pytest.raises(RankFailure, match="differs from that in bfloat16"):
        pool(1).run(partial(emulated, *job, scale=2.0, **ARGUMENTS, fp8=True))


def certain() -> nn.Module:
    """A model whose loss depends on what its layers compute."""
    model: Any = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return model
