"""Losses that communicate, run a second engine, or keep metrics: measuring changes nothing, and says what they are."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils import distributed
from tests.support.compare import weight_distance
from tests.support.pool import pool
from tests.support.runs import whole_weights

SAMPLES, WIDTH = 24, 8


class Pairs(torch.utils.data.Dataset[Any]):
    """Pairs of vectors."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.rows = [{"one": torch.randn(WIDTH), "other": torch.randn(WIDTH)} for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Encoder(nn.Module):
    """Two layers, so that ZeRO-3 gathers more than one parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return F.normalize(hidden, dim=-1)


class Fused(Encoder):
    """Uses the weight of a layer without calling the layer, as fused heads do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(torch.tanh(self.first(x)), self.last.weight, self.last.bias)
        return F.normalize(hidden, dim=-1)


class Own(Trainer):
    """Counts what its losses log; ``how`` they communicate."""

    how, encoder = "not", Encoder

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        self.calls, self.distances = 0, []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        self.calls += 1
        one, other = model(inputs["one"]), model(inputs["other"])
        far = 1 - (one * other).sum(-1)
        if self.how == "metrics":
            self.distances += [float(self.accelerator.gather(far.detach()).mean())]
        if self.how in ("negatives", "gather of torch"):
            if self.how == "negatives":
                everyone = self.accelerator.gather(other.detach())
            else:
                parts = [torch.empty_like(other) for _ in range(distributed.world_size())]
                torch.distributed.all_gather(parts, other.detach().contiguous())
                everyone = torch.cat(parts)
            own = torch.cat([other, everyone]) if distributed.world_size() > 1 else other
            return F.cross_entropy(one @ own.T, torch.arange(len(one)))
        return far.mean()


def trainer_of(folder: str, kind: Any, **changes: Any) -> Own:
    values: dict[str, Any] = dict(
        max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=0.1, optim="sgd",
        logging_steps=1, use_cpu=True,
        save_strategy="no", disable_tqdm=True, report_to="none", train_sampling_strategy="sequential",
        remove_unused_columns=False, label_names=["other"]
    )  # fmt: skip
    args = TrainingArguments(folder, **{**values, **changes})
    return kind(kind.encoder(), args, train_dataset=Pairs(), eval_dataset=Pairs())  # type: ignore[no-any-return]


def trained(folder: str, how: str, changes: dict[str, Any], kind: type[Own] | None = None) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_trainer.training.loop.loss_measurement")
    logger.addHandler(handler)
    trainer = trainer_of(folder, kind or type("Script", (Own,), {"how": how}), **changes)
    try:
        trainer.train()
        weighting = trainer._ds_trainer.losses.rule.weighting
        calls, distances = trainer.calls, len(trainer.distances)
        evaluated = trainer.evaluate()["eval_loss"]
        return {
            "weights": whole_weights(trainer), "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
            "additive": weighting.additive, "calls": calls, "distances": distances, "evaluated": evaluated,
            "said": lines
        }  # fmt: skip
    finally:
        logger.removeHandler(handler)
        trainer.engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["negatives", "gather of torch", "metrics", "not"])
def test_a_loss_that_depends_on_other_ranks_is_named(how: str, stage: int, tmp_path: Path) -> None:
    found = pool(2).run(trained, str(tmp_path), how, {"zero_stage": stage})
    depends = how in ("negatives", "gather of torch")
    assert [rank["additive"] for rank in found] == [not depends] * 2
    assert [(rank["calls"], rank["distances"]) for rank in found] == [(3, 3 if how == "metrics" else 0)] * 2
    assert sum("depends on the samples of other ranks" in line for rank in found for line in rank["said"]) == depends


def uneven(folder: str, stage: int) -> tuple[int, float, float]:
    """Steps and losses of 11 pairs: the last batches of two ranks have 2 samples and 1, or 3 and none."""
    trainer = trainer_of(folder, type("Script", (Own,), {"how": "gather of torch"}), max_steps=-1, zero_stage=stage)
    trainer.args.num_train_epochs, part = 2, torch.utils.data.Subset(Pairs(), range(11))
    trainer.train_dataset = trainer.eval_dataset = part
    try:
        loss = trainer.train().training_loss
        return trainer.state.global_step, loss, trainer.evaluate()["eval_loss"]
    finally:
        trainer.engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_fewer_samples_gather_as_many(stage: int, tmp_path: Path) -> None:
    """They repeat theirs: gloo ended the process, and NCCL waits."""
    for steps, trained, evaluated in pool(2).run(uneven, str(tmp_path), stage):
        assert steps == 4 and 0 < trained < 9 and 0 < evaluated < 9


def test_a_loss_that_gathers_metrics_only_is_that_of_one_process(tmp_path: Path) -> None:
    alone = trained(str(tmp_path), "metrics", {"per_device_train_batch_size": 8})
    for stage in (1, 3):
        for found in pool(2).run(trained, str(tmp_path), "metrics", {"zero_stage": stage}):
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)
            assert weight_distance(found["weights"], alone["weights"]) < 1e-5


class Distilled(Own):
    """Has a teacher in an engine of its own, as preference trainers have a reference."""

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        import deepspeed

        config = copy.deepcopy(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        for name in ("optimizer", "scheduler"):
            config.pop(name, None)
        if config["zero_optimization"]["stage"] != 3:
            config["zero_optimization"] = {"stage": 0}
        teacher = Encoder(seed=5).requires_grad_(self.teacher_learns)
        self.teacher, *_ = deepspeed.initialize(model=teacher, config=config)
        self.teacher.eval()

    teacher_learns = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        self.calls += 1
        ours = model(inputs["one"])
        with torch.no_grad():
            theirs = self.teacher(inputs["one"])
        return (ours - theirs).pow(2).sum(-1).mean()


def distilled(folder: str, stage: int, teacher_learns: bool) -> dict[str, Any]:
    learns = {"how": "not", "teacher_learns": teacher_learns}
    return trained(folder, "not", {"zero_stage": stage}, type("Script", (Distilled,), learns))


@pytest.mark.parametrize("learns", [False, True])
def test_a_second_engine_in_the_loss_is_as_before(learns: bool, tmp_path: Path) -> None:
    (alone,) = pool(1).run(distilled, str(tmp_path), 0, learns)
    for stage in (2, 3):
        (one,) = pool(1).run(distilled, str(tmp_path), stage, learns)
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for found in pool(2).run(distilled, str(tmp_path), stage, learns):
            assert found["additive"] and found["calls"] == 3
            assert all(map(math.isfinite, found["losses"]))


def fused(folder: str) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    kind = type("Script", (Distilled,), {"encoder": Fused})
    return trained(folder, "not", {"deepspeed": {"zero_optimization": zero}}, kind)


def test_weights_of_other_layers_are_gathered_after_a_measurement(tmp_path: Path) -> None:
    """ZeRO-3 learns in a pass which weights a module uses beside its own; forgetting it leaves them empty."""
    (alone,) = pool(1).run(distilled, str(tmp_path), 0, False)
    for found in pool(2).run(fused, str(tmp_path)):
        assert found["calls"] == 3 and all(map(math.isfinite, found["losses"]))
        assert found["losses"][0] < 2 * alone["losses"][0]
