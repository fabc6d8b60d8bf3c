"""Rules about SuperOffload and ZenFlow, which run the optimizer on the CPU while the GPU continues."""

from __future__ import annotations

from ds_trainer.config.rules.rule_context import Rule

_STAGE = "zero_optimization.stage"
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_ZERO = "zero_optimization"

OFFLOAD_ENGINES = (
    Rule(
        "superoffload-needs-gpu",
        "SuperOffload and ZenFlow",
        ("zero_optimization.offload_optimizer.super_offload",),
        lambda c: c.on(f"{_ZERO}.offload_optimizer.super_offload") and c.on_cpu,
        "SuperOffload needs an NVIDIA GPU, and this job runs on CPUs",
        "Remove super_offload.",
    ),
    Rule(
        "superoffload-needs-stage-3",
        "SuperOffload and ZenFlow",
        ("zero_optimization.offload_optimizer.super_offload", _STAGE, _OFFLOAD_OPTIMIZER),
        lambda c: (
            c.on(f"{_ZERO}.offload_optimizer.super_offload") and (c.stage != 3 or not c.offloads("optimizer", "cpu"))
        ),
        "SuperOffload needs ZeRO stage 3 with the optimizer in host memory",
        "Set zero_stage=3 and offload_optimizer=cpu.",
    ),
    Rule(
        "superoffload-needs-cpu-adam",
        "SuperOffload and ZenFlow",
        ("zero_optimization.offload_optimizer.super_offload", "optimizer.type", "optimizer.params.torch_adam"),
        lambda c: c.on(f"{_ZERO}.offload_optimizer.super_offload") and c.offloads("optimizer") and not c.uses_cpu_adam,
        "SuperOffload works with DeepSpeed's CPUAdam only",
        "Set optim=adamw_torch and remove torch_adam.",
    ),
    Rule(
        # Measured: right after deepspeed.initialize every matrix holds the values of its transpose. The flat buffer is
        # filled column by column (zenflow_utils) and read row by row (_update_model_bit16_weights).
        "zenflow-needs-stage-3",
        "SuperOffload and ZenFlow",
        ("zero_optimization.zenflow", _STAGE),
        lambda c: c.zero("zenflow") is not None and c.stage != 3,
        "at ZeRO stages 1 and 2, ZenFlow of DeepSpeed 0.19.8 starts from scrambled weights",
        "Set zero_stage=3, or remove zenflow.",
    ),
    Rule(
        "zenflow-needs-gpu",
        "SuperOffload and ZenFlow",
        ("zero_optimization.zenflow",),
        lambda c: c.zero("zenflow") is not None and c.on_cpu,
        "ZenFlow needs a GPU, and this job runs on CPUs",
        "Remove zenflow.",
    ),
    Rule(
        "zenflow-without-accumulation",
        "SuperOffload and ZenFlow",
        ("zero_optimization.zenflow", "gradient_accumulation_steps"),
        lambda c: c.zero("zenflow") is not None and c.get("gradient_accumulation_steps", 1) > 1,
        "ZenFlow updates the weights after micro-batches, at its own update_interval",
        "Set gradient_accumulation_steps=1.",
    ),
    Rule(
        "zenflow-needs-offload",
        "SuperOffload and ZenFlow",
        ("zero_optimization.zenflow", _OFFLOAD_OPTIMIZER),
        lambda c: c.zero("zenflow") is not None and not c.offloads("optimizer", "cpu"),
        "ZenFlow needs the optimizer in host memory",
        "Set offload_optimizer=cpu.",
    ),
    Rule(
        "zenflow-needs-cpu-adam",
        "SuperOffload and ZenFlow",
        ("optimizer.type", "optimizer.params.torch_adam"),
        lambda c: c.zero("zenflow") is not None and c.offloads("optimizer") and not c.uses_cpu_adam,
        "ZenFlow works with DeepSpeed's CPUAdam only",
        "Set optim=adamw_torch and remove torch_adam.",
    ),
    Rule(
        "zenflow-intervals",
        "SuperOffload and ZenFlow",
        ("zero_optimization.zenflow.select_strategy", "zero_optimization.zenflow.select_interval"),
        lambda c: (
            c.zero("zenflow") is not None
            and (c.zero("zenflow.select_strategy", "auto") == "auto")
            == isinstance(c.zero("zenflow.select_interval", "auto"), int)
        ),
        "ZenFlow needs select_interval as a number with the strategies step and epoch, and only with them",
        "Set both, or leave both out.",
    ),
)
