"""Rules about the dtypes of weights, gradients and optimizer states."""

from __future__ import annotations

from ds_trainer.config.compiled import short_dtype
from ds_trainer.config.rules.rule_context import Rule

_STAGE = "zero_optimization.stage"
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_ACCUMULATE = "data_types.grad_accum_dtype"
_COMMUNICATE = "communication_data_type"

PRECISION = (
    Rule(
        "fp16-needs-gpu",
        "Precision",
        ("fp16.enabled",),
        lambda c: c.on("fp16.enabled") and c.on_cpu,
        "fp16 needs a GPU, and this job runs on CPUs",
        "Use bf16=True, or neither of them for float32.",
    ),
    Rule(
        "fp16-autocast",
        "Precision",
        ("torch_autocast.dtype",),
        lambda c: c.config.precision.autocast == "fp16",
        "with autocast to fp16, DeepSpeed 0.19.8 clips and reports the gradient multiplied by the loss scale, and "
        "never lowers that scale after an overflow",
        "Use torch_autocast=bf16, or fp16=True.",
    ),
    Rule(
        "autocast-on-float32",
        "Precision",
        ("torch_autocast.enabled", "bf16.enabled", "fp16.enabled"),
        lambda c: c.on("torch_autocast.enabled") and c.model_dtype != "fp32",
        "autocast needs float32 weights, which bf16 and fp16 do not keep",
        "Keep one of them.",
    ),
    Rule(
        "master-weights-need-zero",
        "Precision",
        ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads", _STAGE),
        lambda c: (
            c.stage == 0 and (c.on("fp16.fp16_master_weights_and_grads") or c.on("bf16.bf16_master_weights_and_grads"))
        ),
        "low-precision master weights need ZeRO stage 1, 2 or 3",
        "Set zero_stage to 1 or more.",
    ),
    Rule(
        "fp16-master-weights-need-cpu-adam",
        "Precision",
        ("fp16.fp16_master_weights_and_grads", _OFFLOAD_OPTIMIZER, "optimizer.params.torch_adam"),
        lambda c: c.on("fp16.fp16_master_weights_and_grads") and not c.uses_cpu_adam,
        "fp16 master weights work with DeepSpeed's CPUAdam only",
        "Set offload_optimizer=cpu with optim=adamw_torch, or remove fp16_master_weights_and_grads.",
    ),
    Rule(
        "bf16-states-need-bf16-master-weights",
        "Precision",
        ("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
        lambda c: c.on("bf16.bf16_optimizer_states") and not c.on("bf16.bf16_master_weights_and_grads"),
        "bf16 optimizer states need bf16 master weights",
        "Set bf16.bf16_master_weights_and_grads to true too.",
    ),
    Rule(
        "bf16-master-weights-offload-needs-cpu-adam",
        "Precision",
        ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", _OFFLOAD_OPTIMIZER),
        lambda c: (
            c.on("bf16.bf16_master_weights_and_grads")
            and not c.on("bf16.bf16_optimizer_states")
            and not c.uses_cpu_adam
        ),
        "bf16 master weights with float32 optimizer states work with DeepSpeed's CPUAdam only",
        "Set bf16.bf16_optimizer_states to true, or offload_optimizer=cpu with optim=adamw_torch.",
    ),
    Rule(
        "dynamic-loss-scale",
        "Precision",
        ("fp16.loss_scale_window", "fp16.min_loss_scale", "fp16.loss_scale"),
        lambda c: (
            c.on("fp16.enabled")
            and c.get("fp16.loss_scale", 0) == 0
            and min(c.get("fp16.loss_scale_window", 1), c.get("fp16.min_loss_scale", 1)) <= 0
        ),
        "a dynamic loss scale (loss_scale=0) needs loss_scale_window and min_loss_scale above 0",
        "Remove them, or set a static loss_scale.",
    ),
    Rule(
        "accumulation-dtype",
        "Precision",
        (_ACCUMULATE, "bf16.enabled", "fp16.enabled"),
        lambda c: c.accumulation_dtype not in ("fp32", c.model_dtype),
        "gradients are accumulated in the dtype of the weights, or in float32",
        "Use grad_accum_dtype=fp32, or leave it out.",
    ),
    Rule(
        "lamb-accumulation",
        "Precision",
        (_ACCUMULATE, "optimizer.type"),
        lambda c: c.optimizer == "lamb" and c.accumulation_dtype != c.model_dtype,
        "the Lamb kernel needs gradients in the dtype of the weights",
        "Leave out grad_accum_dtype, or use optim=adamw_torch.",
    ),
    Rule(
        "bf16-stage-1-accumulation-needs-norm",
        "Precision",
        (_ACCUMULATE, _STAGE, "zero_optimization.compute_grad_norm"),
        lambda c: (
            c.stage == 1
            and c.model_dtype == "bf16"
            and c.accumulation_dtype == "fp32"
            and not c.offloads("optimizer", "cpu")
            and c.zero("compute_grad_norm", True) is False
        ),
        "ZeRO stage 1 in bf16 with float32 accumulation always computes the gradient norm",
        "Remove zero_optimization.compute_grad_norm, or use zero_stage=2.",
    ),
    Rule(
        # all_to_all_quant_reduce calls csrc/quantization/pt_binding.cpp, which casts the pointer to __half*.
        "quantized-gradients-need-fp16",
        "Precision",
        ("zero_optimization.zero_quantized_gradients", _COMMUNICATE, "torch_autocast.enabled"),
        lambda c: (
            c.zeropp("zero_quantized_gradients") is True
            and (c.on("torch_autocast.enabled") or (c.get(_COMMUNICATE) or c.model_dtype) != "fp16")
        ),
        "DeepSpeed 0.19.8 reads the bytes of a gradient that it quantizes as float16, whatever they are, so any other "
        "dtype gives wrong gradients on several machines",
        "Set fp16=True, or remove zero_quantized_gradients.",
    ),
    Rule(
        "half-at-stage-0-in-parts",
        "Precision",
        (
            _STAGE,
            "bf16.enabled",
            "fp16.enabled",
            "optimizer.type",
            "tensor_parallel.autotp_size",
            "expert_parallel_size",
        ),
        lambda c: (
            c.stage == 0
            and c.layout.tp * c.layout.ep > 1
            and c.model_dtype != "fp32"
            and (
                c.optimizer == "lamb" or (c.optimizer in ("adam", "adamw") and not c.on("optimizer.params.torch_adam"))
            )
        ),
        "in 16 bits without ZeRO, DeepSpeed's LAMB and its own Adam leave weights that other ranks hold out of the "
        "gradient norm, and clip by that norm",
        "Set zero_stage to 1 or more, or optim=adamw_torch.",
    ),
    Rule(
        "fp16-needs-zero",
        "Precision",
        ("fp16.enabled", _STAGE),
        lambda c: c.stage == 0 and c.on("fp16.enabled") and c.optimizer != "lamb",
        "without ZeRO, DeepSpeed 0.19.8 divides the gradient by a loss scale by which it never multiplied the loss",
        "Set zero_stage to 1 or more, or use bf16=True.",
    ),
    Rule(
        # DeepSpeed reads it if it is given groups for sequences; the Trainer's are groups of its data-parallel ranks.
        "sequence-communication-dtype",
        "Precision",
        ("seq_parallel_communication_data_type",),
        lambda c: c.get("seq_parallel_communication_data_type") is not None,
        "the Trainer reduces gradients over sequence-parallel ranks as over all others",
        "Set communication_data_type.",
        refuses=False,
    ),
    Rule(
        "param-dtype-agrees",
        "Precision",
        ("data_types.param_dtype", "bf16.enabled", "fp16.enabled"),
        lambda c: short_dtype(c.get("data_types.param_dtype") or c.model_dtype) != c.model_dtype,
        "the dtype of the weights follows from bf16 and fp16",
        "Remove data_types.param_dtype, or make it agree.",
    ),
)
