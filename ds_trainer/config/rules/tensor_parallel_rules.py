"""Rules about tensor parallelism: keys that have no effect in training, and optimizers that need whole matrices."""

from __future__ import annotations

from ds_trainer.config.rules.rule_context import Rule, RuleContext

_TOPIC = "Tensor parallelism"


def _given(context: RuleContext, key: str) -> bool:
    return context.layout.tp > 1 and context.get(f"tensor_parallel.{key}") not in (None, False)


TENSOR = (
    Rule(
        "tensor-parallel-inference-kernels",
        _TOPIC,
        ("tensor_parallel.kernel_inject",),
        lambda c: _given(c, "kernel_inject"),
        "DeepSpeed does not use its inference kernels in training",
        "Remove kernel_inject.",
        refuses=False,
    ),
    Rule(
        "tensor-parallel-injection-policy",
        _TOPIC,
        ("tensor_parallel.injection_policy_tuple",),
        lambda c: _given(c, "injection_policy_tuple"),
        "DeepSpeed does not read it in training",
        "Define the partition in tensor_parallel.partition_config.",
        refuses=False,
    ),
    Rule(
        "lamb-needs-whole-matrices",
        _TOPIC,
        ("optimizer.type", "tensor_parallel.autotp_size"),
        lambda c: c.optimizer == "lamb" and c.layout.tp > 1,
        "Lamb scales the update of each tensor by its norm, and tensor parallelism partitions the tensors: the results "
        "would differ",
        "Set tensor_parallel_size=1, or use optim=adamw_torch.",
    ),
)
