"""Experts over several ranks: loss, gradient norm and weights are those of plain PyTorch in one process.

With SGD and active clipping: Adam would hide a factor in the gradients of the experts.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.parallel import expert_exchange
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.model import expert_division
from ds_trainer.training.model.expert_division import expert_problems
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal, distances
from tests.support.expert_models import CONFIGURATIONS, VOCABULARY, maker
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report

STEPS, BATCH, CLIP, RATE = 5, 16, 0.3, 0.5


def samples() -> list[dict[str, torch.Tensor]]:
    """Samples of 12 tokens; every third has fewer targets, every fifth padding at its end."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(STEPS * BATCH):
        ids = torch.randint(1, VOCABULARY, (12,), generator=generator)
        mask, labels = torch.ones_like(ids), ids.clone()
        if index % 3 == 0:
            labels[:5] = -100
        if index % 5 == 0:
            ids[8:], mask[8:], labels[8:] = 0, 0, -100
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


_oracles: dict[str, Trajectory] = {}


def oracle(family: str, batch: int = BATCH, **options: Any) -> Trajectory:
    """What one process of plain PyTorch does, computed once for each model."""
    key = f"{family} {batch} {options}"
    if key not in _oracles:
        values: dict[str, Any] = dict(optimizer="sgd", learning_rate=RATE, weight_decay=0.0, clip=CLIP)
        _oracles[key] = train_plainly(maker(family, **options)(), samples(), global_batch=batch, steps=STEPS, **values)
    return _oracles[key]


