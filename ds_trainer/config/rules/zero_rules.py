"""Rules about ZeRO (sharding, offload, ZeRO++), SuperOffload and ZenFlow, and about tensor parallelism."""

from __future__ import annotations

from ds_trainer.config.rules.rule_context import Rule, RuleContext

_STAGE = "zero_optimization.stage"
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_OFFLOAD_PARAM = "zero_optimization.offload_param.device"
_QUANTIZED_GRADIENTS = "zero_optimization.zero_quantized_gradients"


def _nvme(context: RuleContext) -> bool:
    return context.offloads("optimizer", "nvme") or context.offloads("param", "nvme")


def _nvme_paths(context: RuleContext) -> list[str | None]:
    return [
        context.zero(f"offload_{state}.nvme_path")
        for state in ("optimizer", "param")
        if context.offloads(state, "nvme")
    ]


def _quantized(context: RuleContext, *kinds: str) -> bool:
    """Whether ZeRO++ quantizes one of ``kinds``."""
    return any(context.zeropp(f"zero_quantized_{kind}") is True for kind in kinds)


def _hpz(context: RuleContext) -> int:
    return int(context.zeropp("zero_hpz_partition_size") or 1)


ZERO = (
    Rule(
        "offload-optimizer-needs-zero",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _STAGE),
        lambda c: c.offloads("optimizer") and c.stage == 0,
        "optimizer offload needs ZeRO stage 1, 2 or 3",
        "Set zero_stage to 1, 2 or 3.",
    ),
    Rule(
        "offload-param-needs-stage-3",
        "ZeRO",
        (_OFFLOAD_PARAM, _STAGE),
        lambda c: c.offloads("param") and c.stage != 3,
        "parameter offload needs ZeRO stage 3",
        "Set zero_stage=3, or offload the optimizer only.",
    ),
    Rule(
        "nvme-optimizer-needs-stage-3",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _STAGE),
        lambda c: c.offloads("optimizer", "nvme") and c.stage in (1, 2),
        "optimizer offload to NVMe needs ZeRO stage 3; stages 1 and 2 would keep it in host memory",
        "Set zero_stage=3, or offload_optimizer=cpu.",
    ),
    Rule(
        "nvme-needs-path",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM),
        lambda c: None in _nvme_paths(c),
        "offload to NVMe needs a directory on a local disk",
        "Set nvme_path.",
    ),
    Rule(
        "nvme-path-writable",
        "ZeRO",
        ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"),
        lambda c: (
            c.environment is not None
            and any(path is not None and not c.environment.is_writable_directory(path) for path in _nvme_paths(c))
        ),
        "this is not a writable directory on this machine",
        "Create it, or set another directory.",
    ),
    Rule(
        "nvme-needs-libaio",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM),
        lambda c: _nvme(c) and c.environment is not None and not c.environment.has_async_io(),
        "offload to NVMe needs libaio, and its header libaio.h is not installed on this machine",
        "Install libaio-dev (Debian) or libaio-devel (Red Hat), or offload to cpu.",
    ),
    Rule(
        "partial-offload-needs-stage-3",
        "ZeRO",
        ("zero_optimization.offload_optimizer.ratio", _STAGE),
        lambda c: c.offloads("optimizer") and c.zero("offload_optimizer.ratio", 1.0) < 1.0 and c.stage != 3,
        "partial optimizer offload needs ZeRO stage 3",
        "Set zero_stage=3, or ratio to 1.0.",
    ),
    Rule(
        "partial-offload-needs-cpu-adam",
        "ZeRO",
        ("zero_optimization.offload_optimizer.ratio", "optimizer.type", "optimizer.params.torch_adam"),
        lambda c: (
            c.offloads("optimizer")
            and c.zero("offload_optimizer.ratio", 1.0) < 1.0
            and c.stage == 3
            and not c.uses_cpu_adam
        ),
        "partial optimizer offload works with DeepSpeed's CPUAdam only",
        "Set optimizer.params.torch_adam to false and optim=adamw_torch, or ratio to 1.0.",
    ),
    Rule(
        "zeropp-needs-stage-3",
        "ZeRO",
        (
            "zero_optimization.zero_hpz_partition_size",
            "zero_optimization.zero_quantized_weights",
            _QUANTIZED_GRADIENTS,
            _STAGE,
        ),
        lambda c: (
            c.stage != 3
            and (
                int(c.zero("zero_hpz_partition_size") or 1) > 1
                or any(c.on(f"zero_optimization.zero_quantized_{kind}") for kind in ("weights", "gradients"))
            )
        ),
        "ZeRO++ needs ZeRO stage 3, and DeepSpeed ignores it at others",
        "Set zero_stage=3, or remove these keys.",
        refuses=False,
    ),
    Rule(
        "zeropp-quantization-needs-gpu",
        "ZeRO",
        ("zero_optimization.zero_quantized_weights", _QUANTIZED_GRADIENTS),
        lambda c: c.on_cpu and _quantized(c, "weights", "gradients"),
        "quantized communication needs a GPU, and this job runs on CPUs",
        "Remove these keys; zero_hpz_partition_size works without a GPU.",
    ),
    Rule(
        "hpz-divides-ranks",
        "ZeRO",
        ("zero_optimization.zero_hpz_partition_size",),
        lambda c: c.layout.seq_data_parallel_size % _hpz(c) != 0,
        "the secondary partition of ZeRO++ (hpZ) must divide the number of ranks over which ZeRO shards",
        "Set it to the number of GPUs per node.",
    ),
    Rule(
        "direct-storage-needs-gpu",
        "ZeRO",
        ("aio.use_gds",),
        lambda c: c.on("aio.use_gds") and c.on_cpu,
        "GPUDirect Storage needs a GPU, and this job runs on CPUs",
        "Remove aio.use_gds.",
    ),
    Rule(
        # partition_parameters.py, _partition_param_sec: torch.empty(..., device="nvme").
        "hpz-without-nvme-parameters",
        "ZeRO",
        ("zero_optimization.zero_hpz_partition_size", _OFFLOAD_PARAM),
        lambda c: _hpz(c) > 1 and c.offloads("param", "nvme"),
        "DeepSpeed 0.19.8 cannot keep the secondary partition of ZeRO++ (hpZ) on NVMe",
        "Set offload_param=cpu, or remove zero_hpz_partition_size.",
    ),
    Rule(
        # Measured with a quantizer in Python: the shard of a frozen weight is quantized while it is empty, and the
        # weight is then copied into the integers (_partition_param), where everything below 1 becomes 0.
        "quantized-frozen-weights",
        "ZeRO",
        ("zero_optimization.zero_quantized_nontrainable_weights",),
        lambda c: _quantized(c, "nontrainable_weights"),
        "DeepSpeed 0.19.8 rounds frozen weights to whole numbers when it shards them, so that most become 0",
        "Remove zero_quantized_nontrainable_weights. zero_quantized_weights quantizes what ranks send each other.",
    ),
    Rule(
        "quantized-gradients-without-tensor-parallelism",
        "ZeRO",
        (_QUANTIZED_GRADIENTS, "tensor_parallel.autotp_size"),
        lambda c: _quantized(c, "gradients") and c.layout.tp > 1,
        "DeepSpeed 0.19.8 sums quantized gradients over all ranks, also over those with other slices of the weights",
        "Remove zero_quantized_gradients, or set tensor_parallel_size=1.",
    ),
    Rule(
        "quantized-gradients-need-reduce-scatter",
        "ZeRO",
        (_QUANTIZED_GRADIENTS, "zero_optimization.reduce_scatter"),
        lambda c: _quantized(c, "gradients") and c.zero("reduce_scatter", True) is not True,
        "quantized gradients need reduce_scatter",
        "Remove reduce_scatter, or zero_quantized_gradients.",
    ),
    Rule(
        "compute-grad-norm-off",
        "ZeRO",
        ("zero_optimization.compute_grad_norm", "gradient_clipping", _STAGE),
        lambda c: (
            c.zero("compute_grad_norm", True) is False
            and (c.stage not in (1, 2) or c.get("gradient_clipping") != 0.0 or c.offloads("optimizer"))
        ),
        "skipping the gradient norm works with ZeRO stage 1 or 2, without clipping and without offload",
        "Set max_grad_norm=0, or remove compute_grad_norm.",
    ),
    Rule(
        "legacy-stage-1",
        "ZeRO",
        ("zero_optimization.legacy_stage1",),
        lambda c: c.on("zero_optimization.legacy_stage1"),
        "DeepSpeed has removed the legacy ZeRO stage 1",
        "Remove legacy_stage1.",
    ),
    Rule(
        "elastic-checkpoint",
        "ZeRO",
        ("zero_optimization.elastic_checkpoint",),
        lambda c: c.on("zero_optimization.elastic_checkpoint"),
        "the Trainer resumes on any number of ranks without them, and elastic checkpoints are not tested with it",
        "Remove elastic_checkpoint.",
    ),
    Rule(
        "bucket-is-even",
        "ZeRO",
        ("zero_optimization.allgather_bucket_size",),
        lambda c: c.stage in (1, 2) and int(c.zero("allgather_bucket_size", 2)) % 2 == 1,
        "DeepSpeed requires an even number of elements",
        "Add one.",
    ),
    Rule(
        "predivide-with-reduce-scatter",
        "ZeRO",
        ("prescale_gradients", "gradient_predivide_factor", "zero_optimization.reduce_scatter"),
        lambda c: (
            c.stage > 1
            and c.zero("reduce_scatter", True) is True
            and (c.on("prescale_gradients") or float(c.get("gradient_predivide_factor", 1.0)) != 1.0)
        ),
        "with reduce-scatter, DeepSpeed can only divide gradients after the reduction",
        "Remove both keys, or set zero_optimization.reduce_scatter to false.",
    ),
)


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


