"""Tensor parallelism of model families: the numbers of one process, at ZeRO 0 and 3.

Stochastic gradient descent: the gradient of a key's bias is nothing but rounding, which Adam would make as large as
any other.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens
from tests.support.oracle import Trajectory, token_loss, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.support.tensor_models import FAMILIES, MIXER_CUT, UNSHIFTED, Mixer

make_data = partial(RaggedTokens, 37)
RATE, CLIP = 0.2, 0.5
ARGUMENTS: dict[str, Any] = dict(
    optim="sgd",
    learning_rate=RATE,
    weight_decay=0.0,
    max_grad_norm=CLIP,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_steps=3,
)


def unshifted(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a model that does not shift labels."""
    labels = batch["labels"]
    logits = model(**batch)["logits"].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()


def plainly(model: Any, loss: Any = token_loss) -> Trajectory:
    return train_plainly(
        model, make_data(), loss=loss, optimizer="sgd", learning_rate=RATE, weight_decay=0.0, clip=CLIP, steps=3
    )


@cache
def reference(family: str) -> Trajectory:
    return plainly(FAMILIES[family](), unshifted if family in UNSHIFTED else token_loss)


STAGE_3 = ("tied llama with 3 heads", "llama with 1 key-value head", "qwen3", "opt with 3 heads", "t5")


@pytest.mark.cases(3)
@pytest.mark.parametrize(("family", "stage"), [*((name, 0) for name in FAMILIES), *((name, 3) for name in STAGE_3)])
def test_trajectory_is_that_of_one_process(family: str, stage: int, tmp_path: Any) -> None:
    job = partial(
        train_and_report,
        FAMILIES[family],
        make_data,
        str(tmp_path),
        zero_stage=stage,
        tensor_parallel_size=2,
        **ARGUMENTS,
    )
    for found in pool(2).run(job):
        assert_equal(found, reference(family))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_module_is_partitioned_as_configured(stage: int, tmp_path: Any) -> None:
    job = partial(
        train_and_report,
        Mixer,
        make_data,
        str(tmp_path),
        zero_stage=stage,
        tensor_parallel_size=2,
        deepspeed=MIXER_CUT,
        **ARGUMENTS,
    )
    for found in pool(2).run(job):
        assert_equal(found, plainly(Mixer()))


def with_lora() -> Any:
    """Adapters around column- and row-parallel layers, whose second factors are not zero."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = peft.get_peft_model(FAMILIES["qwen2"](), adapters)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_lora_is_partitioned_with_its_layer(stage: int, tmp_path: Any) -> None:
    job = partial(
        train_and_report, with_lora, make_data, str(tmp_path), zero_stage=stage, tensor_parallel_size=2, **ARGUMENTS
    )
    wanted = plainly(with_lora())
    start = dict(with_lora().named_parameters())
    assert all(not torch.equal(wanted.weights[name], start[name]) for name in start if "lora_" in name)
    for found in pool(2).run(job):
        assert_equal(found, wanted)
