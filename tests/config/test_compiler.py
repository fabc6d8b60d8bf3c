"""The compiler: complete, deterministic, every value with its origin, accepted by DeepSpeed's own configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_trainer.config.compiled import CompiledConfig, Origin
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled


def leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}" if path else key)]
    return [path]


valid = st.fixed_dictionaries(
    {
        "zero_stage": st.sampled_from([None, 0, 1, 2, 3]),
        "precision": st.sampled_from(["fp32", "bf16", "fp16", "autocast"]),
        "optim": st.sampled_from(
            ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "lion_32bit", "muon"]
        ),
        "offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
        "offload_param": st.sampled_from(["none", "cpu", "nvme"]),
        "nvme_path": st.sampled_from([None, "/local"]),
        "tensor_parallel_size": st.sampled_from([1, 2, 8]),
        "sequence_parallel_size": st.sampled_from([1, 2]),
        "context_parallel_size": st.sampled_from([1, 4]),
        "max_grad_norm": st.sampled_from([0.0, 0.5, 1.0]),
        "per_device_train_batch_size": st.integers(1, 64),
        "gradient_accumulation_steps": st.integers(1, 64),
        "world": st.sampled_from([1, 2, 8, 64, 4096]),
        "hidden": st.sampled_from([None, 64, 4096, 16384]),
        "device": st.sampled_from(["cpu", "cuda"]),
    }
)


def arguments_of(choice: dict[str, Any]) -> dict[str, Any]:
    chosen = dict(choice)
    precision = chosen.pop("precision")
    return {
        **chosen,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "torch_autocast": "bf16" if precision == "autocast" else "none",
    }


@given(valid)
def test_every_value_has_a_source_and_nothing_is_auto(choice: dict[str, Any]) -> None:
    try:
        config = compiled(**arguments_of(choice))
    except ConfigError as error:
        assert error.problems  # a refusal in words
        return
    values = config.to_dict()
    assert sorted(leaves(values)) == sorted(config.paths())
    assert all(str(config.origin(path)) for path in config.paths())
    assert '"auto"' not in config.to_json()
    assert json.loads(config.to_json()) == values
    assert compiled(**arguments_of(choice)) == config


@given(valid)
def test_compiling_the_output_again_changes_nothing(choice: dict[str, Any]) -> None:
    arguments = arguments_of(choice)
    try:
        once = compiled(**arguments)
    except ConfigError:
        return
    recompiled = compiled(**{**arguments, "deepspeed": once.to_dict()})
    assert recompiled.to_dict() == once.to_dict()
    as_file = compiled(**{**arguments, "deepspeed": once.to_json()})
    assert as_file.to_dict() == once.to_dict()


def read_in_a_world(config: CompiledConfig, world: int) -> Any:
    """What DeepSpeed makes of ``config`` in a world of so many ranks, of which none exists."""
    from deepspeed.runtime import config as runtime

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.dist, "get_rank", lambda: 0)
        patch.setattr(runtime.dist, "get_world_size", lambda: world)
        return runtime.DeepSpeedConfig(config.to_dict())


DS_CONFIGS = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


@given(valid, st.sampled_from(DS_CONFIGS))
@example(
    {"world": 4, "precision": "none"}, DS_CONFIGS[[file.name for file in DS_CONFIGS].index("tensor_parallel.json")]
)
def test_compiling_with_a_file(choice: dict[str, Any], file: Path) -> None:
    """Any arguments with any of our files: refused in words, or read by DeepSpeed and compiled again to the same."""
    arguments = {**arguments_of(choice), "deepspeed": str(file), "total_steps": 10}
    try:
        config = compiled(**arguments)
    except ConfigError as error:
        assert all(problem.endswith(".") for problem in error.problems)
        return
    read_in_a_world(config, choice["world"])
    assert '"auto"' not in config.to_json()
    assert compiled(**{**arguments, "deepspeed": config.to_json()}).to_dict() == config.to_dict()


def test_any_number_of_ranks_without_a_process_group() -> None:
    """The same JSON for every world, except what depends on it: here, whether there is anything to shard."""
    import torch.distributed as dist

    assert not dist.is_initialized()
    alone = compiled(1, per_device_train_batch_size=3)
    for world in (*range(2, 130), 256, 512, 1000, 1024, 2048, 4095, 4096):
        config = compiled(world, per_device_train_batch_size=3)
        assert config.get("zero_optimization.stage") == 1
        assert config.get("train_micro_batch_size_per_gpu") == 3
        different = {path for path in config.paths() if config.get(path) != alone.get(path)}
        assert {path.split(".")[0] for path in different} == {"zero_optimization"}
        if world <= 16:
            assert read_in_a_world(config, world).train_batch_size == 3 * world
    assert not dist.is_initialized()


@given(valid)
def test_deepspeed_accepts_the_compiled_configuration(choice: dict[str, Any]) -> None:
    """DeepSpeed's own parser and its pydantic models read it, fp16 included, which no CPU could run."""
    arguments = arguments_of(choice)
    try:
        config = compiled(**arguments)
    except ConfigError:
        return
    read = read_in_a_world(config, choice["world"])
    assert read.world_size == choice["world"]
    assert read.zero_optimization_stage == config.get("zero_optimization.stage")
    assert read.gradient_clipping == arguments["max_grad_norm"]
    assert read.train_micro_batch_size_per_gpu == arguments["per_device_train_batch_size"]
    assert read.gradient_accumulation_steps == arguments["gradient_accumulation_steps"]
    assert read.float16_config.enabled == arguments["fp16"]
    assert read.bfloat16_config.enabled == arguments["bf16"]
    assert read.torch_autocast_enabled == (arguments["torch_autocast"] == "bf16")
    if choice["hidden"] is not None and read.zero_optimization_stage > 0:
        assert read.zero_config.reduce_bucket_size == config.get("zero_optimization.reduce_bucket_size")