class Case(NamedTuple):
    """One run."""

    ranks: int
    experts: int
    stage: int
    family: str = "qwen3_moe"
    accumulation: int = 1
    recomputes: bool = False
    axes: tuple[tuple[str, int], ...] = ()
    to_one: bool = False
    offloads: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For pytest."""
        others = [f"{axis}{size}" for axis, size in self.axes]
        others += ["recomputes"] * self.recomputes + ["to_one"] * self.to_one + [*self.offloads]
        return "-".join([self.family, f"{self.ranks}ranks", f"ep{self.experts}", f"zero{self.stage}", *others])


def train(case: Case, directory: Any, batch: int = BATCH) -> Trajectory:
    """The run on real ranks, which all report the same."""
    replicas = case.ranks
    for _, size in case.axes:
        replicas //= size
    arguments: dict[str, Any] = dict(
        zero_stage=case.stage,
        expert_parallel_size=case.experts,
        per_device_train_batch_size=batch // replicas // case.accumulation,
        gradient_accumulation_steps=case.accumulation,
        gradient_checkpointing=case.recomputes,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=CLIP,
        self_test="never",
        **{f"{axis}_parallel_size": size for axis, size in case.axes},
    )
    if case.offloads:
        arguments |= {f"offload_{state}": "cpu" for state in case.offloads}
        arguments["deepspeed"] = {"zero_force_ds_cpu_optimizer": False}
    options = {"to_one_expert": True} if case.to_one else {}
    make = maker(case.family, **options)
    reports = pool(case.ranks).run(_train, make, str(directory), arguments)
    for report in reports[1:]:
        assert_equal(report, reports[0], 1e-6)
    return reports[0]


def _train(make: Any, directory: str, arguments: dict[str, Any]) -> Trajectory:
    return train_and_report(make, samples, directory, **arguments)


def compared(case: Case, directory: Any, batch: int = BATCH) -> tuple[Trajectory, Trajectory]:
    """The run, and the oracle."""
    options = {"to_one_expert": True} if case.to_one else {}
    return train(case, directory, batch), oracle(case.family, batch, **options)


def check(case: Case, directory: Any) -> None:
    """They are equal."""
    assert_equal(*compared(case, directory), 2e-6)


DEFAULT = [
    *(Case(2, 2, stage) for stage in range(4)),
    Case(4, 2, 1, accumulation=2),
    Case(4, 2, 3, "deepseek_v3", recomputes=True),
    Case(4, 4, 2, "gpt_oss"),
    Case(2, 2, 2, recomputes=True, accumulation=4),
    Case(2, 2, 3, to_one=True),
    Case(4, 2, 2, "deepseek_v3", axes=(("tensor", 2),)),
]
AXES = [
    *(Case(4, 2, stage, axes=((axis, 2),)) for stage in (1, 3) for axis in ("tensor", "context", "sequence")),
    Case(4, 4, 2, axes=(("context", 2),)),
]
OFFLOADED = [
    Case(2, 2, 1, offloads=("optimizer",)),
    Case(4, 2, 2, accumulation=2, offloads=("optimizer",)),
    Case(4, 2, 3, accumulation=2, offloads=("optimizer",)),
    Case(2, 2, 3, "gpt_oss", offloads=("optimizer", "param")),
]
WHOLE = [Case(2, 1, 3, family) for family in CONFIGURATIONS]
FAMILIES = [Case(2, 2, index % 4, family) for index, family in enumerate(CONFIGURATIONS) if family != "qwen3_moe"]


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.name)
def test_numbers_are_those_of_one_process(case: Case, tmp_path: Any) -> None:
    check(case, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("case", AXES, ids=lambda case: case.name)
def test_other_axes(case: Case, tmp_path: Any) -> None:
    check(case, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("case", OFFLOADED, ids=lambda case: case.name)
def test_offload(case: Case, tmp_path: Any) -> None:
    check(case, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("case", [*FAMILIES, *WHOLE], ids=lambda case: case.name)
def test_families(case: Case, tmp_path: Any) -> None:
    check(case, tmp_path)


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "three micro-batches": ({}, {"gradient_accumulation_steps": 3}),
    "packing": ({}, {"packing": True, "max_length": 32}),
    "packing, sharded": ({}, {"packing": True, "max_length": 34, "sequence_parallel_size": 2}),
    "packing, auxiliary loss": (
        {"output_router_logits": True, "router_aux_loss_coef": 0.1},
        {"packing": True, "max_length": 34},
    ),
    "chunked loss": ({}, {"loss_chunk_tokens": 5}),
    "auxiliary loss": ({"output_router_logits": True, "router_aux_loss_coef": 0.1}, {}),
    "AdamW, clipped": ({}, {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 0.1}),
    "compiled blocks": (
        {},
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_regional": True},
    ),
    "AdamW, offloaded": ({}, {"optim": "adamw_torch", "learning_rate": 1e-3, "offload_optimizer": "cpu"}),
}


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", FEATURES)
def test_features_give_the_numbers_of_whole_experts(name: str, stage: int, tmp_path: Any) -> None:
    options, changes = FEATURES[name]
    arguments = dict(zero_stage=stage, optim="sgd", learning_rate=RATE, max_grad_norm=CLIP, weight_decay=0.0)
    arguments |= dict(max_steps=STEPS, self_test="never", per_device_train_batch_size=2, **changes)
    make = maker("qwen3_moe", **options)
    wanted, found = (
        pool(2).run(_train, make, str(tmp_path / str(size)), {**arguments, "expert_parallel_size": size})[0]
        for size in (1, 2)
    )
    assert_equal(found, wanted, 2e-6)


def test_models_that_cannot_be_divided_are_refused_with_the_remedy() -> None:
    model = maker("qwen3_moe")()
    assert expert_problems(model, 2) == []
    (uneven,) = expert_problems(model, 3)
    assert "does not divide the 4 experts of model.layers.0.mlp.experts. Set it to 1 or 2 or 4." in uneven
    assert expert_problems(model, 3, ranks=6)[0].endswith("Set it to 1 or 2.")
    (without,) = expert_problems(torch.nn.Linear(2, 2), 2)
    assert "Linear has no experts that can be divided" in without


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert_parallel_size=3 must divide the 4 ranks .* Set it to 2 or 4\."):
        ParallelLayout(8, tp=2, ep=3)


def test_experts_whose_forward_was_replaced_are_refused(tmp_path: Any) -> None:
    """Each rank would use the experts that it holds for all tokens, and nothing would notice."""
    arguments = {"expert_parallel_size": 2, "zero_stage": 1, "max_steps": 1, "self_test": "never"}
    with pytest.raises(RankFailure, match=r"model\.layers\.0\.mlp\.experts has run without sending tokens"):
        pool(2).run(_train, _with_own_forward, str(tmp_path), arguments)


def _with_own_forward() -> Any:
    model = maker("qwen3_moe")()
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.forward = lambda hidden, *_: hidden
    return model


def _use(directory: str, use: str, arguments: dict[str, Any]) -> Any:
    """What a trained model gives."""
    values = dict(per_device_train_batch_size=4, max_steps=1, optim="sgd", save_strategy="no", self_test="never")
    args = TrainingArguments(directory, use_cpu=True, learning_rate=RATE, **{**values, **arguments})
    trainer = Trainer(maker("qwen3_moe")(), args, train_dataset=samples())
    trainer.train()
    if use == "evaluate":
        return trainer.evaluate(samples()[:10])["eval_loss"]
    if use == "predict":
        return torch.as_tensor(trainer.predict(samples()[:10]).predictions)
    rank = torch.distributed.get_rank()  # ranks have prompts and answers of other lengths
    return trainer.model.generate(torch.arange(1, 7 + rank)[None], max_new_tokens=4 + 3 * rank, do_sample=False)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("use", ["evaluate", "predict", "generate"])
def test_trained_models_are_used_as_with_whole_experts(use: str, stage: int, tmp_path: Any) -> None:
    """Padding too has its numbers in a prediction."""
    whole, divided = (
        pool(2).run(_use, str(tmp_path / str(size)), use, {"zero_stage": stage, "expert_parallel_size": size})
        for size in (1, 2)
    )
    for found, wanted in zip(divided, whole, strict=True):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), rtol=1e-5, atol=1e-5)


class _Writes(TrainerCallback):
    """Saves weights as scripts do."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **ignored: Any) -> None:
        torch.save(model.state_dict(), f"{args.output_dir}/{state.is_world_process_zero}.bin")


