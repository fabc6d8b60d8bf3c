"""The self-test passes where the engine is right, and notices whatever is broken on purpose."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine import self_test, training_engine
from ds_trainer.engine.self_test import GradientReport, TinyModel
from ds_trainer.engine.tensor_parallel import partitioning
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.monitor.doctor.gradients import run_self_test
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support.pool import pool

PRECISIONS: list[dict[str, Any]] = [{}, {"bf16": True}]


def report(**arguments: Any) -> GradientReport:
    args = TrainingArguments("unused", use_cpu=True, **arguments)
    layout = ParallelLayout.of(args, distributed.world_size())
    return run_self_test(args, compile_config(args, layout, client_optimizer="a test"), layout)


def all_stages() -> list[GradientReport]:
    return [report(zero_stage=stage, **precision) for stage in range(4) for precision in PRECISIONS]


@pytest.mark.cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_self_test_passes_at_every_stage_and_precision(ranks: int) -> None:
    for reports in pool(ranks).run(all_stages):
        assert [(one.stage, one.precision, one.wrong) for one in reports] == [
            (stage, precision, ()) for stage in range(4) for precision in ("fp32", "bf16")
        ]
        assert max(one.error for one in reports if one.precision == "fp32") < 1e-5
        assert max(one.error for one in reports if one.precision == "bf16") < 0.03


def all_types() -> list[GradientReport]:
    types = {"communication_data_type": "fp32", "grad_accum_dtype": "fp32"}
    return [report(zero_stage=stage, bf16=True, **types) for stage in range(4)]


def test_the_self_test_passes_with_float32_sums_at_every_stage() -> None:
    for reports in pool(2).run(all_types):
        assert [one.wrong for one in reports] == [()] * 4


DTYPES = ("fp32", "bf16", "fp16")


def all_dtypes() -> dict[str, str]:
    """Every precision, dtype of sums over ranks and dtype of sums over micro-batches, at every stage: the verdict."""
    verdicts = {}
    for precision in ({}, {"bf16": True}, {"torch_autocast": "bf16"}):
        for stage, over_ranks, over_batches in product(range(4), ("auto", *DTYPES), ("auto", *DTYPES)):
            asked = {"communication_data_type": over_ranks, "grad_accum_dtype": over_batches, **precision}
            try:
                found = report(zero_stage=stage, **asked)
            except ConfigError as error:
                verdicts[f"{stage} {asked}"] = f"refused: {error}"
            else:
                verdicts[f"{stage} {asked}"] = "; ".join(found.wrong) or "right"
    return verdicts


@pytest.mark.extended
def test_the_self_test_passes_with_every_dtype_or_it_is_refused() -> None:
    """Refused is only an accumulation in a dtype that is neither the weights' nor float32."""
    for verdicts in pool(2).run(all_dtypes):
        refused = [text for text in verdicts.values() if text.startswith("refused")]
        assert {name: text for name, text in verdicts.items() if text != "right" and text not in refused} == {}
        assert all("gradients are accumulated in the dtype of the weights, or in float32" in text for text in refused)
        assert len(verdicts) == 192 and len(refused) == 80


def coarse_sums() -> list[GradientReport]:
    """Float32 weights whose gradients travel, or are added, in fewer bits."""
    return [
        *(report(zero_stage=stage, communication_data_type="bf16") for stage in range(4)),
        report(zero_stage=2, communication_data_type="fp16"),
        report(zero_stage=1, bf16=True, communication_data_type="fp32"),
    ]


def test_the_tolerance_is_that_of_the_coarsest_dtype() -> None:
    for reports in pool(2).run(coarse_sums):
        assert [one.wrong for one in reports] == [()] * 6
        assert [one.tolerance for one in reports] == [0.08] * 4 + [0.02, 0.08]
        assert max(one.error for one in reports) > 1e-3  # more than float32 is allowed