def test_fp16_on_a_gpu_has_a_dynamic_loss_scale() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = compiled(device="cuda", fp16=True, zero_stage=2)
    read = DeepSpeedConfig(config.to_dict()).float16_config
    assert read.enabled and read.loss_scale == 0 and read.initial_scale_power == 16


def test_fp16_on_a_cpu_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"fp16=True \(argument\): fp16 needs a GPU.*bf16=True"):
        compiled(fp16=True)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_to_fp16_is_rejected_with_the_remedy(stage: int, device: str) -> None:
    with pytest.raises(ConfigError, match=r"torch_autocast=fp16 \(argument\).*torch_autocast=bf16, or fp16=True"):
        compiled(torch_autocast="fp16", zero_stage=stage, device=device)
    for spelled in ("float16", "torch.float16", "fp16"):
        own = {"torch_autocast": {"enabled": True, "dtype": spelled}}
        with pytest.raises(ConfigError, match=r"torch_autocast\.dtype=.*loss scale"):
            compiled(deepspeed=own, zero_stage=stage, device=device)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad"])
def test_fused_is_written_only_if_true(optim: str) -> None:
    """torch takes fused=False for "no foreach either", and steps one parameter after the other."""
    for device in ("cpu", "cuda"):
        config = compiled(optim=optim, device=device)
        assert config.get("optimizer.params.fused") is (True if optim == "adamw_torch_fused" else None)
    requested = compiled(optim="adamw_torch", optim_args="fused=False")
    assert requested.get("optimizer.params.fused") is False
    each = compiled(optim_args="foreach=True")
    assert each.get("optimizer.params.fused") is None


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        compiled(world=1, optim="sgd", optim_args="betas=1,momentun=0.9", deepspeed={"gradient_clipping": 3})
    assert len(error.value.problems) == 3
    assert "'momentun' is not an argument of SGD (optim=sgd). Did you mean 'momentum'?" in str(error.value)


