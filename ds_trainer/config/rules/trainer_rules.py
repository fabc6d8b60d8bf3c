"""Rules about settings that the Trainer manages, and about packages that must be installed."""

from __future__ import annotations

from ds_trainer.config.rules.rule_context import Rule, RuleContext

_DATA_EFFICIENCY = (
    "data_efficiency.enabled",
    *(f"data_efficiency.data_sampling.{key}.enabled" for key in ("curriculum_learning", "dynamic_batching")),
    "data_efficiency.data_routing.random_ltd.enabled",
)
_ZEROPP = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")


def _zeropp(context: RuleContext) -> bool:
    hpz, *quantized = (context.zeropp(key) for key in _ZEROPP)
    return int(hpz or 1) > 1 or True in quantized


def _activations(context: RuleContext, key: str) -> bool:
    return bool(context.args.activation_checkpointing) and context.on(f"activation_checkpointing.{key}")


TRAINER = (
    Rule(
        "gradients-are-averaged",
        "Settings that the Trainer manages",
        ("gradient_allreduce_op",),
        lambda c: str(c.get("gradient_allreduce_op", "mean")).lower() not in ("mean", "avg", "average"),
        "the Trainer scales the loss for gradients that are averaged",
        "Remove gradient_allreduce_op; the gradient is always that of the mean over all tokens.",
    ),
    Rule(
        "activation-checkpointing-is-enabled",
        "Settings that the Trainer manages",
        ("activation_checkpointing",),
        lambda c: c.get("activation_checkpointing") is not None and not c.args.activation_checkpointing,
        "these keys configure activation checkpointing, which is not enabled",
        "Set activation_checkpointing=True.",
        refuses=False,
    ),
    Rule(
        "activations-on-the-host-need-gpu",
        "Settings that the Trainer manages",
        ("activation_checkpointing.cpu_checkpointing",),
        lambda c: _activations(c, "cpu_checkpointing") and c.on_cpu,
        "it moves activations from the GPU to the host, and this job runs on CPUs",
        "Remove cpu_checkpointing.",
    ),
    Rule(
        "partitioned-activations-need-tensor-parallelism",
        "Settings that the Trainer manages",
        ("activation_checkpointing.partition_activations", "tensor_parallel.autotp_size"),
        lambda c: _activations(c, "partition_activations") and c.layout.tp == 1,
        "activations are partitioned over tensor-parallel ranks, and there is only one",
        "Set tensor_parallel_size, or use activation_checkpointing.cpu_checkpointing instead.",
        refuses=False,
    ),
    Rule(
        "contiguous-activations",
        "Settings that the Trainer manages",
        (
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.number_checkpoints",
        ),
        lambda c: (
            _activations(c, "contiguous_memory_optimization")
            and (
                not c.on("activation_checkpointing.partition_activations")
                or c.get("activation_checkpointing.number_checkpoints") is None
            )
        ),
        "contiguous activations need partition_activations and number_checkpoints",
        "Set partition_activations to true and number_checkpoints to the number of layers, or remove it.",
    ),
    Rule(
        "weight-quantization",
        "Settings that the Trainer manages",
        ("weight_quantization.quantized_initialization",),
        lambda c: bool(c.get("weight_quantization.quantized_initialization")),
        "quantizing weights at creation is for inference",
        "Remove weight_quantization.",
    ),
    Rule(
        "weight-quantization-in-training",
        "Settings that the Trainer manages",
        ("weight_quantization",),
        lambda c: (
            c.get("weight_quantization") is not None and not c.get("weight_quantization.quantized_initialization")
        ),
        "DeepSpeed reads weight_quantization at inference",
        "Remove it.",
        refuses=False,
    ),
    Rule(
        "accumulation-is-managed",
        "Settings that the Trainer manages",
        ("managed_gradient_accumulation",),
        lambda c: c.get("managed_gradient_accumulation", True) is False,
        "the Trainer tells the engine which micro-batch is the last of a step",
        "Remove managed_gradient_accumulation.",
    ),
    Rule(
        # DeepSpeed reads the inner blocks whether or not data_efficiency itself is enabled.
        "data-efficiency",
        "Settings that the Trainer manages",
        _DATA_EFFICIENCY,
        lambda c: any(c.on(path) for path in _DATA_EFFICIENCY),
        "the Trainer decides the order of samples",
        "Remove data_efficiency, and put the dataset in the order that you want.",
    ),
    Rule(
        "data-efficiency-without-a-method",
        "Settings that the Trainer manages",
        ("data_efficiency",),
        lambda c: (
            any(c.on(f"data_efficiency.{key}.enabled") for key in ("data_sampling", "data_routing"))
            and not any(c.on(path) for path in _DATA_EFFICIENCY)
        ),
        "no method in data_efficiency is enabled",
        "Remove it.",
        refuses=False,
    ),
    Rule(
        "pipeline",
        "Settings that the Trainer manages",
        ("pipeline.stages",),
        lambda c: c.get("pipeline.stages") not in (None, 1, "auto"),
        "the Trainer does not support pipeline parallelism",
        "Remove pipeline; use tensor_parallel_size or ZeRO-3 for models that do not fit.",
    ),
    Rule(
        "pipeline-of-one-stage",
        "Settings that the Trainer manages",
        ("pipeline",),
        lambda c: c.get("pipeline") is not None and c.get("pipeline.stages") in (None, 1, "auto"),
        "DeepSpeed reads pipeline for models that are a PipelineModule",
        "Remove it.",
        refuses=False,
    ),
    Rule(
        "batch-size-search-needs-one-rank-per-replica",
        "Settings that the Trainer manages",
        ("auto_find_batch_size", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_size"),
        lambda c: c.args.auto_find_batch_size and c.layout.replica_size > 1,
        "the batch size search tries forward passes on each rank alone, but the ranks of these axes communicate in "
        "every layer",
        "Set auto_find_batch_size=False and a per_device_train_batch_size that fits, or set the parallel sizes to 1.",
    ),
    Rule(
        "batch-size-search-needs-own-router-loss",
        "Settings that the Trainer manages",
        ("auto_find_batch_size", "global_router_aux_loss"),
        lambda c: c.args.auto_find_batch_size and c.args.global_router_aux_loss,
        "the batch size search tries forward passes on each rank alone, but all ranks add up the load of experts",
        "Set auto_find_batch_size=False and a per_device_train_batch_size that fits, or global_router_aux_loss=False.",
    ),
    Rule(
        "hybrid-engine",
        "Settings that the Trainer manages",
        ("hybrid_engine.enabled",),
        lambda c: c.on("hybrid_engine.enabled"),
        "the hybrid engine is for reinforcement learning, which the Trainer does not do",
        "Remove hybrid_engine.",
    ),
    Rule(
        "autotuning",
        "Settings that the Trainer manages",
        ("autotuning.enabled",),
        lambda c: c.on("autotuning.enabled"),
        "DeepSpeed's autotuner starts its own jobs and ends this one",
        "Remove autotuning, and run deepspeed --autotuning with a separate script.",
    ),
    Rule(
        "experts-are-divided-by-the-trainer",
        "Settings that the Trainer manages",
        ("expert_parallel.enabled",),
        lambda c: c.on("expert_parallel.enabled"),
        "DeepSpeed's AutoEP replaces routers and renames the weights of experts, which checkpoints and exports rely on",
        "Remove expert_parallel, and set expert_parallel_size.",
    ),
    Rule(
        "compiled-regions-need-autoep",
        "Settings that the Trainer manages",
        ("compile.autoep_non_moe",),
        lambda c: c.on("compile.autoep_non_moe"),
        "it compiles what lies between the layers of DeepSpeed's AutoEP, which the Trainer does not use",
        "Remove compile.autoep_non_moe, and set torch_compile.",
    ),
    Rule(
        "experts-without-zeropp",
        "Settings that the Trainer manages",
        ("expert_parallel_size", *(f"zero_optimization.{key}" for key in _ZEROPP)),
        lambda c: c.layout.ep > 1 and _zeropp(c),
        "ZeRO++ shards and quantizes over all ranks, and experts are divided among some of them",
        "Remove these keys, or set expert_parallel_size=1.",
    ),
    Rule(
        "experts-with-plain-offload",
        "Settings that the Trainer manages",
        (
            "expert_parallel_size",
            *(f"zero_optimization.{key}" for key in ("offload_optimizer", "offload_param", "zenflow")),
        ),
        lambda c: (
            c.layout.ep > 1
            and (
                c.offloads("optimizer", "nvme")
                or c.offloads("param", "nvme")
                or c.zero("zenflow") is not None
                or c.on("zero_optimization.offload_optimizer.super_offload")
                or c.zero("offload_optimizer.ratio", 1) != 1
            )
        ),
        "divided experts are offloaded to host memory only, with no part left on the device",
        "Set the device cpu and no ratio, super_offload or zenflow, or expert_parallel_size=1.",
    ),
    Rule(
        "deepcompile-needs-gpu",
        "Settings that the Trainer manages",
        ("compile.deepcompile",),
        lambda c: c.on("compile.deepcompile") and c.on_cpu,
        "DeepCompile needs a GPU, and this job runs on CPUs",
        "Remove compile.deepcompile.",
    ),
    Rule(
        "universal-checkpoints-are-recognized",
        "Settings that the Trainer manages",
        ("checkpoint.load_universal",),
        lambda c: c.on("checkpoint.load_universal"),
        "what is resumed from says itself whether it is DeepSpeed's universal format",
        "Remove checkpoint.load_universal, and name the directory in resume_from_checkpoint.",
        refuses=False,
    ),
    Rule(
        "saving-is-the-trainers",
        "Settings that the Trainer manages",
        (
            *("checkpoint.use_node_local_storage", "checkpoint.parallel_write.pipeline_stage", "disable_allgather"),
            "checkpoint.checkpoint_serialization",
        ),
        lambda c: (
            c.on("checkpoint.use_node_local_storage")
            or c.on("checkpoint.parallel_write.pipeline_stage")
            or c.on("disable_allgather")
            or c.get("checkpoint.checkpoint_serialization", True) is False
        ),
        "DeepSpeed reads it when it writes checkpoints, which the Trainer does in its place, or not at all",
        "Remove it.",
        refuses=False,
    ),
    Rule(
        "checkpoint-writer-needs-gpu",
        "Settings that the Trainer manages",
        ("checkpoint.writer",),
        lambda c: c.get("checkpoint.writer") is not None and c.on_cpu,
        "DeepSpeed's checkpoint writers need a GPU, and this job runs on CPUs",
        "Remove checkpoint.writer.",
    ),
    Rule(
        "datastates-needs-package",
        "Settings that the Trainer manages",
        ("datastates_ckpt",),
        lambda c: c.get("datastates_ckpt") is not None and c.lacks("datastates"),
        "this checkpoint engine needs a package that is not installed: datastates",
        "Install datastates-llm, or remove datastates_ckpt.",
    ),
    Rule(
        "tensorboard-needs-package",
        "Settings that the Trainer manages",
        ("tensorboard.enabled",),
        lambda c: c.on("tensorboard.enabled") and c.lacks("tensorboard"),
        "DeepSpeed's tensorboard monitor needs a package that is not installed",
        "Run pip install tensorboard.",
    ),
    Rule(
        "wandb-needs-package",
        "Settings that the Trainer manages",
        ("wandb.enabled",),
        lambda c: c.on("wandb.enabled") and c.lacks("wandb"),
        "DeepSpeed's wandb monitor needs a package that is not installed",
        "Run pip install wandb.",
    ),
    Rule(
        "comet-needs-package",
        "Settings that the Trainer manages",
        ("comet.enabled",),
        lambda c: c.on("comet.enabled") and c.lacks("comet_ml"),
        "DeepSpeed's comet monitor needs a package that is not installed",
        "Run pip install comet_ml.",
    ),
)
