"""What follows from arguments, layout and model, value by value; and what is refused instead."""

from __future__ import annotations

from typing import Any

import pytest

from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled

_SLICES = {"tensor_parallel_size": 2}
_GPU = {"device": "cuda"}


@pytest.mark.parametrize(
    ("world", "arguments", "stage"),
    [
        (1, {}, 0),
        (2, {}, 1),
        (2, _SLICES, 0),
        (2, {**_SLICES, "bf16": True}, 1),  # stage 0 would leave slices out of the gradient norm
        (2, {**_SLICES, **_GPU, "fp16": True}, 1),
        (1, {"bf16": True}, 0),
        (1, {**_GPU, "fp16": True}, 1),  # stage 0 would not scale the loss
        (1, {"offload_optimizer": "cpu"}, 1),
        (1, {"offload_optimizer": "nvme", "nvme_path": "/d"}, 3),
        (1, {"offload_param": "cpu"}, 3),
        (8, {"offload_param": "cpu", "offload_optimizer": "cpu"}, 3),
        (2, {"optim": "adafactor"}, 0),
    ],
)
def test_the_lowest_stage_that_works(world: int, arguments: dict[str, Any], stage: int) -> None:
    assert compiled(world, **arguments).get("zero_optimization.stage") == stage


@pytest.mark.parametrize(("hidden", "bucket"), [(8, 2**20), (1024, 2**20), (1025, 1_050_626), (4096, 4096**2)])
def test_buckets(hidden: int, bucket: int) -> None:
    zero = compiled(2, hidden=hidden).to_dict()["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (bucket, bucket)
    zero = compiled(2, hidden=hidden, zero_stage=3).to_dict()["zero_optimization"]
    assert zero["reduce_bucket_size"] == bucket and "allgather_bucket_size" not in zero
    assert zero["stage3_prefetch_bucket_size"] == bucket * 9 // 10
    assert zero["stage3_param_persistence_threshold"] == 10 * hidden
    assert "reduce_bucket_size" not in compiled(2, hidden=None).to_dict()["zero_optimization"]


@pytest.mark.parametrize(
    ("arguments", "pinned"),
    [(_GPU, True), ({**_GPU, "dataloader_pin_memory": False}, False), ({"use_cpu": True}, False)],
    ids=str,
)
def test_page_locked_memory(arguments: dict[str, Any], pinned: bool) -> None:
    config = compiled(zero_stage=2, offload_optimizer="cpu", **arguments)
    assert config.get("zero_optimization.offload_optimizer.pin_memory") is pinned


def test_keys_that_are_always_written() -> None:
    config = compiled(max_grad_norm=0.3, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    assert config.get("gradient_clipping") == 0.3
    assert config.get("train_micro_batch_size_per_gpu") == 3 and config.get("gradient_accumulation_steps") == 5
    assert config.get("timers.throughput.enabled") is False and config.get("wall_clock_breakdown") is False


def test_sources_of_derived_values() -> None:
    config = compiled(max_grad_norm=0.3, deepspeed={"prescale_gradients": False})
    assert [config.origin(path).kind for path in ("gradient_clipping", "gradient_accumulation_steps")] == [
        "argument",
        "default",
    ]
    assert config.origin("prescale_gradients").kind == "user"


def test_a_file_overrides_what_is_derived_and_no_argument() -> None:
    file = {"zero_optimization": {"reduce_bucket_size": 5_000_000}, "wall_clock_breakdown": True}
    config = compiled(2, deepspeed=file)
    assert config.get("zero_optimization.reduce_bucket_size") == 5_000_000
    assert config.get("wall_clock_breakdown") is True
    with pytest.raises(ConfigError, match=r"gradient_clipping=0\.5 .*max_grad_norm=2\.0"):
        compiled(deepspeed={"gradient_clipping": 0.5}, max_grad_norm=2.0)
    assert compiled(deepspeed={"gradient_clipping": "auto"}, max_grad_norm=2.0).get("gradient_clipping") == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deepspeed": {"train_batch_size": 7}}, "train_batch_size=7"),
        ({"nvme_path": "/d"}, "nothing is offloaded to NVMe"),
        ({"fp16": True}, "fp16 needs a GPU"),
        ({"parallelism_config": {"dp_shard_size": 3}, "world": 2}, "requests .* = 3 replicas"),
        ({"deepspeed": {"scheduler": {"type": "WarmupLR"}}, "lr_scheduler_type": "cosine"}, "lr_scheduler_type=cosine"),
        ({"deepspeed": {"optimizer": {"type": "AdamW"}}, "client_optimizer": "an object"}, "has an optimizer"),
        ({"deepspeed": {"optimizer": {"type": "AdamW", "params": {"betaas": 1}}}}, "has no parameter 'betaas'"),
        ({"deepspeed": {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}}, "a list of 2 numbers"),
        ({"deepspeed": {"optimizer": {"type": "SGD"}}, "optim": "adamw_torch"}, "Keep one of them"),
    ],
    ids=str,
)
def test_one_contradiction_gives_one_problem(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(**arguments)


def test_agreeing_values_are_accepted() -> None:
    assert compiled(deepspeed={"train_batch_size": 8}).get("train_batch_size") is None
    compiled(2, parallelism_config={"dp_shard_size": 2})
    adam = compiled(deepspeed={"optimizer": {"type": "Adam"}}, optim="adamw_torch")
    assert adam.get("optimizer.type") == "Adam"


def test_warmup_is_at_least_one_step() -> None:
    """DeepSpeed divides by it."""
    file = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    for warmup, steps in ((0, 1), (3, 3), (0.1, 10)):
        config = compiled(deepspeed=file, warmup_steps=warmup, total_steps=100)
        assert config.get("scheduler.params.warmup_num_steps") == steps


def test_the_adam_implementation_is_chosen_by_device() -> None:
    assert compiled(**_GPU, zero_stage=2, offload_optimizer="cpu").get("optimizer.params.torch_adam") is False
    assert compiled(zero_stage=2, offload_optimizer="cpu").get("optimizer.params.torch_adam") is True
    assert compiled(optim="adamw_torch_fused").get("optimizer.params.fused") is True
    assert compiled(optim="adamw_torch").get("optimizer.params.fused") is None