@pytest.mark.parametrize(
    ("world", "arguments", "stage"),
    [
        (1, {}, 0),
        (2, {}, 1),
        (4096, {}, 1),
        (2, {"tensor_parallel_size": 2}, 0),
        (2, {"sequence_parallel_size": 2}, 1),
        (2, {"zero_stage": 0}, 0),
        (4, {"zero_stage": 3}, 3),
        (1, {"offload_optimizer": "cpu"}, 1),
        (1, {"offload_param": "cpu"}, 3),
        (1, {"offload_optimizer": "nvme", "nvme_path": "/d"}, 3),
        (1, {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}}, 3),
    ],
)
def test_stage_follows_the_arguments_then_the_layout(world: int, arguments: dict[str, Any], stage: int) -> None:
    assert compiled(world, **arguments).get("zero_optimization.stage") == stage


def test_clipping_is_always_written_because_the_default_of_deepspeed_is_one() -> None:
    assert compiled(max_grad_norm=0.0).to_dict()["gradient_clipping"] == 0.0


def test_bucket_sizes_come_from_the_hidden_size() -> None:
    config = compiled(zero_stage=3, hidden=4096)
    assert config.get("zero_optimization.reduce_bucket_size") == 4096**2
    assert config.get("zero_optimization.stage3_prefetch_bucket_size") == 4096**2 * 9 // 10
    assert config.get("zero_optimization.stage3_param_persistence_threshold") == 40960
    assert config.origin("zero_optimization.reduce_bucket_size").kind == "derived"
    assert "test.hidden_size=4096" in str(config.origin("zero_optimization.reduce_bucket_size"))
    assert compiled(zero_stage=3, hidden=None).get("zero_optimization.reduce_bucket_size") is None
    assert compiled(zero_stage=1, hidden=1025).get("zero_optimization.allgather_bucket_size") == 1025**2 + 1


def test_nvme_path() -> None:
    config = compiled(offload_param="nvme", nvme_path="/d", device="cuda")
    assert config.get("zero_optimization.offload_param.nvme_path") == "/d"
    assert config.get("zero_optimization.offload_optimizer.nvme_path") is None
    with pytest.raises(ConfigError, match=r"nvme_path=/d \(argument\), but nothing is offloaded to NVMe"):
        compiled(offload_param="cpu", nvme_path="/d", device="cuda")


def test_offload_uses_deepspeeds_adam_on_gpus_only() -> None:
    assert compiled(offload_optimizer="cpu", device="cuda").get("optimizer.params.torch_adam") is False
    on_cpu = compiled(offload_optimizer="cpu", device="cpu")
    assert on_cpu.get("optimizer.params.torch_adam") is True
    assert on_cpu.get("zero_force_ds_cpu_optimizer") is False


def test_an_optimizer_of_the_user_leaves_no_optimizer_block() -> None:
    config = compiled(client_optimizer="handed in")
    assert config.get("optimizer") is None
    assert str(config.origin("zero_allow_untested_optimizer")) == "derived: handed in"


def test_explain_prints_value_and_source() -> None:
    lines = compiled(learning_rate=1e-3).explain().splitlines()
    row = next(line for line in lines if line.startswith("optimizer.params.lr "))
    assert row.split() == ["optimizer.params.lr", "0.001", "argument:", "learning_rate=0.001"]


def test_a_path_is_set_once() -> None:
    config = CompiledConfig()
    config.set("a.b", 1, Origin("default", "x"))
    with pytest.raises(ValueError, match=r"a\.b is set already"):
        config.set("a.b", 2, Origin("default", "y"))


def test_compiling_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from ds_trainer import *;"
        "compile_config(TrainingArguments('o'), ParallelLayout(4096), ModelShape(64));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed')))"
    ).replace("import *", "import TrainingArguments, ParallelLayout, ModelShape, compile_config")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
