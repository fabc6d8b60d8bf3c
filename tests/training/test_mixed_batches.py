"""Micro-batches that leave modules out, on some ranks only: the numbers of one process, or one error on all ranks."""

from __future__ import annotations

import json
import os
import time
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.zero3.module_guard import ModuleGuard
from tests.support.compare import assert_equal, relative
from tests.support.mixed_batches import Experts, Images, MixtureModel, Rows, TwoTowers, collate, plain_loss
from tests.support.models import tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, close_pools, pool
from tests.support.runs import train_and_report

SAMPLES, GLOBAL_BATCH, STEPS = 24, 8, 6  # two epochs of three steps; on two ranks two micro-batches of two rows each
SEED = 42
OVERLAP = {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": True}}


def images(where: Any) -> list[int]:
    """Rows of the data with an image, given ``where(epoch, step, rank, micro_batch)`` of a run on two ranks.

    A row has its image in all epochs: one that is not used in an epoch keeps that of the other.
    """
    found: set[int] = set()
    for epoch in range(2):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        for index, row in enumerate(order):
            step, inside = divmod(index, GLOBAL_BATCH)
            micro_batch, rest = divmod(inside, 4)
            if where(epoch, step, rest // 2, micro_batch):
                found.add(row)
    return sorted(found)


def without_images(epoch: int, step: int, rank: int, micro_batch: int) -> list[int]:
    """The rows of one micro-batch."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    first = step * GLOBAL_BATCH + micro_batch * 4 + rank * 2
    return order[first : first + 2]


def first_epoch(rule: Any) -> list[int]:
    return images(lambda epoch, step, rank, micro_batch: epoch == 0 and rule(step, rank, micro_batch))


EVERYWHERE = list(range(SAMPLES))
IMAGE_ROWS: dict[str, list[int]] = {
    "nowhere": [],
    "everywhere": EVERYWHERE,
    "on rank 0": first_epoch(lambda step, rank, micro_batch: rank == 0),
    "on rank 1": first_epoch(lambda step, rank, micro_batch: rank == 1),
    "in some micro-batches": first_epoch(lambda step, rank, micro_batch: micro_batch == 0),
    "in other micro-batches": first_epoch(lambda step, rank, micro_batch: micro_batch == rank),
    "not in one of the second epoch": [r for r in EVERYWHERE if r not in without_images(1, 1, 1, 0)],
}


def make_data(case: str) -> Rows:
    return Rows(SAMPLES, Images(IMAGE_ROWS[case]))


@cache
def reference(case: str, steps: int = STEPS, clip: float = 0.0) -> Trajectory:
    sizes: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "steps": steps, "clip": clip}
    return train_plainly(TwoTowers(), make_data(case), loss=plain_loss, collate=collate, **sizes)


def job(case: str, tmp_path: Any, **arguments: Any) -> Any:
    values: dict[str, Any] = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        max_grad_norm=0.0,
        remove_unused_columns=False,
    )
    data = partial(make_data, case)
    return partial(train_and_report, TwoTowers, data, str(tmp_path), collator=collate, **{**values, **arguments})


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("stage", "case"),
    [*product((0, 1, 2), IMAGE_ROWS), *product((3,), ("nowhere", "everywhere", "in some micro-batches"))],
)
def test_mixed_batches_train_like_one_process(stage: int, case: str, tmp_path: Any) -> None:
    """ZeRO 0, 1 and 2: wherever images are missing. ZeRO 3: where all ranks call the tower, or none."""
    steps = STEPS if stage < 3 else STEPS // 2  # the positions are those of the first epoch
    for found in pool(2).run(job(case, tmp_path, zero_stage=stage, max_steps=steps), timeout=90):
        assert_equal(found, reference(case, steps))


FLOAT32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("arguments", "case"),
    [
        ({"offload_optimizer": "cpu"}, "on rank 0"),
        ({"deepspeed": OVERLAP}, "on rank 0"),
        ({"deepspeed": OVERLAP}, "in some micro-batches"),  # the last micro-batch of a step does not use the tower
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_mixed_batches_with_offload_and_overlap_train_like_one_process(
    stage: int, arguments: dict[str, Any], case: str, tmp_path: Any
) -> None:
    for found in pool(2).run(job(case, tmp_path, zero_stage=stage, **arguments), timeout=90):
        assert_equal(found, reference(case))


@pytest.mark.parametrize(
    ("stage", "settings"), [(0, {}), (1, {}), (2, {}), (1, FLOAT32_GRADIENTS), (2, FLOAT32_GRADIENTS)]
)
def test_bf16(stage: int, settings: dict[str, Any], tmp_path: Any) -> None:
    """All ranks clip by the same norm, and hold the same weights; near the numbers of float32."""
    arguments = {"zero_stage": stage, "bf16": True, "max_grad_norm": 0.1, "deepspeed": settings}
    found = pool(2).run(job("on rank 0", tmp_path, **arguments), timeout=90)
    assert_equal(found[0], found[1], 0.0)
    wanted = reference("on rank 0", clip=0.1)
    assert relative(found[0].losses, wanted.losses) < 0.01
    assert relative(found[0].grad_norms, wanted.grad_norms) < 0.05


# -- ZeRO-3: one error on all ranks ------------------------------------------------------------------------------------


def end_of_a_program(case: str, directory: str, **arguments: Any) -> None:
    """Train, write down what that ends with (error, text, seconds, steps done), and end, as a program does."""
    values: dict[str, Any] = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        zero_stage=3,
    )
    args = TrainingArguments(directory, **{**values, **arguments})
    trainer = Trainer(TwoTowers(), args, train_dataset=make_data(case), data_collator=collate)
    started, error_and_message = time.monotonic(), ("", "")
    try:
        trainer.train()
    except RuntimeError as error:
        error_and_message = (type(error).__name__, str(error))
    found = (*error_and_message, time.monotonic() - started, trainer.state.global_step)
    Path(directory, f"rank{args.process_index}.json").write_text(json.dumps(found))
    time.sleep(1.0)  # the store is in the process of rank 0
    os._exit(1)


def results_of_ranks(case: str, directory: Path, **arguments: Any) -> list[Any]:
    """:func:`end_of_a_program` on two ranks."""
    close_pools()
    with pytest.raises(RankFailure):
        pool(2).run(partial(end_of_a_program, case, str(directory), **arguments), timeout=90)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("case", "step", "threshold"),
    [
        ("on rank 0", 0, 0),
        ("on rank 1", 0, 0),
        ("on rank 1", 0, 100_000),  # small parameters are on all ranks: nothing is gathered at all
        ("in other micro-batches", 0, 0),
        ("not in one of the second epoch", 4, 0),
        ("not in one of the second epoch", 4, 100_000),
    ],
)
def test_at_stage_3_different_modules_end_all_ranks_and_are_named(
    case: str, step: int, threshold: int, tmp_path: Path
) -> None:
    settings = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold}}
    found = results_of_ranks(case, tmp_path, deepspeed=settings)
    assert {kind for kind, *_ in found} <= {"ModulesDiffer", "PeerFailure"}
    for _, text, seconds, done in found:
        assert "different modules under ZeRO-3" in text
        assert "'patches'" in text  # the first module of the tower
        assert "'text.0'" in text  # and what the other rank runs
        assert "pixel_values" in text
        assert f"optimizer step {step + 1}, micro-batch" in text
        assert seconds < 40
        assert done == step


# -- experts that are modules of their own -----------------------------------------------------------------------------

# Rows in the order of the data: the two of rank 0, the two of rank 1. Expert 3 gets no token anywhere.
TOKENS = Experts([[0], [0, 1], [2], [2, 1]])


def make_tokens() -> Rows:
    return Rows(SAMPLES, TOKENS)


def mixture_job(make_model: Any, tmp_path: Any, **arguments: Any) -> Any:
    values: dict[str, Any] = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    return partial(train_and_report, make_model, make_tokens, str(tmp_path), **{**values, **arguments})


@cache
def mixture_reference(make_model: Any) -> Trajectory:
    return train_plainly(
        make_model(), make_tokens(), loss=plain_loss, global_batch=GLOBAL_BATCH, steps=STEPS, seed=None
    )


MODELS = {
    "plain": MixtureModel,
    "input without gradient": partial(MixtureModel, frozen_embedding=True),
    "input by keyword": partial(MixtureModel, by_keyword=True),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "kind"), [(0, "plain"), (1, "plain"), (2, "plain"), *product((3,), MODELS)])
def test_experts_with_tokens_on_one_rank_only(stage: int, kind: str, tmp_path: Any) -> None:
    settings: dict[str, Any] = {}
    if stage == 3:
        settings["deepspeed"] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    for found in pool(2).run(mixture_job(MODELS[kind], tmp_path, zero_stage=stage, **settings), timeout=90):
        assert_equal(found, mixture_reference(MODELS[kind]))


# -- what the guard costs ----------------------------------------------------------------------------------------------


def agreements_per_step(case: str, directory: str, checkpointing: bool = False, evaluations: bool = False) -> list[int]:
    """How often this rank could not tell by itself what the others do, step by step."""
    from transformers import TrainerCallback

    counts: list[int] = []
    agree = ModuleGuard._agree

    def counted(self: ModuleGuard, *arguments: Any) -> None:
        counts[-1] += 1
        agree(self, *arguments)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
            counts.append(0)

    args = TrainingArguments(
        directory,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=9,
        train_sampling_strategy="sequential",
        save_strategy="no",
        eval_strategy="epoch" if evaluations else "no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        deepspeed={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        gradient_checkpointing=checkpointing,
    )
    data = Rows(SAMPLES, Images(ALTERNATING if case == "alternating" else IMAGE_ROWS[case]))
    model = tiny_llama() if checkpointing else TwoTowers()
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collate, callbacks=[Steps()])
    counts.append(0)
    ModuleGuard._agree = counted  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        ModuleGuard._agree = agree  # type: ignore[method-assign]
        trainer.engine.close()
    return counts[1:]


ALTERNATING = [row for row in range(SAMPLES) if row % 8 < 4]  # in the order of the data: every other micro-batch


@pytest.mark.cases(1)
@pytest.mark.parametrize("evaluations", [False, True])
def test_ranks_need_no_agreement_on_known_module_paths(evaluations: bool, tmp_path: Any) -> None:
    for counts in pool(2).run(agreements_per_step, "everywhere", str(tmp_path), False, evaluations):
        assert counts[0] > 20
        first_evaluation = 2 if evaluations else 0  # it belongs to the step before it
        assert [step for step, count in enumerate(counts) if count] == sorted({0, first_evaluation})


def test_ranks_need_no_agreement_with_activation_checkpointing(tmp_path: Any) -> None:
    for counts in pool(2).run(agreements_per_step, "nowhere", str(tmp_path), True):
        assert counts[0] > 20
        assert set(counts[1:]) == {0}


def test_alternating_module_paths_cost_one_agreement_per_micro_batch(tmp_path: Any) -> None:
    """Images in every other micro-batch, on all ranks: no error, and hardly a cost after the first of each kind."""
    for counts in pool(2).run(agreements_per_step, "alternating", str(tmp_path)):
        assert counts[0] > 20
        assert counts[1] == 3  # how a pass ends is seen when the next one begins
        assert set(counts[2:]) == {2}
