"""Rules about ZeRO: sharding, offload, ZeRO++."""

from __future__ import annotations

from ds_trainer.config.rules.case import Case, Rule

_STAGE = "zero_optimization.stage"
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_OFFLOAD_PARAM = "zero_optimization.offload_param.device"


def _nvme(case: Case) -> bool:
    return case.offloads("optimizer", "nvme") or case.offloads("param", "nvme")


def _nvme_paths(case: Case) -> list[str | None]:
    return [case.zero(f"offload_{what}.nvme_path") for what in ("optimizer", "param") if case.offloads(what, "nvme")]


def _zeropp(case: Case) -> bool:
    return _quantised(case) or int(case.zero("zero_hpz_partition_size", 1)) > 1


def _quantised(case: Case) -> bool:
    kinds = ("weights", "gradients", "nontrainable_weights")
    return any(case.on(f"zero_optimization.zero_quantized_{kind}") for kind in kinds)


ZERO = (
    Rule(
        "offload-optimizer-needs-zero",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _STAGE),
        lambda c: c.offloads("optimizer") and c.stage == 0,
        "offload of the optimizer needs ZeRO stage 1, 2 or 3",
        "Set zero_stage to 1, 2 or 3.",
    ),
    Rule(
        "offload-param-needs-stage-3",
        "ZeRO",
        (_OFFLOAD_PARAM, _STAGE),
        lambda c: c.offloads("param") and c.stage != 3,
        "offload of parameters needs ZeRO stage 3",
        "Set zero_stage=3, or offload the optimizer only.",
    ),
    Rule(
        "nvme-optimizer-needs-stage-3",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _STAGE),
        lambda c: c.offloads("optimizer", "nvme") and c.stage in (1, 2),
        "offload of the optimizer to NVMe needs ZeRO stage 3; stages 1 and 2 would keep it in host memory",
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
        "this is no directory on this machine that can be written to",
        "Make it, or name another.",
    ),
    Rule(
        "nvme-needs-libaio",
        "ZeRO",
        (_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAM),
        lambda c: _nvme(c) and c.environment is not None and not c.environment.has_async_io(),
        "offload to NVMe needs libaio, and its header libaio.h is not on this machine",
        "Install libaio-dev (Debian) or libaio-devel (Red Hat), or offload to cpu.",
    ),
    Rule(
        "partial-offload-needs-stage-3",
        "ZeRO",
        ("zero_optimization.offload_optimizer.ratio", _STAGE),
        lambda c: c.offloads("optimizer") and c.zero("offload_optimizer.ratio", 1.0) < 1.0 and c.stage != 3,
        "partial offload of the optimizer needs ZeRO stage 3",
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
        "partial offload of the optimizer works with DeepSpeed's CPUAdam only",
        "Set optimizer.params.torch_adam to false and optim=adamw_torch, or ratio to 1.0.",
    ),
    Rule(
        "zeropp-needs-stage-3",
        "ZeRO",
        (
            "zero_optimization.zero_hpz_partition_size",
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_gradients",
            "zero_optimization.zero_quantized_nontrainable_weights",
            _STAGE,
        ),
        lambda c: c.stage != 3 and _zeropp(c),
        "ZeRO++ needs ZeRO stage 3",
        "Set zero_stage=3, or remove these keys.",
    ),
    Rule(
        "zeropp-quantisation-needs-gpu",
        "ZeRO",
        (
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_gradients",
            "zero_optimization.zero_quantized_nontrainable_weights",
        ),
        lambda c: c.on_cpu and _quantised(c),
        "quantised communication needs a GPU, and this run is on the CPU",
        "Remove these keys; zero_hpz_partition_size works without a GPU.",
    ),
    Rule(
        "hpz-divides-ranks",
        "ZeRO",
        ("zero_optimization.zero_hpz_partition_size",),
        lambda c: c.layout.gradient_ranks % max(1, int(c.zero("zero_hpz_partition_size", 1))) != 0,
        "the second partition of ZeRO++ (hpZ) must divide the ranks that ZeRO shards over",
        "Set it to the number of GPUs of one machine.",
    ),
    Rule(
        "compute-grad-norm-off",
        "ZeRO",
        ("zero_optimization.compute_grad_norm", "gradient_clipping", _STAGE),
        lambda c: (
            c.zero("compute_grad_norm", True) is False
            and (c.stage not in (1, 2) or c.get("gradient_clipping") != 0.0 or c.offloads("optimizer"))
        ),
        "leaving out the gradient norm works with ZeRO stage 1 or 2, without clipping and without offload",
        "Set max_grad_norm=0, or remove compute_grad_norm.",
    ),
    Rule(
        "legacy-stage-1",
        "ZeRO",
        ("zero_optimization.legacy_stage1",),
        lambda c: c.on("zero_optimization.legacy_stage1"),
        "DeepSpeed no longer has the old ZeRO stage 1",
        "Remove legacy_stage1.",
    ),
    Rule(
        "elastic-checkpoint",
        "ZeRO",
        ("zero_optimization.elastic_checkpoint",),
        lambda c: c.on("zero_optimization.elastic_checkpoint"),
        "DeepSpeed no longer has elastic checkpoints",
        "Remove elastic_checkpoint.",
    ),
    Rule(
        "bucket-is-even",
        "ZeRO",
        ("zero_optimization.allgather_bucket_size",),
        lambda c: c.stage in (1, 2) and int(c.zero("allgather_bucket_size", 2)) % 2 == 1,
        "DeepSpeed asks for an even number of elements",
        "Add one.",
    ),
    Rule(
        "predivide-with-reduce-scatter",
        "ZeRO",
        ("prescale_gradients", "gradient_predivide_factor", "zero_optimization.reduce_scatter"),
        lambda c: (
            c.stage > 0
            and c.zero("reduce_scatter", True) is True
            and (c.on("prescale_gradients") or float(c.get("gradient_predivide_factor", 1.0)) != 1.0)
        ),
        "with reduce-scatter DeepSpeed can divide gradients after the reduction only",
        "Remove both keys, or set zero_optimization.reduce_scatter to false.",
    ),
)
