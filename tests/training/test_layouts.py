"""Every layout gives the numbers of one process: data, context, sequence and tensor parallelism, on ZeRO 0-3.

Losses, gradient norms before clipping and final weights against plain PyTorch in one process, which sees every document
as a row of its own. A pairwise choice of the full product runs by default; ``pytest -m matrix`` runs all of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.assembly import Assembly
from tests.support.compare import assert_equal, distances
from tests.support.layout_cases import CLIP, Case, all_cases, pairwise_cases
from tests.support.layouts import DATA, MODELS, Documents, PlainAttention, documents_as_rows, pad
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report

GLOBAL_BATCH = 16
# Adam divides a gradient by its size: where it is nothing but rounding, so would the step be, with a smaller epsilon.
ADAM_EPSILON = 1e-5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch_fused", "learning_rate": 2e-3, "adam_epsilon": ADAM_EPSILON},
    "sgd": {"optim": "sgd", "learning_rate": 0.3},
}


def adamw(model: torch.nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1.0, eps=ADAM_EPSILON)  # the rate is set step by step


@cache
def reference(model: str, data: str, optimizer: str, clip: float) -> Trajectory:
    return train_plainly(
        MODELS[model](),
        Documents(DATA[data]()),
        optimizer=adamw if optimizer == "adamw" else optimizer,
        clip=clip,
        learning_rate=OPTIMIZERS[optimizer]["learning_rate"],
        collate=documents_as_rows,
    )


def arguments_of(case: Case) -> dict[str, Any]:
    layout = case.layout
    arguments = {
        **OPTIMIZERS[case.optimizer],
        "per_device_train_batch_size": GLOBAL_BATCH // (layout.dp * case.accumulation),
        "gradient_accumulation_steps": case.accumulation,
        "max_grad_norm": case.clip,
        "zero_stage": case.stage,
        "tensor_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "sequence_parallel_size": layout.sp,
    }
    if case.model == "plain" and layout.tp > 1:
        arguments["deepspeed"] = {"tensor_parallel": {"partition_config": PlainAttention.partition_config}}
    return arguments


def run(case: Case, output_dir: Any, trainer_class: type[Trainer] = Trainer, **more: Any) -> list[Trajectory]:
    job = partial(train_and_report, MODELS[case.model], DATA[case.data], str(output_dir), trainer_class, pad)
    return pool(case.layout.world_size).run(partial(job, **arguments_of(case), **more))


def check(case: Case, output_dir: Any) -> None:
    wanted = reference(case.model, case.data, case.optimizer, case.clip)
    assert case.clip == 0.0 or min(wanted.grad_norms) > CLIP  # so that clipping always acts
    for found in run(case, output_dir):
        assert_equal(found, wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", pairwise_cases(), ids=lambda case: case.name)
def test_trajectory_is_that_of_one_process(case: Case, tmp_path: Any) -> None:
    check(case, tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_case" in metafunc.fixturenames:
        asked = "matrix" in metafunc.config.option.markexpr
        metafunc.parametrize("any_case", list(all_cases()) if asked else [], ids=lambda case: case.name)


@pytest.mark.matrix
def test_whole_matrix(any_case: Case, tmp_path: Any) -> None:
    check(any_case, tmp_path)


def far_from_reference(case: Case, found: Trajectory) -> dict[str, float]:
    return distances(found, reference(case.model, case.data, case.optimizer, case.clip))


# -- what else runs at the same time ---------------------------------------------------------------------------------

ALL_AXES = ParallelLayout(8, tp=2, cp=2, sp=2)
SHARDED_LAYOUT = ParallelLayout(4, cp=2, sp=2)
PARTITIONED_AND_SHARDED = ParallelLayout(4, tp=2, sp=2)


def case_of(layout: ParallelLayout, stage: int, **values: Any) -> Case:
    rest = {"optimizer": "adamw", "clip": CLIP, "accumulation": 2, "data": "padded", "model": "grouped_query"}
    return Case(layout, stage, **{**rest, **values})


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layout", "stage"),
    [(SHARDED_LAYOUT, 0), (SHARDED_LAYOUT, 3), (PARTITIONED_AND_SHARDED, 2), (ALL_AXES, 3)],
    ids=["cut0", "cut3", "both2", "all3"],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(layout: ParallelLayout, stage: int, reentrant: bool, tmp_path: Any) -> None:
    case = case_of(layout, stage, data="packed")
    kwargs = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for found in run(case, tmp_path, **kwargs):
        assert_equal(found, reference("grouped_query", "packed", "adamw", CLIP))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layout", "stage"),
    [(SHARDED_LAYOUT, 1), (PARTITIONED_AND_SHARDED, 2), (ALL_AXES, 3)],
    ids=["cut1", "both2", "all3"],
)
def test_optimizer_offload(layout: ParallelLayout, stage: int, tmp_path: Any) -> None:
    for found in run(case_of(layout, stage), tmp_path, offload_optimizer="cpu"):
        assert_equal(found, reference("grouped_query", "padded", "adamw", CLIP))


def with_adapters() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    model = MODELS["grouped_query"]()
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "stage"), [(SHARDED_LAYOUT, 0), (SHARDED_LAYOUT, 3), (ParallelLayout(4, sp=2), 2)])
def test_adapters(layout: ParallelLayout, stage: int, tmp_path: Any) -> None:
    """LoRA: most weights are frozen. (Partitioned by tensor parallelism: tests/parity/test_tensor_families.py.)"""
    case = case_of(layout, stage, clip=0.0)
    options: dict[str, Any] = {"optimizer": adamw, "learning_rate": 2e-3, "collate": documents_as_rows}
    wanted = train_plainly(with_adapters(), Documents(DATA["padded"]()), **options)
    job = partial(train_and_report, with_adapters, DATA["padded"], str(tmp_path), Trainer, pad, **arguments_of(case))
    for found in pool(4).run(job):
        assert_equal(found, wanted)


BF16_TOLERANCE = 0.01


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layout", "stage"),
    [(SHARDED_LAYOUT, 1), (SHARDED_LAYOUT, 3), (PARTITIONED_AND_SHARDED, 1), (ALL_AXES, 3)],
    ids=["cut1", "cut3", "both1", "all3"],
)
def test_bf16(layout: ParallelLayout, stage: int, tmp_path: Any) -> None:
    """Within the tolerance that data parallelism in bf16 has too (``test_oracle.py``)."""
    case = case_of(layout, stage, clip=0.0)
    wanted = train_plainly(
        MODELS["grouped_query"](),
        Documents(DATA["padded"]()),
        optimizer=adamw,
        learning_rate=2e-3,
        collate=documents_as_rows,
        autocast=True,
    )
    for found in run(case, tmp_path, bf16=True):
        differences = distances(found, wanted)
        assert differences["losses"] < BF16_TOLERANCE, differences
        assert differences["grad_norms"] < 5 * BF16_TOLERANCE, differences
        assert differences["weights"] < 5 * BF16_TOLERANCE, differences


# -- negative controls -----------------------------------------------------------------------------------------------


class AveragesOverReplicasOnly(Trainer):
    """Negative control: the loss is scaled as if only replicas shared the gradient, as the Ulysses tutorial does."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.engine._averaged_over = self.layout.dp
        return super().training_step(*args, **kwargs)


