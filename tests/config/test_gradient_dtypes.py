"""The dtypes in which gradients are summed follow from the number of terms; arguments and the file win."""

from __future__ import annotations

from typing import Any

import pytest

from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled

COMMUNICATE, ACCUMULATE = "communication_data_type", "data_types.grad_accum_dtype"
SAFE_MODULES = "torch_autocast.lower_precision_safe_modules"
FP16 = {"fp16": True, "device": "cuda", "zero_stage": 2}


@pytest.mark.parametrize(
    ("arguments", "few", "many"), [({"bf16": True}, 63, 64), (FP16, 511, 512)], ids=["bf16", "fp16"]
)
def test_many_terms_are_summed_in_float32(arguments: dict[str, Any], few: int, many: int) -> None:
    name = "bf16" if "bf16" in arguments else "fp16"
    below = compiled(few, gradient_accumulation_steps=few, **arguments)
    assert COMMUNICATE not in below
    assert ACCUMULATE not in below
    above = compiled(many, gradient_accumulation_steps=many, **arguments)
    assert above.get(COMMUNICATE) == above.get(ACCUMULATE) == "fp32"
    assert str(above.origin(COMMUNICATE)).startswith(f"derived: {name} with {many} ranks")
    assert str(above.origin(ACCUMULATE)).startswith(f"derived: {name} with {many} micro-batches")


def test_tensor_parallel_ranks_are_no_terms_but_sequence_ranks_are() -> None:
    assert COMMUNICATE not in compiled(256, bf16=True, tensor_parallel_size=8)
    sliced = compiled(1024, bf16=True, tensor_parallel_size=8, context_parallel_size=2)
    assert "bf16 with 128 ranks" in str(sliced.origin(COMMUNICATE))


def test_float32_needs_nothing() -> None:
    config = compiled(4096, gradient_accumulation_steps=4096)
    assert COMMUNICATE not in config
    assert ACCUMULATE not in config


@pytest.mark.parametrize("stage", range(4))
def test_arguments_decide_the_gradient_dtype(stage: int) -> None:
    requested = {"communication_data_type": "bf16", "grad_accum_dtype": "bf16"}
    config = compiled(1024, bf16=True, zero_stage=stage, gradient_accumulation_steps=512, **requested)
    assert config.get(COMMUNICATE) == config.get(ACCUMULATE) == "bf16"
    assert config.origin(COMMUNICATE).kind == config.origin(ACCUMULATE).kind == "argument"
    few = compiled(bf16=True, zero_stage=stage, communication_data_type="fp32", grad_accum_dtype="fp32")
    assert few.get(COMMUNICATE) == few.get(ACCUMULATE) == "fp32"


def test_the_file_wins_over_what_is_derived_and_contradicts_an_argument() -> None:
    own = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    config = compiled(1024, bf16=True, gradient_accumulation_steps=512, deepspeed=own)
    assert config.get(COMMUNICATE) == config.get(ACCUMULATE) == "bf16"
    assert config.origin(COMMUNICATE).kind == "user"
    with pytest.raises(ConfigError, match="communication_data_type") as error:
        compiled(bf16=True, deepspeed=own, communication_data_type="fp32", grad_accum_dtype="fp32")
    assert "grad_accum_dtype=fp32 (argument)" in str(error.value)


def test_autocast_uses_float32_from_as_many_ranks() -> None:
    """With autocast DeepSpeed looks at nothing but the classes of modules."""
    assert SAFE_MODULES not in compiled(63, torch_autocast="bf16")
    many = compiled(64, torch_autocast="bf16")
    assert many.get(SAFE_MODULES) == []
    assert "autocast with 64 ranks" in str(many.origin(SAFE_MODULES))
    assert SAFE_MODULES not in compiled(64, torch_autocast="bf16", communication_data_type="bf16")
    assert compiled(2, torch_autocast="bf16", communication_data_type="fp32").get(SAFE_MODULES) == []


def test_autocast_of_a_file_without_a_type_is_bf16() -> None:
    """torch's own default on GPUs is fp16, and DeepSpeed would not scale the loss."""
    config = compiled(device="cuda", deepspeed={"torch_autocast": {"enabled": True}})
    assert config.get("torch_autocast.dtype") == "torch.bfloat16"


@pytest.mark.parametrize(
    "arguments",
    [
        {"zero_stage": 1, "max_grad_norm": 0.0, "deepspeed": {"zero_optimization": {"compute_grad_norm": False}}},
        {"zero_stage": 0, "optim": "lamb", "device": "cuda"},
        {"zero_stage": 1, "optim": "muon", "tensor_parallel_size": 2, "world": 2},
        {
            "zero_stage": 1,
            "deepspeed": {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            },
        },
    ],
)
def test_unsupported_dtypes_are_not_derived(arguments: dict[str, Any]) -> None:
    assert ACCUMULATE not in compiled(bf16=True, gradient_accumulation_steps=512, **arguments)


def test_quantized_gradients_are_not_changed() -> None:
    own = {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}
    assert COMMUNICATE not in compiled(1024, fp16=True, zero_stage=3, device="cuda", deepspeed=own)
