"""A step in which memory runs out is run again in smaller micro-batches, on all ranks, with the same result.

Memory is bounded by a module that refuses more than so many samples from some step on, as an allocator does: on one
rank only, in the forward or in the backward pass, in the first or the last micro-batch of a step.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import PeerFailure, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.parallel.expert_exchange import ExpertExchange
from ds_trainer.training.loop.batch_splitting import NotSplittable, split_batch
from ds_trainer.training.model.expert_division import EXCHANGE
from ds_trainer.training.out_of_memory import OutOfMemory
from ds_trainer.utils import distributed
from tests.support.compare import assert_equal
from tests.support.expert_models import mixture
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import RankFailure, pool
from tests.support.runs import compatibility_of
from tests.training.startup.test_batch_size_search import OutOfMemoryAbove

STEPS, SHORT_FROM = 5, 3


class Bounded(nn.Module):
    """A language model that from pass ``short_from`` on, counted from 1, holds ``limit`` samples on rank ``rank``.

    One with ``experts`` runs out of memory after the layer, in the product of its experts, or has no room for rows.
    """

    def __init__(
        self, limit: int, short_from: int, rank: int = 0, backward: bool = False, dropout: float = 0, experts: str = ""
    ) -> None:
        super().__init__()
        layers = {"num_hidden_layers": 3, "attention_dropout": dropout}
        self.model: Any = mixture("qwen3_moe", **layers) if experts else tiny_llama(**layers)
        self.limit, self.short_from, self.rank, self.short = limit, short_from, rank, backward
        self.passes, self.experts, self.rows = 0, experts.replace("recomputed", "product"), 0
        if experts == "recomputed":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.model.layers[1].register_forward_hook(self._bounded)
        self.loss_type = self.model.loss_type

    def _bounded(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        short = distributed.rank() == self.rank and self.passes >= self.short_from and self.experts in ("", "layer")
        hidden = OutOfMemoryAbove.apply(hidden, self.limit if short else 10**6, self.short)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        self.passes += 1
        self.rows = len(next(iter(inputs.values())))
        exchange = vars(self.model.model.layers[1].mlp.experts).get(EXCHANGE) if self.experts else None
        if isinstance(exchange, ExpertExchange) and self.experts != "layer" and not hasattr(exchange, "bounded"):
            exchange.bounded, product = True, exchange._product
            exchange._free_bytes = lambda _: 0 if self.experts == "room" and self._is_short() else 2**40
            exchange._product = lambda *args: self._in_product(product(*args))
        return self.model(**inputs, num_items_in_batch=num_items_in_batch)

    def _is_short(self) -> bool:
        return distributed.rank() == self.rank and self.passes >= self.short_from and self.rows > self.limit

    def _in_product(self, rows: torch.Tensor) -> torch.Tensor:
        limit = 0 if self.experts == "product" and self._is_short() else 10**9
        return OutOfMemoryAbove.apply(rows, limit, self.short)


def trainer_of(directory: str, model: nn.Module, callbacks: Any = (), data: Any = None, **changes: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim="sgd",  # Adam enlarges rounding where a gradient is almost zero
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        auto_find_batch_size=True,
    )
    args = TrainingArguments(directory, **{**values, **changes})
    return Trainer(model, args, train_dataset=data or RaggedTokens(40), callbacks=list(callbacks))


class MicroBatches(TrainerCallback):
    """Records how many micro-batches of this rank each step has in the end."""

    trainer: Trainer

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(self.trainer.current_gradient_accumulation_steps)


def train(directory: str, limit: int, model: dict[str, Any] | None = None, **changes: Any) -> tuple[Trajectory, Any]:
    """Train; the trajectory, and what micro-batch and accumulation it came to."""
    # The rehearsal before the training is two passes.
    before = (
        0 if not changes.get("auto_find_batch_size", True) else min(2, changes.get("gradient_accumulation_steps", 1))
    )
    per_step = changes.get("gradient_accumulation_steps", 1)
    options = dict(model or {})
    last = options.pop("last", False)
    short_from = options.pop("short_from", before + (SHORT_FROM - 1) * per_step + (per_step if last else 1))
    micro_batches = MicroBatches()
    data = RaggedTokens(4 * per_step * distributed.world_size() * STEPS)
    trainer = trainer_of(directory, Bounded(limit, short_from, **options), [micro_batches], data, **changes)
    micro_batches.trainer = trainer
    trainer.train()
    report = compatibility_of(trainer)
    facts = {
        "micro": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "total": trainer.get_total_train_batch_size(trainer.args),
        "state": trainer.state.train_batch_size,
        "steps": trainer.state.global_step,
        "engine steps": (trainer.engine.deepspeed.global_steps, trainer.engine.deepspeed.skipped_steps),
        "micro-batches": micro_batches.found,
    }
    trainer.engine.close()
    return report, facts


def equal_with_less_memory(
    ranks: int, model: dict[str, Any], tmp_path: Path, tolerance: float = 1e-5, **common: Any
) -> None:
    """With memory for 4 samples and for 2 from step 3 on: the same losses, norms and weights."""
    whole = {**common, "expert_parallel_size": 1}
    ((free, _), *_) = on_ranks(ranks, str(tmp_path / "free"), 4, {"experts": model.get("experts", "")}, whole)
    accumulation = common.get("gradient_accumulation_steps", 1)
    for report, facts in on_ranks(ranks, str(tmp_path / "short"), 2, model, common):
        assert facts == {
            "micro": 2,
            "accumulation": 2 * accumulation,
            "total": 4 * accumulation * ranks,
            "state": 2,
            "steps": STEPS,
            "engine steps": (STEPS, 0),
            "micro-batches": [accumulation] * (SHORT_FROM - 1) + [2 * accumulation] * (STEPS - SHORT_FROM + 1),
        }
        assert_equal(report, free, tolerance)


def on_ranks(ranks: int, *given: Any) -> list[Any]:
    return pool(ranks).run(_train, *given) if ranks > 1 else [_train(*given)]


def _train(directory: str, limit: int, model: dict[str, Any], common: dict[str, Any]) -> Any:
    return train(directory, limit, model, **common)


@pytest.mark.cases(1)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_of_which_one_is_short_of_memory(stage: int, backward: bool, tmp_path: Path) -> None:
    equal_with_less_memory(2, {"rank": 1, "backward": backward}, tmp_path, zero_stage=stage)


WHERE = ("layer", "product", "recomputed")


@pytest.mark.cases(
    *("2-0-layer", "2-1-room", "2-2-recomputed", "2-3-product, backward"),
    *("4-0-product", "4-1-recomputed, backward", "4-2-room", "4-3-layer, backward"),
)
@pytest.mark.parametrize("where", [*WHERE, *(f"{one}, backward" for one in WHERE), "room"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_experts(ranks: int, stage: int, where: str, tmp_path: Path) -> None:
    """The other ranks wait for rows of a rank that is short, or see that it has no room for theirs."""
    experts, _, backward = where.partition(", ")
    model = {"rank": 1, "backward": bool(backward), "experts": experts}
    common = {"zero_stage": stage, "gradient_accumulation_steps": 2, "self_test": "never", "expert_parallel_size": 2}
    equal_with_less_memory(ranks, model, tmp_path, **common)


@pytest.mark.cases(1)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_in_the_first_or_the_last_micro_batch_of_a_step(stage: int, last: bool, tmp_path: Path) -> None:
    model = {"rank": 0, "backward": True, "last": last}
    equal_with_less_memory(2, model, tmp_path, zero_stage=stage, gradient_accumulation_steps=3)


@pytest.mark.cases(2, rest="extended")
@pytest.mark.parametrize(("stage", "last"), [(1, True), (2, False), (1, False), (2, True)])
def test_buckets_that_are_reduced_beside_the_backward_pass(stage: int, last: bool, tmp_path: Path) -> None:
    """Some are sent and some are complete when memory runs out."""
    common = {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 2000}}, "gradient_accumulation_steps": 2}
    model = {"rank": 1, "backward": True, "last": last}
    equal_with_less_memory(2, model, tmp_path, zero_stage=stage, **common)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_zero_3_with_gathered_and_prefetched_parameters(backward: bool, last: bool, tmp_path: Path) -> None:
    """No parameter stays gathered, buckets hold a few of them: many collectives in both passes."""
    sizes = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 3000,
        "stage3_max_live_parameters": 9000,
        "stage3_max_reuse_distance": 2000,
        "reduce_bucket_size": 2000,
    }
    common = {"deepspeed": {"zero_optimization": sizes}, "gradient_accumulation_steps": 2}
    equal_with_less_memory(2, {"rank": 1, "backward": backward, "last": last}, tmp_path, **common)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("bf16", [False, True])
def test_one_process(bf16: bool, tmp_path: Path) -> None:
    # bf16 gradients of two micro-batches are rounded before they are added.
    equal_with_less_memory(1, {"backward": True}, tmp_path, 1e-2 if bf16 else 1e-5, bf16=bf16, zero_stage=0)


@pytest.mark.extended
def test_memory_may_run_out_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report, facts = train(str(tmp_path / "short"), 1)
    free, _ = train(str(tmp_path / "free"), 4)
    assert (facts["micro"], facts["accumulation"]) == (1, 4)
    assert_equal(report, free)
    assert "out of memory on rank 0 in step 3 with 4 samples in a micro-batch; now 2, with 2 acc" in caplog.text
    assert "out of memory on rank 0 in step 3 with 2 samples in a micro-batch; now 1, with 4 acc" in caplog.text


@pytest.mark.extended
def test_from_that_step_on_a_run_equals_one_with_the_smaller_micro_batch(tmp_path: Path) -> None:
    report, _ = train(str(tmp_path / "short"), 2)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    smaller = trainer_of(str(tmp_path / "smaller"), Bounded(4, 1), data=RaggedTokens(4 * STEPS), **sizes)
    smaller.train()
    assert_equal(report, compatibility_of(smaller))


@pytest.mark.extended
def test_dropout_draws_the_numbers_of_the_repeated_step_once(tmp_path: Path) -> None:
    """A run without shortage that has the same micro-batches has the same losses, with dropout."""
    short, _ = train(str(tmp_path / "short"), 2, {"dropout": 0.5})
    again, _ = train(str(tmp_path / "again"), 2, {"dropout": 0.5, "backward": True})
    assert short.losses == again.losses  # interrupted at another point, other numbers were drawn before


@pytest.mark.cases(2, "True-2-3-3")
@pytest.mark.parametrize(
    ("ranks", "stage", "short_from"),  # the rehearsal is two passes
    [(1, 0, 3), (1, 1, 3), (1, 3, 3), (2, 0, 3), (2, 2, 3), (2, 3, 3), (2, 3, 4)],
)
@pytest.mark.parametrize("backward", [False, True])
def test_in_the_first_micro_batches_of_a_run(
    backward: bool, ranks: int, stage: int, short_from: int, tmp_path: Path
) -> None:
    """Where the loss is verified, and while ZeRO-3 records and compares the order of the modules."""
    common = {"zero_stage": stage, "gradient_accumulation_steps": 2}
    ((free, _), *_) = on_ranks(ranks, str(tmp_path / "free"), 4, {}, common)
    model = {"rank": ranks - 1, "backward": backward, "short_from": short_from}
    for report, facts in on_ranks(ranks, str(tmp_path / "short"), 2, model, common):
        assert (facts["micro"], facts["accumulation"], facts["micro-batches"]) == (2, 4, [4] * STEPS)
        assert_equal(report, free)


@pytest.mark.cases(1, rest="extended")
@pytest.mark.parametrize("backward", [True, False])
def test_a_first_micro_batch_is_short_again_in_half_its_size(backward: bool, tmp_path: Path) -> None:
    """Ranks compare the order of modules by broadcasts, which the rank that begins anew does not repeat."""
    common = {"zero_stage": 3}
    ((free, _), *_) = on_ranks(2, str(tmp_path / "free"), 4, {}, common)
    model = {"rank": 1, "backward": backward, "short_from": 1}
    for report, facts in on_ranks(2, str(tmp_path / "short"), 1, model, common):
        assert (facts["micro"], facts["accumulation"], facts["micro-batches"]) == (1, 4, [4] * STEPS)
        assert_equal(report, free)


def short_with_one_sample(directory: str) -> str:
    try:
        train(directory, 0, {"rank": 1, "backward": True, "short_from": 3}, zero_stage=3)
    except (OutOfMemory, PeerFailure) as error:
        return str(error)
    return "trained"


def test_one_sample_that_is_too_much_ends_all_ranks(tmp_path: Path) -> None:
    """The rank runs short twice in a micro-batch: the second time with one sample, while it completes the first."""
    with pytest.raises(RankFailure) as failure:
        raise RankFailure("\n".join(pool(2).run(short_with_one_sample, str(tmp_path), timeout=60)))
    assert "no answer" not in str(failure.value) and "trained" not in str(failure.value)


class Counting(Bounded):
    """Counts its samples, as batch normalization counts its batches."""

    def __init__(self, limit: int, short_from: int, rank: int = 0) -> None:
        super().__init__(limit, short_from, rank)
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        if self.training:
            self.samples += len(inputs["input_ids"])
        return super().forward(num_items_in_batch, **inputs)


def count_samples(directory: str) -> int:
    model = Counting(2, 4, rank=1)
    trainer = trainer_of(directory, model, max_steps=4)
    trainer.train()
    assert trainer.args.per_device_train_batch_size == 2
    trainer.engine.close()
    return int(model.samples)


def test_buffers_do_not_count_the_interrupted_step(tmp_path: Path) -> None:
    assert pool(2).run(count_samples, str(tmp_path)) == [16, 16]


class ShortOnce(torch.optim.SGD):
    """Runs out of memory in its third step, before or after it has begun to change the weights."""

    calls, late = 0, False

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 3:
            if self.late:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].mul_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().step(closure)


class ShortLate(ShortOnce):
    """Has changed weights already."""

    late = True


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_that_runs_out_of_memory_is_called_again(stage: int, tmp_path: Path) -> None:
    def run(optimizer: type[torch.optim.Optimizer]) -> Trajectory:
        args = {"optimizer_cls_and_kwargs": (optimizer, {"lr": 0.1})}
        values: dict[str, Any] = dict(max_steps=4, save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1)
        arguments = TrainingArguments(str(tmp_path), zero_stage=stage, auto_find_batch_size=True, **values)
        trainer = Trainer(Bounded(10**6, 1), arguments, train_dataset=RaggedTokens(40), **args)
        trainer.train()
        return compatibility_of(trainer)

    assert_equal(run(ShortOnce), run(torch.optim.SGD))
    with pytest.raises(OutOfMemory):
        run(ShortLate)


def test_one_sample_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="the micro-batch has one sample"):
        train(str(tmp_path), 0, per_device_train_batch_size=1)


def test_without_the_argument_the_error_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="in step 3"):
        train(str(tmp_path), 2, auto_find_batch_size=False)


def test_a_batch_is_split_by_rows() -> None:
    batch = {"a": torch.arange(10).reshape(5, 2), "names": list("abcde"), "scale": 2.0, "bias": torch.tensor(1.0)}
    parts = split_batch(batch, 2, 4)
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e"], ["a"]]
    assert [part["a"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]], [[0, 1]]]
    assert [isinstance(part, DummyBatch) for part in parts] == [False, False, False, True]
    assert all(part["scale"] == 2.0 and part["bias"] == 1 for part in parts)
    assert all(isinstance(part, DummyBatch) for part in split_batch(DummyBatch(batch), 3, 2))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ([1], "a batch is a list"),
        ({"input_ids": torch.zeros(2, 3), "cu_seqlens": torch.zeros(5)}, "batch['cu_seqlens'] has 5 entries for 2"),
        ({"x": torch.zeros(2), "images": {"sizes": [1, 2, 3]}}, "batch['images']['sizes'] has 3 entries for 2 samples"),
    ],
)
def test_a_batch_without_rows_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(NotSplittable) as caught:
        split_batch(batch, 1, 2)
    assert text in str(caught.value)