_TENSOR_TOPIC = "Tensor parallelism"


def _is_set(context: RuleContext, key: str) -> bool:
    return context.layout.tp > 1 and context.get(f"tensor_parallel.{key}") not in (None, False)


TENSOR = (
    Rule(
        "tensor-parallelism-of-one-rank",
        _TENSOR_TOPIC,
        ("tensor_parallel",),
        lambda c: c.layout.tp == 1 and c.get("tensor_parallel") is not None,
        "DeepSpeed reads tensor_parallel if it partitions weights, and every rank has all of them",
        "Set tensor_parallel_size, or remove it.",
        refuses=False,
    ),
    Rule(
        "tensor-parallel-slices-are-placed",
        _TENSOR_TOPIC,
        ("tensor_parallel.keep_module_on_host",),
        lambda c: _is_set(c, "keep_module_on_host"),
        "the Trainer moves one slice of a weight at a time to the device",
        "Remove it.",
        refuses=False,
    ),
    Rule(
        "parallel-loss-needs-parallel-head",
        _TENSOR_TOPIC,
        ("tensor_parallel.vocab_parallel_ce_backend", "tensor_parallel.vocab_parallel_lm_head"),
        lambda c: (
            c.layout.tp > 1
            and c.get("tensor_parallel.vocab_parallel_ce_backend", "torch") != "torch"
            and not c.config.vocab_parallel_lm_head
        ),
        "this loss reads the logits of a head whose vocabulary is partitioned",
        "Set tensor_parallel.vocab_parallel_lm_head to true, or remove vocab_parallel_ce_backend.",
    ),
    Rule(
        "tensor-parallel-inference-kernels",
        _TENSOR_TOPIC,
        ("tensor_parallel.kernel_inject",),
        lambda c: _is_set(c, "kernel_inject"),
        "DeepSpeed does not use its inference kernels in training",
        "Remove kernel_inject.",
        refuses=False,
    ),
    Rule(
        "tensor-parallel-injection-policy",
        _TENSOR_TOPIC,
        ("tensor_parallel.injection_policy_tuple",),
        lambda c: _is_set(c, "injection_policy_tuple"),
        "DeepSpeed does not read it in training",
        "Define the partition in tensor_parallel.partition_config.",
        refuses=False,
    ),
    Rule(
        "lamb-needs-whole-matrices",
        _TENSOR_TOPIC,
        ("optimizer.type", "tensor_parallel.autotp_size", "expert_parallel_size"),
        lambda c: c.optimizer == "lamb" and c.layout.tp * c.layout.ep > 1,
        "Lamb scales the update of each tensor by its norm, and tensor and expert parallelism partition tensors: the "
        "results would differ",
        "Set tensor_parallel_size and expert_parallel_size to 1, or use optim=adamw_torch.",
    ),
)