def _written(directory: str, stage: int) -> str:
    args = TrainingArguments(
        directory, max_steps=1, use_cpu=True, zero_stage=stage, expert_parallel_size=2, optim="sgd"
    )
    trainer = Trainer(maker("qwen3_moe")(), args, train_dataset=samples(), callbacks=[_Writes()])
    with pytest.raises(ConfigError) as error:
        trainer.train()
    with pytest.raises(ConfigError, match=r"mlp\.experts was copied"):  # for averages
        copy.deepcopy(trainer.model)
    whole = trainer.accelerator.get_state_dict(trainer.model)
    shapes = {name: value.shape for name, value in maker("qwen3_moe")().state_dict().items()}
    assert {name: value.shape for name, value in whole.items()} == shapes
    return str(error.value)


def test_a_script_writes_no_part_of_the_experts(tmp_path: Any) -> None:
    for text in pool(2).run(_written, str(tmp_path), 1):
        assert "expert_parallel_size divides the experts" in text and "get_state_dict" in text


def _padding_on_a_rank() -> list[dict[str, torch.Tensor]]:
    """Each second sample has no token but one, and no target: with a batch of 1, a rank has nothing else."""
    rows = samples()
    for row in rows[1::2]:
        row["attention_mask"][1:], row["labels"][:] = 0, -100
    return rows


def _train_on_padding(make: Any, directory: str, arguments: dict[str, Any]) -> Trajectory:
    return train_and_report(make, _padding_on_a_rank, directory, **arguments)


def _short_epoch() -> list[dict[str, torch.Tensor]]:
    """In its second step the last micro-batch has one sample: the other ranks have none."""
    return samples()[:25]


def _train_short_epochs(make: Any, directory: str, arguments: dict[str, Any]) -> Trajectory:
    return train_and_report(make, _short_epoch, directory, **arguments)