def other_settings() -> list[GradientReport]:
    """Autocast; tensor parallelism; a user's own way of reducing."""
    config = {"zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": False}}
    return [
        report(zero_stage=2, torch_autocast="bf16"),
        report(zero_stage=1, tensor_parallel_size=2),
        report(deepspeed=config),
    ]


def test_the_self_test_passes_with_other_settings() -> None:
    for reports in pool(2).run(other_settings):
        assert [one.title for one in reports] == ["ZeRO-2 autocast bf16", "ZeRO-1 fp32, tp 2", "ZeRO-2 fp32"]
        assert [one.wrong for one in reports] == [(), (), ()]


# -- negative controls ------------------------------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


Backward = Callable[[TrainingEngine, torch.Tensor], None]


def twice(engine: TrainingEngine, loss: torch.Tensor, backward: Backward) -> None:
    backward(engine, loss * 2)


def without_rank_1(engine: TrainingEngine, loss: torch.Tensor, backward: Backward) -> None:
    backward(engine, loss * float(distributed.rank() != 1))


def without_the_first_micro_batch(engine: TrainingEngine, loss: torch.Tensor, backward: Backward) -> None:
    backward(engine, loss * float(engine.is_last))


def infinite(engine: TrainingEngine, loss: torch.Tensor, backward: Backward) -> None:
    backward(engine, loss * float("nan"))


def one_use_is_lost(self: TinyModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As the model's, but the gradient of the layer's second use does not arrive."""
    hidden = torch.tanh(self.first(self.embedding(tokens)))
    hidden = torch.tanh(self.shared(hidden))
    hidden = hidden + self._block(hidden)
    transposed = hidden.flatten(0, -2).t().contiguous().t()
    hidden = hidden + self.narrow(torch.tanh(self.wide(transposed))).view_as(hidden)
    second = torch.nn.functional.linear(hidden, self.shared.weight.detach(), self.shared.bias.detach())
    predicted = self.head(second).squeeze(-1).mean(dim=-1)
    return (predicted.to(targets.dtype) - targets).square().sum()


BROKEN: dict[str, tuple[Any, str]] = {
    "twice": (twice, "2 times the correct value"),
    "a rank": (without_rank_1, "of rank 1 is lost"),
    "a micro-batch": (without_the_first_micro_batch, "the gradient contribution of micro-batch 0 of rank 0 is lost"),
    "not finite": (infinite, "times the correct value"),
}


def broken(kind: str, stage: int, precision: dict[str, Any]) -> GradientReport:
    original = TrainingEngine.backward

    def changed(engine: TrainingEngine, loss: torch.Tensor) -> None:
        BROKEN[kind][0](engine, loss, original)

    with replaced(TrainingEngine, "backward", changed):
        return report(zero_stage=stage, **precision)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_gradient_is_detected_and_named(kind: str) -> None:
    for stage, precision in ((0, {}), (2, {"bf16": True}), (3, {})):
        for found in pool(2).run(partial(broken, kind, stage, precision)):
            assert not found.good
            assert any(BROKEN[kind][1] in message for message in found.wrong), found.wrong


def lost_use(stage: int) -> GradientReport:
    """The engine's model loses it; the reference has to be that of the whole model."""
    expected = self_test.expected_gradient
    expected_gradients = [expected(distributed.world_size(), step) for step in range(self_test.STEPS)]
    with (
        replaced(self_test, "expected_gradient", lambda ranks, step, experts: expected_gradients[step]),
        replaced(TinyModel, "forward", one_use_is_lost),
    ):
        return report(zero_stage=stage, bf16=True)


def test_a_lost_use_of_a_shared_layer_is_detected() -> None:
    for found in pool(2).run(partial(lost_use, 2)):
        assert any("the gradient of shared.weight" in message for message in found.wrong), found.wrong


def kept_gradients() -> GradientReport:
    """What is left of the first step is added to the second, as if it were not cleared."""
    original = self_test.samples

    def both(rank: int, micro_batch: int, step: int) -> dict[str, torch.Tensor]:
        first, second = original(rank, micro_batch, 0), original(rank, micro_batch, 1)
        return first if step == 0 else {name: torch.cat([first[name], second[name]]) for name in first}

    expected = self_test.expected_gradient
    expected_gradients = [expected(distributed.world_size(), step) for step in range(self_test.STEPS)]
    with (
        replaced(self_test, "expected_gradient", lambda ranks, step, experts: expected_gradients[step]),
        replaced(self_test, "samples", both),
    ):
        return report(zero_stage=1)


def test_gradients_left_from_the_previous_step_are_detected() -> None:
    assert not pool(1).run(kept_gradients)[0].good


# -- many ranks, simulated: every contributor's gradient by a bf16 model, added in bf16 in the order of a ring --------


def ring_sum(ranks: int, step: int, lost_contributor: int | None = None) -> dict[str, torch.Tensor]:
    """What a ring of ``ranks`` bf16 gradients gives; the gradient of ``lost_contributor`` does not arrive."""
    number = len(self_test.contributors(ranks))
    total: dict[str, torch.Tensor] = {}
    for contributor in range(number):
        model = TinyModel(self_test.COMMON_TOKENS + number * self_test.ACCUMULATION).bfloat16()
        for micro_batch in range(self_test.ACCUMULATION):
            batch = self_test.samples(contributor, micro_batch, step)
            weight = 1 / (number * self_test.ACCUMULATION * self_test.MICRO_BATCH)
            (model(batch["tokens"], batch["targets"]) * weight).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            part = parameter.grad if contributor != lost_contributor else torch.zeros_like(parameter.grad)
            total[name] = part if contributor == 0 else total[name] + part
    return {name: gradient.double() for name, gradient in total.items()}


def simulated(ranks: int, found: dict[str, torch.Tensor]) -> GradientReport:
    empty = GradientReport(1, "bf16", 1, ranks, 0.0, self_test.TOLERANCE["bf16"], ())
    return self_test._compare(found, [float("nan")] * 2, ranks, empty)


def test_bf16_sums_of_1024_ranks_are_accepted() -> None:
    found = simulated(1024, ring_sum(1024, 1))
    assert (found.wrong, found.ranks) == ((), 1024)


def test_with_1024_contributors_no_tolerance_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "CONTRIBUTORS", 1024)
    found = simulated(1024, ring_sum(1024, 1))
    assert found.error > 0.3
    assert not found.good


