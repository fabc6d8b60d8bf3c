"""``CompiledConfig``: typed access to the values, their origins, and the collector of problems."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import ActivationCheckpointing, Precision, Scheduler
from ds_trainer.config.compiler import compile_config
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils.errors import ConfigError, Problems
from tests.config.support import compiled

PACKAGE = Path(ds_trainer.__file__).parent


def test_sizes_and_clipping() -> None:
    config = compiled(4, per_device_train_batch_size=3, gradient_accumulation_steps=5, max_grad_norm=0.5)
    assert (config.micro_batch_size, config.gradient_accumulation_steps, config.gradient_clipping) == (3, 5, 0.5)
    assert (config.zero_stage, config.hpz_partition_size) == (1, 1)
    assert (
        compiled(2, zero_stage=3, deepspeed={"zero_optimization": {"zero_hpz_partition_size": 2}}).hpz_partition_size
        == 2
    )


PRECISIONS: list[tuple[dict[str, Any], Precision, str]] = [
    ({}, Precision("fp32", "fp32"), "fp32"),
    ({"bf16": True}, Precision("bf16", "fp32"), "bf16"),
    ({"fp16": True, "device": "cuda"}, Precision("fp16", "fp32"), "fp16"),
    ({"torch_autocast": "bf16"}, Precision("fp32", "fp32", "bf16"), "fp32, autocast bf16"),
    ({"deepspeed": {"torch_autocast": {"enabled": True}}}, Precision("fp32", "fp32", "bf16"), "fp32, autocast bf16"),
    (
        {
            "bf16": True,
            "zero_stage": 1,
            "deepspeed": {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        },
        Precision("bf16", "bf16"),
        "bf16",
    ),
]


@pytest.mark.parametrize(("arguments", "precision", "shown"), PRECISIONS, ids=lambda value: str(value)[:50])
def test_precision(arguments: dict[str, Any], precision: Precision, shown: str) -> None:
    found = compiled(**arguments).precision
    assert found == precision
    assert str(found) == shown
    assert found.compute == (precision.autocast or precision.dtype)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [({"bf16": True}, "bf16"), ({"bf16": True, "grad_accum_dtype": "fp32"}, "fp32"), ({}, "fp32")],
    ids=str,
)
def test_accumulation_dtype(arguments: dict[str, Any], dtype: str) -> None:
    assert compiled(**arguments).accumulation_dtype == dtype


def test_offload() -> None:
    config = compiled(zero_stage=3, offload_param="cpu")
    assert (config.offload("param"), config.offload("optimizer")) == ("cpu", None)
    with pytest.raises(ValueError, match="'optimiser' is neither 'optimizer' nor 'param'"):
        config.offload("optimiser")


def test_optimizer() -> None:
    config = compiled(learning_rate=0.5, optim="sgd")
    assert config.optimizer_type == "SGD" and config.optimizer_params["lr"] == 0.5
    config.optimizer_params["lr"] = 1  # a copy
    assert config.optimizer_params["lr"] == 0.5
    without = compiled(client_optimizer="optimizers=(SGD, ...)")
    assert (without.optimizer_type, without.optimizer_params) == (None, {})


def test_scheduler() -> None:
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    assert compiled(deepspeed={"scheduler": block}).scheduler == Scheduler(
        "WarmupLR", {"warmup_num_steps": 4}, "deepspeed.scheduler.type"
    )
    assert compiled().scheduler is None


def test_activation_checkpointing() -> None:
    config = compiled(
        activation_checkpointing=True,
        deepspeed={"activation_checkpointing": {"number_checkpoints": 4, "profile": True}},
    )
    assert config.activation_checkpointing == ActivationCheckpointing(
        "deepspeed.activation_checkpointing.number_checkpoints", number_checkpoints=4, profile=True
    )
    assert compiled().activation_checkpointing is None


def test_compiler_and_tensor_parallelism() -> None:
    config = compiled(device="cuda", deepspeed={"compile": {"deepcompile": True}})
    assert config.uses_deepspeed_compiler and not compiled().uses_deepspeed_compiler
    block = {"preset_model": "llama", "vocab_parallel_lm_head": True}
    config = compiled(2, tensor_parallel_size=2, deepspeed={"tensor_parallel": block})
    assert config.tensor_parallel_preset == "llama" and config.vocab_parallel_lm_head
    assert compiled().tensor_parallel_preset is None and not compiled().vocab_parallel_lm_head


def test_user_values_and_selected_values() -> None:
    config = compiled(zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": True}, "steps_per_print": 7})
    assert config.user_values() == {"zero_optimization.overlap_comm": True, "steps_per_print": 7}
    paths = ("zero_optimization.stage", "zero_optimization.overlap_comm", "steps_per_print", "zero_optimization.none")
    assert config.select(paths) == {"zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 7}


def test_only_the_config_package_reads_the_configuration_by_path() -> None:
    """A misspelled path would be None; a misspelled property is found by mypy."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.is_relative_to(PACKAGE / "config"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("get", "origin"):
                receiver = ast.unparse(called.value).split(".")[-1]
                if receiver in ("compiled", "_compiled"):
                    found.append(f"{path.relative_to(PACKAGE)}:{called.lineno}")
    assert found == []


WRONG = {"zero_optimization": {"stage": "two"}, "train_batch_size": 7}


def test_a_collector_gets_the_problems_of_the_compiler() -> None:
    args = TrainingArguments("out", deepspeed=WRONG)
    problems = Problems(["data.train: found before."])
    config = compile_config(args, ParallelLayout(1), problems=problems)
    first, stage, batch = problems
    assert first == "data.train: found before."
    assert "zero_optimization.stage" in stage and "train_batch_size=7" in batch
    assert config.micro_batch_size == 8  # what is right has been compiled
    with pytest.raises(ConfigError) as error:
        compile_config(args, ParallelLayout(1))
    assert error.value.problems == [stage, batch]


def test_a_collector_gets_broken_rules() -> None:
    problems = Problems()
    compile_config(TrainingArguments("out", fp16=True), ParallelLayout(1), problems=problems)
    (problem,) = problems
    assert "fp16 needs a GPU" in problem


def test_wrong_arguments_are_collected_and_not_compiled() -> None:
    args = TrainingArguments("out")
    args.seed = -1
    problems = Problems()
    config = compile_config(args, ParallelLayout(1), problems=problems)
    assert [problem.partition("=")[0] for problem in problems] == ["seed"]
    assert config.to_dict() == {}


def test_an_unreadable_file_and_a_wrong_layout_are_reported_together() -> None:
    shape = ModelShape.from_config({"model_type": "llama", "hidden_size": 6, "num_hidden_layers": 1,
                                    "num_attention_heads": 3, "vocab_size": 8, "intermediate_size": 8,
                                    "max_position_embeddings": 64})  # fmt: skip
    args = TrainingArguments("out", deepspeed="missing.json", sequence_parallel_size=2)
    problems = Problems()
    compile_config(args, ParallelLayout.of(args, 2), shape, problems=problems)
    assert len(problems) == 2
    assert any("missing.json" in problem for problem in problems)
    assert any("sequence_parallel_size=2 (argument)" in problem for problem in problems)