@pytest.mark.parametrize("ranks, stage", [(2, 1), (2, 3), (4, 2)])
def test_a_rank_without_samples_keeps_what_others_send_its_experts(ranks: int, stage: int, tmp_path: Any) -> None:
    values: dict[str, Any] = dict(zero_stage=stage, optim="sgd", learning_rate=RATE, max_steps=4, self_test="never")
    values |= dict(expert_parallel_size=2, weight_decay=0.0, max_grad_norm=0.0, gradient_accumulation_steps=2)
    values |= dict(per_device_train_batch_size=BATCH // 2 // ranks)
    found = pool(ranks).run(_train_short_epochs, maker("qwen3_moe"), str(tmp_path), values)[0]
    options: dict[str, Any] = dict(optimizer="sgd", learning_rate=RATE, weight_decay=0.0)
    assert_equal(found, train_plainly(maker("qwen3_moe")(), _short_epoch(), **options), 2e-6)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_with_padding_only(stage: int, tmp_path: Any) -> None:
    values: dict[str, Any] = dict(zero_stage=stage, optim="sgd", learning_rate=RATE, max_steps=3, self_test="never")
    values |= dict(per_device_train_batch_size=1, train_sampling_strategy="sequential", max_grad_norm=CLIP)
    make = maker("qwen3_moe")
    wanted, found = (
        pool(2).run(_train_on_padding, make, str(tmp_path / str(size)), {**values, "expert_parallel_size": size})[0]
        for size in (1, 2)
    )
    assert_equal(found, wanted, 1e-6)


AUTOCAST = {"deepspeed": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}
OFFLOAD = {"bf16": True, "offload_optimizer": "cpu"}


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("format", [{"bf16": True}, AUTOCAST, OFFLOAD], ids=["bf16", "autocast", "offload"])
def test_16_bits_are_as_near_as_with_whole_experts(format: dict[str, Any], stage: int, tmp_path: Any) -> None:
    """To float32, after five steps of AdamW."""
    values: dict[str, Any] = dict(zero_stage=stage, learning_rate=1e-3, max_steps=STEPS, self_test="never")
    make = maker("qwen3_moe")
    exact, whole, divided = (
        pool(2).run(_train, make, str(tmp_path), {**values, "expert_parallel_size": size, **used})[0]
        for size, used in ((1, {}), (1, format), (2, format))
    )
    for name, distance in distances(divided, exact).items():
        assert distance <= 1.5 * distances(whole, exact)[name] + 1e-4, name


def _without_room(directory: str) -> None:
    product_of = expert_division._product

    def product(config: Any) -> Any:
        product_of(config)

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

        return fails

    with mock.patch.object(expert_division, "_product", product):
        arguments = {"expert_parallel_size": 2, "zero_stage": 1, "max_steps": 1, "self_test": "never"}
        train_and_report(maker("qwen3_moe"), samples, directory, **arguments)


def test_rows_without_room_name_their_layer(tmp_path: Any) -> None:
    message = r"model\.layers\.0\.mlp\.experts: [\d,]+ rows have arrived .* an auxiliary loss, or smaller micro-batches"
    with pytest.raises(RankFailure, match=message):
        pool(2).run(_without_room, str(tmp_path))


def _killed_inside(directory: str, ranks: int, call: int) -> None:
    """Rank 1 dies in the exchange of the second step."""
    send = expert_exchange.ExpertExchange.send
    calls = 0

    def dying(exchange: Any, *args: Any) -> None:
        nonlocal calls
        calls += torch.distributed.get_rank() == 1 and exchange._counts  # in training
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        send(exchange, *args)

    with mock.patch.object(expert_exchange.ExpertExchange, "send", dying):
        arguments = {"expert_parallel_size": ranks, "zero_stage": 1, "max_steps": 5, "self_test": "never"}
        recomputes = {"gradient_checkpointing": ranks == 4}
        train_and_report(maker("qwen3_moe"), samples, directory, **arguments, **recomputes)


@pytest.mark.extended
@pytest.mark.parametrize("ranks, call", [(2, 12), (4, 21)], ids=["forward", "recomputed"])
def test_ranks_end_when_one_is_killed_inside_the_exchange(ranks: int, call: int, tmp_path: Any) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"mlp\.experts: the exchange of tokens with other ranks has failed"):
        pool(ranks).run(_killed_inside, str(tmp_path), ranks, call)
    assert time.monotonic() - began < 60
