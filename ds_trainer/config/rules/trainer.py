"""Rules about what the Trainer does itself, and about parts that must be installed."""

from __future__ import annotations

from ds_trainer.config.rules.case import Case, Rule


def _too_new_for_autoep(case: Case) -> bool:
    version = case.environment.version("transformers") if case.environment is not None else None
    if version is None:
        return False
    major, minor, *_ = version.split(".")
    return (int(major), int(minor)) >= (5, 23)


TRAINER = (
    Rule(
        "gradients-are-averaged",
        "What the Trainer does itself",
        ("gradient_allreduce_op",),
        lambda c: str(c.get("gradient_allreduce_op", "mean")).lower() not in ("mean", "avg", "average"),
        "the Trainer's loss scale relies on gradients being averaged",
        "Remove gradient_allreduce_op: the gradient is that of the mean over all tokens anyway.",
    ),
    Rule(
        "recomputation-is-asked-for",
        "What the Trainer does itself",
        (
            "activation_checkpointing.cpu_checkpointing",
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.number_checkpoints",
            "activation_checkpointing.profile",
        ),
        lambda c: c.get("activation_checkpointing") is not None and not c.args.activation_checkpointing,
        "this says how activations are kept, but nothing asks the model to recompute any",
        "Set activation_checkpointing=True.",
    ),
    Rule(
        "activations-on-the-host-need-gpu",
        "What the Trainer does itself",
        ("activation_checkpointing.cpu_checkpointing",),
        lambda c: c.on("activation_checkpointing.cpu_checkpointing") and c.on_cpu,
        "activations go from the GPU to the host, and this run is on the CPU",
        "Remove cpu_checkpointing.",
    ),
    Rule(
        "partitioned-activations-need-tensor-parallelism",
        "What the Trainer does itself",
        ("activation_checkpointing.partition_activations", "tensor_parallel.autotp_size"),
        lambda c: c.on("activation_checkpointing.partition_activations") and c.layout.tp == 1,
        "activations are partitioned over tensor-parallel ranks, and there is only one",
        "Set tensor_parallel_size, or use activation_checkpointing.cpu_checkpointing instead.",
    ),
    Rule(
        "contiguous-activations",
        "What the Trainer does itself",
        (
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.number_checkpoints",
        ),
        lambda c: (
            c.on("activation_checkpointing.contiguous_memory_optimization")
            and (
                not c.on("activation_checkpointing.partition_activations")
                or c.get("activation_checkpointing.number_checkpoints") is None
            )
        ),
        "contiguous activations need partitioned ones and their number",
        "Set partition_activations to true and number_checkpoints to the number of layers, or remove it.",
    ),
    Rule(
        "weight-quantization",
        "What the Trainer does itself",
        ("weight_quantization.enabled", "weight_quantization.num_bits"),
        lambda c: c.get("weight_quantization") is not None,
        "weights that are quantised when they are made are for inference",
        "Remove weight_quantization.",
    ),
    Rule(
        "accumulation-is-managed",
        "What the Trainer does itself",
        ("managed_gradient_accumulation",),
        lambda c: c.get("managed_gradient_accumulation", True) is False,
        "the Trainer tells the engine which micro-batch is the last",
        "Remove managed_gradient_accumulation.",
    ),
    Rule(
        "data-efficiency",
        "What the Trainer does itself",
        ("data_efficiency.enabled",),
        lambda c: c.on("data_efficiency.enabled"),
        "the Trainer owns the order of samples",
        "Remove data_efficiency, and prepare the dataset in the order that you want.",
    ),
    Rule(
        "pipeline",
        "What the Trainer does itself",
        ("pipeline.stages",),
        lambda c: c.get("pipeline") is not None,
        "the Trainer does not run pipeline parallelism",
        "Remove pipeline; use tensor_parallel_size or ZeRO-3 for models that do not fit.",
    ),
    Rule(
        "batch-size-search-needs-one-rank-a-replica",
        "What the Trainer does itself",
        ("auto_find_batch_size", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_size"),
        lambda c: c.args.auto_find_batch_size and c.layout.replica_size > 1,
        "the search rehearses forward passes in which no rank waits for another, but ranks of one replica do in every "
        "layer",
        "Set auto_find_batch_size=False and a per_device_train_batch_size that fits, or the parallel sizes to 1.",
    ),
    Rule(
        "hybrid-engine",
        "What the Trainer does itself",
        ("hybrid_engine.enabled",),
        lambda c: c.on("hybrid_engine.enabled"),
        "the hybrid engine is for reinforcement learning and is not run by the Trainer",
        "Remove hybrid_engine.",
    ),
    Rule(
        "autotuning",
        "What the Trainer does itself",
        ("autotuning.enabled",),
        lambda c: c.on("autotuning.enabled"),
        "DeepSpeed's autotuner starts jobs of its own and ends this one",
        "Remove autotuning, and run deepspeed --autotuning with a script of its own.",
    ),
    Rule(
        "expert-parallel-transformers",
        "What the Trainer does itself",
        ("expert_parallel.enabled",),
        lambda c: c.on("expert_parallel.enabled") and _too_new_for_autoep(c),
        "AutoEP of DeepSpeed 0.19.8 cannot read the models of transformers 5.23 or later",
        "Install transformers below 5.23, or remove expert_parallel.",
    ),
    Rule(
        "deepcompile-needs-gpu",
        "What the Trainer does itself",
        ("compile.deepcompile",),
        lambda c: c.on("compile.deepcompile") and c.on_cpu,
        "DeepCompile needs a GPU, and this run is on the CPU",
        "Remove compile.deepcompile.",
    ),
    Rule(
        "checkpoint-writer-needs-gpu",
        "What the Trainer does itself",
        ("checkpoint.writer.type",),
        lambda c: c.get("checkpoint.writer") is not None and c.on_cpu,
        "DeepSpeed's checkpoint writers need a GPU, and this run is on the CPU",
        "Remove checkpoint.writer.",
    ),
    Rule(
        "datastates-needs-package",
        "What the Trainer does itself",
        ("datastates_ckpt.host_cache_size",),
        lambda c: c.get("datastates_ckpt") is not None and c.lacks("datastates"),
        "this checkpoint engine comes with a package that is not installed: datastates",
        "Install datastates-llm, or remove datastates_ckpt.",
    ),
    Rule(
        "tensorboard-needs-package",
        "What the Trainer does itself",
        ("tensorboard.enabled",),
        lambda c: c.on("tensorboard.enabled") and c.lacks("tensorboard"),
        "DeepSpeed's tensorboard monitor needs a package that is not installed",
        "Run pip install tensorboard.",
    ),
    Rule(
        "wandb-needs-package",
        "What the Trainer does itself",
        ("wandb.enabled",),
        lambda c: c.on("wandb.enabled") and c.lacks("wandb"),
        "DeepSpeed's wandb monitor needs a package that is not installed",
        "Run pip install wandb.",
    ),
    Rule(
        "comet-needs-package",
        "What the Trainer does itself",
        ("comet.enabled",),
        lambda c: c.on("comet.enabled") and c.lacks("comet_ml"),
        "DeepSpeed's comet monitor needs a package that is not installed",
        "Run pip install comet_ml.",
    ),
)