def test_control_a_wrong_loss_scale_is_detected(tmp_path: Any) -> None:
    case = case_of(SHARDED_LAYOUT, 1, optimizer="sgd", clip=0.0)
    for found in run(case, tmp_path, AveragesOverReplicasOnly):
        assert far_from_reference(case, found)["grad_norms"] > 0.5
        assert far_from_reference(case, found)["weights"] > 1e-3


class ForgetsTheContextGroup(Trainer):
    """Negative control: gradients are averaged over some of the ranks that share them."""

    class _ds_assembly(Assembly):
        def build_engine(self, num_training_steps: int) -> None:
            import ds_trainer.engine.training_engine as module

            kept = module.set_deepspeed_groups, module.verify_engine_topology
            module.set_deepspeed_groups = lambda groups, config: kept[0](
                replace(groups, seq_data_parallel=groups.sp), config
            )
            if self.args.run_name == "unchecked":
                module.verify_engine_topology = lambda *_: None
            try:
                super().build_engine(num_training_steps)
            finally:
                module.set_deepspeed_groups, module.verify_engine_topology = kept


@pytest.mark.extended
def test_a_dropped_group_is_rejected_and_would_be_wrong(tmp_path: Any) -> None:
    case = case_of(SHARDED_LAYOUT, 1, optimizer="sgd", clip=0.0)
    with pytest.raises(RankFailure, match="DeepSpeed's seq_data_parallel ranks:"):
        run(case, tmp_path, ForgetsTheContextGroup)
    for found in run(case, tmp_path, ForgetsTheContextGroup, run_name="unchecked"):
        assert far_from_reference(case, found)["weights"] > 1e-3


class ShiftsAfterTheCut(Trainer):
    """Negative control: each rank shifts the labels of its own part, and the targets at the borders are lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._ds_trainer.losses.sharder is not None  # the layout shards
        self._ds_trainer.losses.sharder.shifts_labels = False  # then the model does it


def test_control_labels_shifted_after_sharding_are_detected(tmp_path: Any) -> None:
    case = case_of(SHARDED_LAYOUT, 1, clip=0.0)
    for found in run(case, tmp_path, ShiftsAfterTheCut):
        assert far_from_reference(case, found)["losses"] > 1e-3
        assert far_from_reference(case, found)["weights"] > 1e-3
