"""Every side of each rule's condition: an example that breaks it alone, or one that repairs it alone.

:mod:`tests.config.test_rules` has one example a rule. Here are the others: with them, no condition can lose an operand,
a member or a negation, and no comparison can shift, without an example that gives another answer.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from ds_trainer.config import compiler
from ds_trainer.config.environment import Environment
from ds_trainer.config.rules import RULES, rule_context
from tests.config.support import compiled, machine, said
from tests.config.test_rules import EXAMPLES, zero
from tests.support.condition_mutants import mutants

MODULES = {
    "precision_rules": ("PRECISION",),
    "zero_rules": ("ZERO", "OFFLOAD_ENGINES", "TENSOR"),
    "optimizer_rules": ("OPTIMIZERS", "LIBRARY_OPTIMIZERS"),
    "trainer_rules": ("TRAINER",),
}


class Case(NamedTuple):
    """Arguments, and the names of all rules that they break. ``about`` is the rule that the case is for."""

    about: str
    broken: tuple[str, ...]
    arguments: dict[str, Any]


def breaks(about: str, *others: str, **arguments: Any) -> Case:
    return Case(about, (about, *others), arguments)


def keeps(about: str, *others: str, **arguments: Any) -> Case:
    return Case(about, others, arguments)


def autocast(dtype: str, enabled: bool = True) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": enabled, "dtype": dtype}}


def adam(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": parameters}}


def optimizer_on(device: str, **keys: Any) -> dict[str, Any]:
    return zero(offload_optimizer={"device": device, **keys})


_FP16_MASTER = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
_BF16_MASTER = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
_NO_NORM = zero(compute_grad_norm=False)
_INT4 = zero(zero_quantized_gradients=True)
_NVME = {"device": "nvme", "nvme_path": "/nvme"}
_TWO_SLICES = {"world": 2, "tensor_parallel_size": 2}
_LIGER = {"vocab_parallel_ce_backend": "liger", "vocab_parallel_lm_head": True}
_ZENFLOW = {"zero_stage": 3, "device": "cuda", "deepspeed": zero(zenflow={"topk_ratio": 0.1})}
_BARE = Environment(version=lambda package: None)
_DS_ADAM: dict[str, Any] = {"optim_args": "torch_adam=False"}
_ADAM: dict[str, Any] = {"deepspeed": {"optimizer": {"type": "Adam", "params": {"torch_adam": False}}}}
_LAMB: dict[str, Any] = {"optim": "lamb", "zero_stage": 0, "device": "cuda"}
_TWO_PARTS = {"world": 2, "expert_parallel_size": 2}
_SUPER = zero(offload_optimizer={"device": "cpu", "super_offload": True})
_HALF = zero(offload_optimizer={"device": "cpu", "ratio": 0.5})
_QUANTIZED = zero(zero_quantized_weights=True)

CASES = [
    # -- precision ---------------------------------------------------------------------------------------------------
    *(
        breaks("dynamic-loss-scale", fp16=True, device="cuda", deepspeed={"fp16": {key: 0}})
        for key in ("min_loss_scale", "loss_scale_window")
    ),
    keeps("dynamic-loss-scale", device="cuda", deepspeed={"fp16": {"min_loss_scale": 0}}),
    keeps("param-dtype-agrees", bf16=True, deepspeed={"data_types": {"param_dtype": "bfloat16"}}),
    keeps("param-dtype-agrees", deepspeed={"data_types": {"param_dtype": "float"}}),
    keeps("fp16-autocast", device="cuda", deepspeed=autocast("float16", enabled=False)),
    *(breaks("fp16-autocast", device="cuda", deepspeed=autocast(dtype)) for dtype in ("fp16", "half")),
    breaks("autocast-on-float32", fp16=True, device="cuda", deepspeed=autocast("bfloat16")),
    breaks(
        "master-weights-need-zero",
        "fp16-master-weights-need-cpu-adam",
        "fp16-needs-zero",
        fp16=True,
        zero_stage=0,
        device="cuda",
        deepspeed=_FP16_MASTER,
    ),
    keeps(
        "fp16-master-weights-need-cpu-adam",
        fp16=True,
        device="cuda",
        zero_stage=2,
        offload_optimizer="cpu",
        deepspeed={**_FP16_MASTER, **adam("Adam")},
    ),
    keeps(
        "bf16-master-weights-offload-needs-cpu-adam",
        bf16=True,
        zero_stage=2,
        offload_optimizer="cpu",
        deepspeed=_BF16_MASTER,
    ),
    keeps(
        "bf16-stage-1-accumulation-needs-norm",
        bf16=True,
        zero_stage=1,
        max_grad_norm=0.0,
        grad_accum_dtype="bf16",
        deepspeed=_NO_NORM,
    ),
    keeps(
        "bf16-stage-1-accumulation-needs-norm",
        "compute-grad-norm-off",
        bf16=True,
        zero_stage=1,
        max_grad_norm=0.0,
        grad_accum_dtype="fp32",
        offload_optimizer="cpu",
        deepspeed=_NO_NORM,
    ),
    breaks(
        "bf16-stage-1-accumulation-needs-norm",
        "compute-grad-norm-off",
        "nvme-optimizer-needs-stage-3",
        bf16=True,
        zero_stage=1,
        max_grad_norm=0.0,
        grad_accum_dtype="fp32",
        offload_optimizer="nvme",
        nvme_path="/nvme",
        deepspeed=_NO_NORM,
    ),
    keeps("quantized-gradients-need-fp16", bf16=True),
    breaks("quantized-gradients-need-fp16", device="cuda", zero_stage=3, deepspeed=_INT4),
    breaks(
        "quantized-gradients-need-fp16",
        fp16=True,
        device="cuda",
        zero_stage=3,
        communication_data_type="fp32",
        deepspeed=_INT4,
    ),
    keeps(
        "quantized-gradients-need-fp16",
        bf16=True,
        device="cuda",
        zero_stage=3,
        communication_data_type="fp16",
        deepspeed=_INT4,
    ),
    breaks(
        "quantized-gradients-need-fp16",
        device="cuda",
        zero_stage=3,
        communication_data_type="fp16",
        deepspeed={**autocast("bfloat16"), **_INT4},
    ),
    breaks("half-at-stage-0-in-parts", "lamb-needs-whole-matrices", bf16=True, **_LAMB, **_TWO_PARTS),
    breaks("half-at-stage-0-in-parts", bf16=True, device="cuda", zero_stage=0, **_DS_ADAM, **_TWO_SLICES),
    breaks("half-at-stage-0-in-parts", bf16=True, device="cuda", zero_stage=0, **_ADAM, **_TWO_SLICES),
    keeps("half-at-stage-0-in-parts", bf16=True, zero_stage=0, **_TWO_SLICES),
    keeps("half-at-stage-0-in-parts", bf16=True, zero_stage=0, optim="sgd", **_TWO_SLICES),
    keeps("half-at-stage-0-in-parts", "lamb-needs-whole-matrices", **_LAMB, **_TWO_PARTS),
    keeps("half-at-stage-0-in-parts", bf16=True, device="cuda", zero_stage=1, **_DS_ADAM, **_TWO_SLICES),
    keeps("half-at-stage-0-in-parts", bf16=True, **_LAMB),
    keeps("fp16-needs-zero", "lamb-in-fp16", fp16=True, device="cuda", zero_stage=0, optim="lamb"),
    # -- ZeRO --------------------------------------------------------------------------------------------------------
    breaks("nvme-optimizer-needs-stage-3", zero_stage=1, offload_optimizer="nvme", nvme_path="/nvme"),
    keeps("nvme-path-writable", "nvme-needs-path", offload_param="nvme", environment=machine(writable=False)),
    keeps("nvme-needs-libaio", environment=machine(libaio=False)),
    keeps("nvme-needs-libaio", offload_optimizer="cpu", environment=machine(libaio=False)),
    keeps("nvme-needs-libaio", offload_param="cpu", environment=machine(libaio=False)),
    breaks("nvme-needs-libaio", offload_optimizer="nvme", nvme_path="/nvme", environment=machine(libaio=False)),
    breaks("nvme-needs-path", zero_stage=3, offload_optimizer="nvme"),
    keeps("partial-offload-needs-stage-3", zero_stage=2, deepspeed=optimizer_on("none", ratio=0.5)),
    keeps("partial-offload-needs-cpu-adam", zero_stage=3, deepspeed=optimizer_on("none", ratio=0.5)),
    keeps(
        "partial-offload-needs-cpu-adam",
        "partial-offload-needs-stage-3",
        zero_stage=2,
        deepspeed=optimizer_on("cpu", ratio=0.5),
    ),
    breaks("compute-grad-norm-off", zero_stage=3, max_grad_norm=0.0, deepspeed=_NO_NORM),
    breaks("compute-grad-norm-off", zero_stage=2, max_grad_norm=0.0, offload_optimizer="cpu", deepspeed=_NO_NORM),
    keeps("bucket-is-even", zero_stage=3, deepspeed=zero(allgather_bucket_size=1000001)),
    breaks("bucket-is-even", zero_stage=2, deepspeed=zero(allgather_bucket_size=1000001)),
    keeps("predivide-with-reduce-scatter", zero_stage=0, deepspeed={"prescale_gradients": True}),
    breaks("predivide-with-reduce-scatter", zero_stage=2, deepspeed={"gradient_predivide_factor": 2.0}),
    keeps("predivide-with-reduce-scatter", zero_stage=1, deepspeed={"gradient_predivide_factor": 2.0}),
    breaks("zeropp-needs-stage-3", zero_stage=2, world=2, deepspeed=zero(zero_hpz_partition_size=2)),
    breaks("zeropp-needs-stage-3", zero_stage=2, deepspeed=_INT4),  # not read, so nothing else is wrong with it
    keeps("zeropp-needs-stage-3", zero_stage=2, deepspeed=zero(zero_quantized_nontrainable_weights=True)),
    breaks("zeropp-quantization-needs-gpu", "quantized-gradients-need-fp16", zero_stage=3, deepspeed=_INT4),
    keeps("hpz-without-nvme-parameters", zero_stage=3, world=2, offload_param="nvme", nvme_path="/nvme"),
    keeps(
        "hpz-without-nvme-parameters",
        zero_stage=3,
        world=2,
        offload_param="nvme",
        nvme_path="/nvme",
        deepspeed=zero(zero_hpz_partition_size=1),
    ),
    keeps("quantized-gradients-without-tensor-parallelism", zero_stage=3, **_TWO_SLICES),
    keeps("quantized-gradients-need-reduce-scatter", zero_stage=3, deepspeed=zero(reduce_scatter=False)),
    keeps(
        "quantized-gradients-need-reduce-scatter",
        fp16=True,
        device="cuda",
        zero_stage=3,
        deepspeed=zero(reduce_scatter=True, zero_quantized_gradients=True),
    ),
    # -- SuperOffload and ZenFlow ------------------------------------------------------------------------------------
    breaks(
        "superoffload-needs-stage-3",
        device="cuda",
        zero_stage=3,
        deepspeed=optimizer_on("nvme", nvme_path="/nvme", super_offload=True),
    ),
    breaks(
        "superoffload-needs-stage-3", device="cuda", zero_stage=3, deepspeed=optimizer_on("none", super_offload=True)
    ),
    keeps("zenflow-without-accumulation", gradient_accumulation_steps=2),
    breaks("zenflow-needs-offload", **_ZENFLOW, offload_optimizer="nvme", nvme_path="/nvme"),
    # -- optimizers --------------------------------------------------------------------------------------------------
    keeps("optimizer-needs-gpu", optim="lion_32bit", offload_optimizer="cpu", zero_stage=2),
    breaks("optimizer-needs-gpu", optim="lion_32bit", zero_stage=2),
    breaks(
        "optimizer-needs-gpu",
        "optimizer-without-cpu-version",
        "lamb-needs-whole-tensors",
        optim="lamb",
        offload_optimizer="cpu",
        zero_stage=2,
    ),
    keeps("optimizer-without-cpu-version", client_optimizer="an object", offload_optimizer="cpu", zero_stage=2),
    *(
        breaks("torch-adam-parameters", deepspeed=adam(kind, torch_adam=True, fp32_optimizer_states=True))
        for kind in ("Adam", "AdamW")
    ),
    *(
        breaks("deepspeed-adam-parameters", deepspeed=adam(kind, torch_adam=False, fused=True))
        for kind in ("Adam", "AdamW")
    ),
    keeps("deepspeed-adam-parameters", deepspeed=adam("SGD", foreach=True)),
    breaks(
        "untested-optimizer",
        client_optimizer="an object",
        zero_stage=1,
        deepspeed={"zero_allow_untested_optimizer": False},
    ),
    keeps("optimizer-needs-package", environment=_BARE),
    keeps("muon-stage-3-reduce-scatter", optim="muon", zero_stage=3, deepspeed=zero(reduce_scatter=False)),
    keeps("muon-bf16-stage-1-accumulation", bf16=True, zero_stage=1, grad_accum_dtype="fp32", **_TWO_SLICES),
    keeps("muon-bf16-stage-1-accumulation", optim="muon", zero_stage=1, **_TWO_SLICES),
    keeps(
        "muon-bf16-stage-1-accumulation", optim="muon", bf16=True, zero_stage=1, grad_accum_dtype="bf16", **_TWO_SLICES
    ),
    keeps("muon-bf16-stage-1-accumulation", optim="muon", bf16=True, zero_stage=1, grad_accum_dtype="fp32"),
    keeps("modules-need-low-rank", client_optimizer="an object", optim_target_modules="all-linear"),
    breaks("modules-need-low-rank", optim="adafactor", zero_stage=0, optim_target_modules="all-linear"),
    keeps("optimizer-needs-bitsandbytes", optim="adafactor", zero_stage=0, environment=machine("bitsandbytes")),
    keeps("optimizer-needs-whole-matrices", optim="adamw_8bit", zero_stage=0, **_TWO_SLICES),
    breaks("optimizer-needs-whole-matrices", optim="adafactor", zero_stage=0, **_TWO_PARTS),
    keeps("schedule-free-needs-float32", optim="adafactor", zero_stage=0, bf16=True),
    keeps("schedule-free-counts-warmup", optim="adafactor", zero_stage=0, warmup_steps=0.1),
    # -- tensor parallelism ------------------------------------------------------------------------------------------
    breaks("tensor-parallelism-of-one-rank", deepspeed={"tensor_parallel": {**_LIGER, "kernel_inject": True}}),
    keeps("tensor-parallel-inference-kernels", deepspeed={"tensor_parallel": {"kernel_inject": False}}, **_TWO_SLICES),
    keeps("parallel-loss-needs-parallel-head", deepspeed={"tensor_parallel": _LIGER}, **_TWO_SLICES),
    # -- the Trainer -------------------------------------------------------------------------------------------------
    *(breaks("pipeline-of-one-stage", deepspeed={"pipeline": {"stages": stages}}) for stages in (1, "auto")),
    keeps("weight-quantization-in-training"),
    *(  # without activation_checkpointing, nothing else is wrong with the block
        breaks("activation-checkpointing-is-enabled", deepspeed={"activation_checkpointing": {key: True}})
        for key in ("cpu_checkpointing", "partition_activations", "contiguous_memory_optimization")
    ),
    breaks("saving-is-the-trainers", deepspeed={"checkpoint": {"parallel_write": {"pipeline_stage": True}}}),
    breaks("saving-is-the-trainers", deepspeed={"checkpoint": {"checkpoint_serialization": False}}),
    breaks("saving-is-the-trainers", deepspeed={"disable_allgather": True}),
    keeps("saving-is-the-trainers", deepspeed={"checkpoint": {"checkpoint_serialization": True}}),
    breaks(
        "contiguous-activations",
        activation_checkpointing=True,
        deepspeed={"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 2}},
    ),
    keeps("experts-without-zeropp", zero_stage=3, **_TWO_PARTS),
    keeps("experts-with-plain-offload", zero_stage=3, **_TWO_PARTS, offload_param="cpu", offload_optimizer="cpu"),
    breaks("experts-without-zeropp", device="cuda", zero_stage=3, **_TWO_PARTS, deepspeed=_QUANTIZED),
    breaks("experts-with-plain-offload", zero_stage=3, **_TWO_PARTS, offload_param="nvme", nvme_path="/nvme"),
    breaks("experts-with-plain-offload", **_ZENFLOW, **_TWO_PARTS, offload_optimizer="cpu"),
    breaks("experts-with-plain-offload", "superoffload-needs-gpu", zero_stage=3, **_TWO_PARTS, deepspeed=_SUPER),
    breaks("experts-with-plain-offload", "partial-offload-needs-cpu-adam", zero_stage=3, **_TWO_PARTS, deepspeed=_HALF),
    keeps("batch-size-search-needs-one-rank-per-replica", auto_find_batch_size=True, **_TWO_PARTS),
    keeps("batch-size-search-needs-own-router-loss", global_router_aux_loss=True),
    *(keeps(f"{name}-needs-package", environment=_BARE) for name in ("datastates", "tensorboard", "wandb", "comet")),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{'breaks' if case.about in case.broken else 'keeps'}-{case.about}"
)
def test_the_rule_decides_as_expected(case: Case) -> None:
    assert case.about in {rule.name for rule in RULES}
    # Names of the rules that these arguments break; fails on any other reason to refuse them.
    sentences = said(**case.arguments)
    names = [[rule.name for rule in RULES if f"{rule.needs}. {rule.remedy}" in text] for text in sentences]
    assert all(names), sentences
    assert sorted([name for found in names for name in found]) == sorted(case.broken)


# -- the examples are complete -----------------------------------------------------------------------------------------

# Changes that no configuration can tell: a line of the condition, and why.
WITHOUT_EFFECT = {
    "without member 1 in ('mean', 'avg', 'average')": "the schema takes mean and sum only",
    "without member 2 in ('mean', 'avg', 'average')": "the schema takes mean and sum only",
    "without c.optimizer in ('adam', 'adamw') in c.optimizer in ('adam', 'adamw') and c.on('optimizer.params.": (
        "the schema takes these parameters from Adam and AdamW only"
    ),
    "without c.zero('zenflow') is not None in c.zero('zenflow') is not None and (c.zero('zenflow.select_strategy'": (
        "without ZenFlow both sides of the comparison are defaults, which agree"
    ),
}


@pytest.fixture(scope="module")
def contexts() -> list[rule_context.RuleContext]:
    """What the rules are asked about, for all examples."""
    found: list[rule_context.RuleContext] = []

    def note(context: rule_context.RuleContext, uncertain: Any) -> list[rule_context.Rule]:
        found.append(context)
        return []

    arguments = [case.arguments for case in CASES]
    for example in EXAMPLES.values():
        arguments += [example.breaks, {**example.breaks, **example.repair}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "broken_rules", note)
        for each in arguments:
            compiled(**each)
    assert len(found) == len(arguments)
    return found


def answers(rules: Any, contexts: list[Any]) -> Any:
    """One after the other, what each rule says in each context; nothing where it is not broken."""
    for rule in rules:
        for context in contexts:
            try:
                yield rule.sentence(context) if rule.broken(context) else ""
            except Exception as error:
                yield type(error)


def unnoticed(module: ModuleType, use: Any) -> list[str]:
    """Changes of ``module`` that give no other answer, by ``use``, which maps a module to its answers."""
    before = list(use(module))
    assert {type(answer) for answer in before} == {str}
    same = [what for what, changed in mutants(module) if all(a == b for a, b in zip(use(changed), before, strict=True))]
    return [what for what in same if not any(known in what for known in WITHOUT_EFFECT)]


def fields_of(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "rules"), MODULES.items())
def test_no_condition_can_change_unnoticed(
    name: str, rules: tuple[str, ...], contexts: list[rule_context.RuleContext]
) -> None:
    module = importlib.import_module(f"ds_trainer.config.rules.{name}")

    def use(changed: ModuleType) -> Any:
        return answers([rule for part in rules for rule in getattr(changed, part)], contexts)

    assert unnoticed(module, use) == []


def test_no_question_of_a_rule_can_change_unnoticed(contexts: list[rule_context.RuleContext]) -> None:
    def use(changed: ModuleType) -> Any:
        return answers(
            [changed.Rule(**fields_of(rule)) for rule in RULES],
            [changed.RuleContext(**fields_of(context)) for context in contexts],
        )

    assert unnoticed(rule_context, use) == []
