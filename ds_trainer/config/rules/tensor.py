"""Rules about tensor parallelism: what the ``tensor_parallel`` block says in vain, and what slices would spoil."""

from __future__ import annotations

from ds_trainer.config.rules.case import Case, Rule

_TOPIC = "Tensor parallelism"


def _given(case: Case, key: str) -> bool:
    return case.layout.tp > 1 and case.get(f"tensor_parallel.{key}") not in (None, False)


TENSOR = (
    Rule(
        "tensor-parallel-inference-kernels",
        _TOPIC,
        ("tensor_parallel.kernel_inject",),
        lambda c: _given(c, "kernel_inject"),
        "DeepSpeed's kernels for inference are not used in training",
        "Remove kernel_inject.",
    ),
    Rule(
        "tensor-parallel-injection-policy",
        _TOPIC,
        ("tensor_parallel.injection_policy_tuple",),
        lambda c: _given(c, "injection_policy_tuple"),
        "DeepSpeed does not read it in training",
        "Say what to cut in tensor_parallel.partition_config.",
    ),
    Rule(
        "lamb-needs-whole-matrices",
        _TOPIC,
        ("optimizer.type", "tensor_parallel.autotp_size"),
        lambda c: c.optimizer == "lamb" and c.layout.tp > 1,
        "Lamb scales the update of each tensor by its norm, and a rank has slices of them: it would compute "
        "other numbers",
        "Set tensor_parallel_size=1, or use optim=adamw_torch.",
    ),
)