def test_a_missing_contribution_of_one_rank_in_1024_is_detected_and_named() -> None:
    rank = self_test.contributors(1024)[40]
    found = simulated(1024, ring_sum(1024, 1, lost_contributor=40))
    assert any(f"of rank {rank} is lost" in message for message in found.wrong)


def test_a_gradient_averaged_over_the_wrong_ranks_is_detected() -> None:
    halved = {name: gradient * 63 / 128 for name, gradient in ring_sum(1024, 1).items()}
    assert not simulated(1024, halved).good


def test_contributors_are_spread_over_nodes_and_local_ranks() -> None:
    assert self_test.contributors(1) == [0]
    assert self_test.contributors(64) == list(range(64))
    for ranks in (65, 100, 1000, 1024, 4096):
        found = self_test.contributors(ranks)
        assert len(found) == len(set(found)) == 64
        assert found == sorted(found)
        assert found[-1] < ranks
    assert {rank % 8 for rank in self_test.contributors(1024)} == set(range(8))
    assert len({rank // 8 for rank in self_test.contributors(1024)}) == 64


def only_three_contribute() -> list[GradientReport]:
    """Real ranks of which one adds zero."""
    with replaced(self_test, "CONTRIBUTORS", 3):
        return [report(zero_stage=stage, bf16=True) for stage in range(4)]


def test_ranks_that_add_nothing_change_nothing() -> None:
    for reports in pool(4).run(only_three_contribute):
        assert [one.wrong for one in reports] == [()] * 4


# -- nothing is left behind -------------------------------------------------------------------------------------------


def random_numbers() -> tuple[Any, ...]:
    state = np.random.get_state()
    return random.getstate(), str(state), torch.get_rng_state().tolist(), torch.is_grad_enabled()


def before_and_after() -> list[tuple[Any, ...]]:
    states = [random_numbers()]
    report(zero_stage=3, bf16=True)
    return [*states, random_numbers()]


def test_the_self_test_restores_the_random_state() -> None:
    for before, after in pool(2).run(before_and_after):
        assert before == after


# -- what another version of DeepSpeed could do -----------------------------------------------------------------------


def another_step() -> Callable[..., Any]:
    """DeepSpeed's step of ZeRO 1 and 2 with other names for its private parts, as a later version may have."""
    kind = stage_1_and_2.DeepSpeedZeroOptimizer
    source = textwrap.dedent(inspect.getsource(kind.step))
    for name in ("check_grad_overflow", "check_overflow", "scaled_global_norm"):
        assert f"self.{name}" in source
        source = source.replace(f"self.{name}", f"self.another_{name}")
    names = dict(vars(stage_1_and_2))
    exec(source, names)
    return names["step"]  # type: ignore[no-any-return]


def renamed(stage: int) -> GradientReport:
    kind = stage_1_and_2.DeepSpeedZeroOptimizer
    kind.another_check_grad_overflow = True
    kind.another_check_overflow, kind.another_scaled_global_norm = kind.check_overflow, kind.scaled_global_norm
    with replaced(kind, "step", another_step()):
        return report(zero_stage=stage, bf16=True)


def test_a_skipped_step_that_is_applied_is_detected() -> None:
    for stage in (1, 2):
        (found,) = pool(1).run(partial(renamed, stage))
        assert [one for one in found.wrong if "applies a step that must be skipped" in one] == list(found.wrong) != []


def unchecked() -> GradientReport:
    """The norm that DeepSpeed computes is finite although the gradient is not."""
    with (
        replaced(training_engine, "enable_overflow_checks", lambda it: setattr(it, "check_grad_overflow", False)),
        replaced(training_engine, "reduce_norm_once", lambda optimizer: None),
        replaced(stage_1_and_2.DeepSpeedZeroOptimizer, "scaled_global_norm", lambda self: torch.ones(())),
    ):
        return report(zero_stage=1, bf16=True)


def test_a_step_with_a_non_finite_loss_that_is_applied_is_detected() -> None:
    (found,) = pool(1).run(unchecked)
    assert any("had a loss that is not finite changed embedding.weight" in one for one in found.wrong), found.wrong


def dropped_sum(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    """As in DeepSpeed's layers: the sum is written to a copy."""
    torch.distributed.all_reduce(gradient.contiguous(), group=ctx.group)
    return None, gradient


def without_repairs(stage: int) -> GradientReport:
    from deepspeed.module_inject import layers

    with (
        replaced(partitioning, "repair_layers", lambda: None),
        replaced(layers.ColumnParallel, "backward", staticmethod(dropped_sum)),
    ):
        return report(zero_stage=stage, tensor_parallel_size=2)


def all_stages_with_tensor_parallelism() -> list[GradientReport]:
    return [report(zero_stage=stage, tensor_parallel_size=2, bf16=stage > 0) for stage in range(4)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_self_test_passes_with_tensor_parallelism(ranks: int) -> None:
    for reports in pool(ranks).run(all_stages_with_tensor_parallelism):
        assert [one.wrong for one in reports] == [()] * 4
        assert {one.tp for one in reports} == {2}


def test_gradients_that_tensor_parallel_layers_do_not_add_up_are_detected() -> None:
    for found in pool(2).run(partial(without_repairs, 1)):
        assert not found.good and "their gradients differ" in found.wrong[0]
