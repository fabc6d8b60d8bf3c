"""Every rule: an example that breaks it, with one message, and a similar example that does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from ds_trainer.config.rules import RULES
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled, machine, said


@dataclass(frozen=True)
class Example:
    """What breaks a rule, and what is changed (added or replaced) so that it does not."""

    breaks: dict[str, Any]
    repair: dict[str, Any]
    message_parts: tuple[str, ...] = field(default=())


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def checkpointing(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": keys}


def adamw(**parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": parameters}}


def low_master_weights(dtype: str) -> dict[str, Any]:
    return {"deepspeed": {dtype: {"enabled": True, f"{dtype}_master_weights_and_grads": True}}}


_TP2: dict[str, Any] = {"world": 2, "tensor_parallel_size": 2}
_CPU, _QUANTISED = {"device": "cpu"}, {"zero_quantized_weights": True}
_SUPER = {"deepspeed": zero(offload_optimizer={**_CPU, "super_offload": True})}
_INT4, _HPZ = zero(zero_quantized_gradients=True), zero(zero_hpz_partition_size=2)
_NO_NORM = {"deepspeed": zero(compute_grad_norm=False)}
_CONTIGUOUS = {"partition_activations": True, "contiguous_memory_optimization": True}
_FP16 = {"fp16": True, "zero_stage": 3, "device": "cuda"}
_SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
_ZENFLOW: dict[str, Any] = {"zero_stage": 3, "offload_optimizer": "cpu", "device": "cuda"}
_ZENFLOW["deepspeed"] = zero(zenflow={"topk_ratio": 0.1})

EXAMPLES: dict[str, Example] = {
    **{
        f"optimizer-needs-{package}": Example(
            {"optim": optim, "device": "cuda", "environment": machine(package), "optim_target_modules": modules},
            {"environment": machine()},
            (f"optim={optim} (argument)", f"pip install {package}"),
        )
        for package, optim, modules in (
            ("transformers", "adafactor", None),
            ("bitsandbytes", "adamw_8bit", None),
            ("torchao", "adamw_torch_8bit", None),
            ("galore-torch", "galore_adamw", "all-linear"),
            ("apollo-torch", "apollo_adamw", "all-linear"),
            ("grokadamw", "grokadamw", None),
            ("schedulefree", "schedule_free_sgd", None),
            ("torch-optimi", "stable_adamw", None),
        )
    },
    "universal-checkpoints-are-recognized": Example(
        {"deepspeed": {"checkpoint": {"load_universal": True}}}, {"deepspeed": {}}, ("checkpoint.load_universal=",)
    ),
    "saving-is-the-trainers": Example(
        {"deepspeed": {"checkpoint": {"use_node_local_storage": True}}},
        {"deepspeed": {"checkpoint": {}}},
        ("checkpoint.use_node_local_storage=",),
    ),
    "library-optimizer-needs-gpu": Example(
        {"optim": "galore_adamw_8bit", "optim_target_modules": "all-linear"}, {"device": "cuda"}
    ),
    "optimizer-needs-whole-tensors": Example(
        {"optim": "adafactor", "zero_stage": 1},
        {"zero_stage": 0},
        ("optim=adafactor (argument) and zero_stage=1 (argument)", "Set zero_stage=0"),
    ),
    "optimizer-needs-whole-matrices": Example(
        {"optim": "adafactor", "zero_stage": 0, "tensor_parallel_size": 2, "world": 2}, {"tensor_parallel_size": 1}
    ),
    "schedule-free-needs-whole-weights": Example(
        {"optim": "schedule_free_adamw", "zero_stage": 2}, {"zero_stage": 0}, ("zero_stage=2",)
    ),
    "schedule-free-needs-float32": Example(
        {"optim": "schedule_free_adamw", "bf16": True}, {"bf16": False, "torch_autocast": "bf16"}
    ),
    "schedule-free-counts-warmup": Example(
        {"optim": "schedule_free_adamw", "warmup_steps": 0.1}, {"warmup_steps": 10}, ("warmup_steps=0.1 (argument)",)
    ),
    "low-rank-needs-modules": Example({"optim": "galore_adamw"}, {"optim_target_modules": ["q_proj"]}),
    "modules-need-low-rank": Example(
        {"optim_target_modules": "all-linear"},
        {"optim": "apollo_adamw"},
        ("optim_target_modules=all-linear (argument)", "optim=adamw_torch_fused (default)"),
    ),
    "lamb-needs-whole-tensors": Example({"optim": "lamb", "zero_stage": 1, "device": "cuda"}, {"zero_stage": 0}),
    "fp16-needs-gpu": Example({"fp16": True}, {"device": "cuda"}, ("fp16=True (argument)", "bf16=True")),
    "fp16-autocast": Example(
        {"torch_autocast": "fp16", "device": "cuda"}, {"torch_autocast": "bf16"}, ("torch_autocast=fp16 (argument)",)
    ),
    "autocast-on-float32": Example(
        {"bf16": True, "deepspeed": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
        {"bf16": False},
        ("torch_autocast.enabled=true", "bf16=True"),
    ),
    "master-weights-need-zero": Example(
        {"bf16": True, "zero_stage": 0, "deepspeed": {"bf16": _STATES}}, {"zero_stage": 1}, ("zero_stage=0 (argument)",)
    ),
    "fp16-master-weights-need-cpu-adam": Example({**_FP16, **low_master_weights("fp16")}, {"offload_optimizer": "cpu"}),
    "fp16-needs-zero": Example(
        {"fp16": True, "device": "cuda", "zero_stage": 0}, {"zero_stage": None}, ("zero_stage=0 (argument)",)
    ),
    "bf16-states-need-bf16-master-weights": Example(
        {"bf16": True, "zero_stage": 1, "deepspeed": {"bf16": {"enabled": True, "bf16_optimizer_states": True}}},
        {"deepspeed": {"bf16": _STATES}},
    ),
    "bf16-master-weights-offload-needs-cpu-adam": Example(
        {"bf16": True, "zero_stage": 2, **low_master_weights("bf16")}, {"deepspeed": {"bf16": _STATES}}
    ),
    "accumulation-dtype": Example(
        {"bf16": True, "grad_accum_dtype": "fp16"},
        {"grad_accum_dtype": "fp32"},
        ("grad_accum_dtype=fp16 (argument)", "bf16=True (argument)"),
    ),
    "lamb-accumulation": Example(
        {"optim": "lamb", "bf16": True, "zero_stage": 0, "device": "cuda", "grad_accum_dtype": "fp32"},
        {"grad_accum_dtype": "auto"},
        ("grad_accum_dtype=fp32 (argument)", "optim=lamb"),
    ),
    "bf16-stage-1-accumulation-needs-norm": Example(
        {"bf16": True, "zero_stage": 1, "max_grad_norm": 0.0, "grad_accum_dtype": "fp32", **_NO_NORM},
        {"zero_stage": 2},
        ("grad_accum_dtype=fp32 (argument)", "compute_grad_norm=false"),
    ),
    "quantized-gradients-need-fp16": Example(
        {**_FP16, "fp16": False, "bf16": True, "deepspeed": _INT4},
        {"bf16": False, "fp16": True},
        ("zero_quantized_gradients=true", "communication_data_type="),
    ),
    "half-at-stage-0-in-parts": Example(
        {"bf16": True, "zero_stage": 0, "tensor_parallel_size": 2, "world": 2, "optim": "lamb", "device": "cuda"},
        {"optim": "adamw_torch"},
        ("zero_stage=0 (argument)", "bf16=True (argument)"),
    ),
    "param-dtype-agrees": Example({"deepspeed": {"data_types": {"param_dtype": "bf16"}}}, {"bf16": True}),
    "offload-optimizer-needs-zero": Example(
        {"zero_stage": 0, "offload_optimizer": "cpu"}, {"zero_stage": 2}, ("offload_optimizer=cpu", "zero_stage=0")
    ),
    "offload-param-needs-stage-3": Example({"zero_stage": 2, "offload_param": "cpu"}, {"zero_stage": 3}),
    "nvme-optimizer-needs-stage-3": Example(
        {"zero_stage": 2, "offload_optimizer": "nvme", "nvme_path": "/nvme"}, {"zero_stage": 3}
    ),
    "nvme-needs-path": Example({"zero_stage": 3, "offload_param": "nvme"}, {"nvme_path": "/nvme"}),
    "nvme-path-writable": Example(
        {"offload_param": "nvme", "nvme_path": "/nvme", "environment": machine(writable=False)},
        {"environment": machine()},
        ("nvme_path=/nvme",),
    ),
    "nvme-needs-libaio": Example(
        {"offload_param": "nvme", "nvme_path": "/nvme", "environment": machine(libaio=False)},
        {"environment": machine()},
        ("libaio-dev",),
    ),
    "partial-offload-needs-stage-3": Example(
        {"zero_stage": 2, "device": "cuda", "deepspeed": zero(offload_optimizer={**_CPU, "ratio": 0.5})},
        {"zero_stage": 3},
    ),
    "partial-offload-needs-cpu-adam": Example(
        {"zero_stage": 3, "deepspeed": zero(offload_optimizer={**_CPU, "ratio": 0.5})}, {"device": "cuda"}
    ),
    "zeropp-needs-stage-3": Example(
        {"zero_stage": 2, "device": "cuda", "deepspeed": zero(**_QUANTISED)}, {"zero_stage": 3}
    ),
    "zeropp-quantization-needs-gpu": Example({"zero_stage": 3, "deepspeed": zero(**_QUANTISED)}, {"device": "cuda"}),
    "hpz-divides-ranks": Example(
        {"zero_stage": 3, "world": 6, "deepspeed": zero(zero_hpz_partition_size=4)}, {"world": 8}
    ),
    "hpz-without-nvme-parameters": Example(
        {"zero_stage": 3, "world": 2, "offload_param": "nvme", "nvme_path": "/nvme", "deepspeed": _HPZ},
        {"offload_param": "cpu", "nvme_path": None},
        ("zero_hpz_partition_size=2", "offload_param=nvme", "Set offload_param=cpu"),
    ),
    "quantized-frozen-weights": Example(
        {"zero_stage": 3, "deepspeed": zero(zero_quantized_nontrainable_weights=True)}, {"deepspeed": None}
    ),
    "quantized-gradients-without-tensor-parallelism": Example(
        {**_FP16, **_TP2, "deepspeed": _INT4}, {"tensor_parallel_size": 1}
    ),
    "quantized-gradients-need-reduce-scatter": Example(
        {**_FP16, "deepspeed": zero(reduce_scatter=False, zero_quantized_gradients=True)}, {"deepspeed": _INT4}
    ),
    "compute-grad-norm-off": Example(
        {"zero_stage": 1, "deepspeed": zero(compute_grad_norm=False)}, {"max_grad_norm": 0}
    ),
    "legacy-stage-1": Example({"deepspeed": zero(legacy_stage1=True)}, {"deepspeed": zero(legacy_stage1=False)}),
    "elastic-checkpoint": Example(
        {"deepspeed": zero(elastic_checkpoint=True)}, {"deepspeed": zero(elastic_checkpoint=False)}
    ),
    "bucket-is-even": Example(
        {"zero_stage": 1, "deepspeed": zero(allgather_bucket_size=1000001)},
        {"deepspeed": zero(allgather_bucket_size=1000002)},
    ),
    "predivide-with-reduce-scatter": Example(
        {"zero_stage": 2, "deepspeed": {"prescale_gradients": True}},
        {"deepspeed": {"prescale_gradients": True, **zero(reduce_scatter=False)}},
    ),
    "superoffload-needs-gpu": Example({"zero_stage": 3, **_SUPER}, {"device": "cuda"}),
    "superoffload-needs-stage-3": Example({"zero_stage": 2, "device": "cuda", **_SUPER}, {"zero_stage": 3}),
    "superoffload-needs-cpu-adam": Example(
        {"zero_stage": 3, "device": "cuda", "optim": "lion_32bit", **_SUPER}, {"optim": "adamw_torch"}
    ),
    "zenflow-needs-offload": Example({**_ZENFLOW, "offload_optimizer": "none"}, {"offload_optimizer": "cpu"}),
    "zenflow-needs-stage-3": Example({**_ZENFLOW, "zero_stage": 2}, {"zero_stage": 3}, ("scrambled weights",)),
    "zenflow-needs-gpu": Example({**_ZENFLOW, "device": "cpu"}, {"device": "cuda"}),
    "zenflow-without-accumulation": Example(
        {**_ZENFLOW, "gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 1}
    ),
    "zenflow-needs-cpu-adam": Example({**_ZENFLOW, "optim": "adagrad"}, {"optim": "adamw_torch"}),
    "zenflow-intervals": Example(
        {**_ZENFLOW, "deepspeed": zero(zenflow={"select_strategy": "step", "select_interval": "auto"})},
        {"deepspeed": zero(zenflow={"select_strategy": "step", "select_interval": 4})},
    ),
    "optimizer-needs-gpu": Example({"optim": "lamb"}, {"device": "cuda"}, ("optim=lamb (argument)", "runs on CPUs")),
    "optimizer-without-cpu-version": Example(
        {"optim": "sgd", "offload_optimizer": "cpu"}, {"deepspeed": {"zero_force_ds_cpu_optimizer": False}}
    ),
    "torch-adam-parameters": Example(
        {"deepspeed": adamw(bias_correction=False)}, {"deepspeed": adamw(bias_correction=False, torch_adam=False)}
    ),
    "deepspeed-adam-parameters": Example(
        {"deepspeed": adamw(foreach=True, torch_adam=False)}, {"deepspeed": adamw(foreach=True)}
    ),
    "untested-optimizer": Example(
        {"optim": "sgd", "zero_stage": 1, "deepspeed": {"zero_allow_untested_optimizer": False}}, {"zero_stage": 0}
    ),
    "optimizer-needs-package": Example(
        {"deepspeed": {"optimizer": {"type": "MuAdamW"}}, "environment": machine("mup")}, {"environment": machine()}
    ),
    "lamb-in-fp16": Example({"optim": "lamb", "device": "cuda", "fp16": True}, {"fp16": False, "bf16": True}),
    "muon-stage-3-reduce-scatter": Example({"optim": "muon", "zero_stage": 3}, {"zero_stage": 2}),
    "muon-bf16-stage-1-accumulation": Example(
        {"optim": "muon", "bf16": True, "zero_stage": 1, **_TP2, "deepspeed": _SUMS_IN_FP32},
        {"zero_stage": 2},
    ),
    "activation-checkpointing-is-enabled": Example(
        {"deepspeed": checkpointing(cpu_checkpointing=False)}, {"activation_checkpointing": True}
    ),
    "activations-on-the-host-need-gpu": Example(
        {"activation_checkpointing": True, "deepspeed": checkpointing(cpu_checkpointing=True)},
        {"device": "cuda"},
    ),
    "batch-size-search-needs-one-rank-per-replica": Example(
        {"auto_find_batch_size": True, **_TP2},
        {"tensor_parallel_size": 1},
        ("auto_find_batch_size=True (argument)", "tensor_parallel_size=2 (argument)"),
    ),
    "batch-size-search-needs-own-router-loss": Example(
        {"auto_find_batch_size": True, "global_router_aux_loss": True},
        {"global_router_aux_loss": False},
        ("auto_find_batch_size=True (argument)", "global_router_aux_loss=True (argument)"),
    ),
    "tensor-parallel-inference-kernels": Example(
        {**_TP2, "deepspeed": {"tensor_parallel": {"replace_with_kernel_inject": True}}},
        {"deepspeed": None},
    ),
    "tensor-parallel-injection-policy": Example(
        {**_TP2, "deepspeed": {"tensor_parallel": {"injection_policy_tuple": ["fc2"]}}},
        {"deepspeed": None},
    ),
    "tensor-parallelism-of-one-rank": Example({"deepspeed": {"tensor_parallel": {"tp_overlap_comm": True}}}, _TP2),
    "tensor-parallel-slices-are-placed": Example(
        {**_TP2, "deepspeed": {"tensor_parallel": {"keep_module_on_host": True}}},
        {"deepspeed": {"tensor_parallel": {"keep_module_on_host": False}}},
    ),
    "parallel-loss-needs-parallel-head": Example(
        {**_TP2, "deepspeed": {"tensor_parallel": {"vocab_parallel_ce_backend": "liger"}}},
        {"deepspeed": {"tensor_parallel": {"vocab_parallel_ce_backend": "torch"}}},
    ),
    "direct-storage-needs-gpu": Example({"deepspeed": {"aio": {"use_gds": True}}}, {"device": "cuda"}),
    "data-efficiency-without-a-method": Example(
        {"deepspeed": {"data_efficiency": {"data_routing": {"enabled": True}}}},
        {"deepspeed": {"data_efficiency": {"data_routing": {"enabled": False}}}},
    ),
    "compiled-regions-need-autoep": Example(
        {"deepspeed": {"compile": {"autoep_non_moe": True}}}, {"deepspeed": {"compile": {"autoep_non_moe": False}}}
    ),
    "lamb-needs-whole-matrices": Example(
        {**_TP2, "zero_stage": 0, "device": "cuda", "deepspeed": {"optimizer": {"type": "Lamb"}}},
        {"tensor_parallel_size": 1},
    ),
    "partitioned-activations-need-tensor-parallelism": Example(
        {"activation_checkpointing": True, "world": 2, "deepspeed": checkpointing(partition_activations=True)},
        {"tensor_parallel_size": 2},
    ),
    "contiguous-activations": Example(
        {"activation_checkpointing": True, **_TP2, "deepspeed": checkpointing(**_CONTIGUOUS)},
        {"deepspeed": checkpointing(**_CONTIGUOUS, number_checkpoints=2)},
    ),
    "dynamic-loss-scale": Example(
        {**_FP16, "deepspeed": {"fp16": {"min_loss_scale": 0}}},
        {"deepspeed": {"fp16": {"min_loss_scale": 0, "loss_scale": 0.5}}},
        ("fp16.min_loss_scale=0",),
    ),
    **{
        name: Example({"deepspeed": {"weight_quantization": values}}, {"deepspeed": {}})
        for name, values in (
            ("weight-quantization", {"quantized_initialization": {"num_bits": 8}}),
            ("weight-quantization-in-training", {"num_bits": 8}),
        )
    },
    "pipeline-of-one-stage": Example({"deepspeed": {"pipeline": {"seed_layers": True}}}, {"deepspeed": {}}),
    **{
        name: Example({"deepspeed": {key: wrong}}, {"deepspeed": {key: right}})
        for name, key, wrong, right in (
            ("gradients-are-averaged", "gradient_allreduce_op", "sum", "mean"),
            ("accumulation-is-managed", "managed_gradient_accumulation", False, True),
            ("sequence-communication-dtype", "seq_parallel_communication_data_type", "bf16", None),
        )
    },
    **{
        name.replace("_", "-"): Example(
            {"deepspeed": {key: {"enabled": True}}}, {"deepspeed": {key: {"enabled": False}}}
        )
        for name, key in (
            *((key, key) for key in ("data_efficiency", "hybrid_engine", "autotuning")),
            ("experts-are-divided-by-the-trainer", "expert_parallel"),
        )
    },
    "pipeline": Example({"deepspeed": {"pipeline": {"stages": 2}}}, {"deepspeed": {}}),
    **{
        name: Example({"world": 2, "expert_parallel_size": 2, **arguments}, {"expert_parallel_size": 1})
        for name, arguments in (
            ("experts-without-zeropp", {"zero_stage": 3, "deepspeed": _HPZ}),
            ("experts-with-plain-offload", {"zero_stage": 3, "offload_optimizer": "nvme", "nvme_path": "/nvme"}),
        )
    },
    "deepcompile-needs-gpu": Example({"deepspeed": {"compile": {"deepcompile": True}}}, {"device": "cuda"}),
    "checkpoint-writer-needs-gpu": Example(
        {"deepspeed": {"checkpoint": {"writer": {"type": "fast"}}}}, {"device": "cuda"}
    ),
    "datastates-needs-package": Example(
        {"deepspeed": {"datastates_ckpt": {"host_cache_size": 1}}, "environment": machine("datastates")},
        {"environment": machine()},
    ),
    **{
        f"{name}-needs-package": Example(
            {"deepspeed": {name: {"enabled": True}}, "environment": machine(package)}, {"environment": machine()}
        )
        for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml"))
    },
}


def test_every_rule_has_an_example_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(EXAMPLES) == set(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule(rule: Any) -> None:
    example = EXAMPLES[rule.name]
    messages = [sentence for sentence in said(**example.breaks) if rule.needs in sentence]
    assert len(messages) == 1
    if rule.refuses:
        with pytest.raises(ConfigError):
            compiled(**example.breaks)
    else:
        compiled(**example.breaks)
    assert rule.remedy in messages[0]
    assert all(part in messages[0] for part in example.message_parts)
    assert not any(rule.needs in sentence for sentence in said(**{**example.breaks, **example.repair}))
    compiled(**{**example.breaks, **example.repair})


def test_messages_are_sentences() -> None:
    for rule in RULES:
        assert rule.remedy.endswith(".") and not rule.needs.endswith(".")
        assert rule.culprits, rule.name
