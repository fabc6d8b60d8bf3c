"""Losses and batches of subclasses that were written for transformers' Trainer give the exact gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ds_trainer import Trainer
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import weight_distance
from tests.support.models import PlainLanguageModel, RaggedTokens, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.test_private_methods import made


class Scaled(Trainer):
    """A loss as in transformers: divided by the item count, and multiplied because gradients are averaged."""

    ranks_from = "accelerator"

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        self.collected: dict[str, list[float]] = {"train": [], "eval": []}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        targets = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")
        loss = loss / (targets.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.ranks_from == "accelerator":
            loss = loss * self.accelerator.num_processes
        elif num_items_in_batch is not None and self.ranks_from == "arguments":
            loss = loss * self.args.world_size
        elif num_items_in_batch is not None and self.ranks_from == "read only":
            assert self.accelerator.state.num_processes > 0
        self.collected["train" if model.training else "eval"].append(float(loss.detach()))
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss


def trained(output_dir: str, ranks_from: str, stage: int, **changes: Any) -> tuple[Any, list[float], int, float]:
    trainer_class: Any = Trainer if ranks_from == "library" else type("Own", (Scaled,), {"ranks_from": ranks_from})
    trainer = made(
        trainer_class, output_dir, model=tiny_llama(), data=RaggedTokens(16), zero_stage=stage, seed=3, **changes
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    calls = len(getattr(trainer, "collected", {"train": []})["train"])
    weights, evaluated = whole_weights(trainer), trainer.evaluate()["eval_loss"]
    trainer.engine.close()
    return weights, logged, calls, evaluated


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_is_scaled_for_an_average_over_ranks_gives_the_exact_gradient(stage: int, tmp_path: Path) -> None:
    (wanted_weights, wanted_losses, _, wanted_evaluation), _ = pool(2).run(
        trained_twice, str(tmp_path), "library", stage
    )
    for ranks_from in ("accelerator", "arguments", "read only", "nowhere"):
        for weights, losses, calls, evaluation in pool(2).run(trained_twice, str(tmp_path), ranks_from, stage):
            assert losses == pytest.approx(wanted_losses, rel=1e-5)
            assert weight_distance(weights, wanted_weights) < 1e-5
            assert calls == 3 * 2  # no trace of the verification
            assert evaluation == pytest.approx(wanted_evaluation, rel=1e-5)


def trained_twice(output_dir: str, ranks_from: str, stage: int) -> Any:
    return trained(output_dir, ranks_from, stage, gradient_accumulation_steps=2)


class FirstMasked(RaggedTokens):
    """The first micro-batch of every rank has no target."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        for row in self.rows[:4]:
            row["labels"] = torch.full_like(row["labels"], -100)


def trained_in_order(output_dir: str, ranks_from: str) -> Any:
    trainer_class: Any = Trainer if ranks_from == "library" else type("Own", (Scaled,), {"ranks_from": ranks_from})
    order = dict(train_sampling_strategy="sequential", gradient_accumulation_steps=2)
    trainer = made(trainer_class, output_dir, model=tiny_llama(), data=FirstMasked(24), **order)
    trainer.train()
    weights, scale = whole_weights(trainer), trainer._ds_trainer.losses.rule.scale
    trainer.engine.close()
    return weights, scale


def test_the_scale_is_found_out_at_the_first_batch_that_has_a_loss(tmp_path: Path) -> None:
    wanted, _ = pool(2).run(trained_in_order, str(tmp_path), "library")[0]
    for ranks_from, factor in (("accelerator", 2.0), ("read only", 1.0)):
        for weights, scale in pool(2).run(trained_in_order, str(tmp_path), ranks_from):
            assert scale == factor
            assert weight_distance(weights, wanted) < 1e-5


class Declared(Trainer):
    """Says what its losses are."""

    calls = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.calls += 1
        outputs = model(**inputs)
        loss = outputs[0]
        if self.loss_is_scaled_for_ga and model.training:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def declared(output_dir: str, scaled: bool | None) -> tuple[Any, int]:
    own = type("Own", (Declared,), {"loss_is_scaled_for_ga": scaled})
    trainer_class = own if scaled is not None else Trainer
    trainer = made(trainer_class, output_dir, gradient_accumulation_steps=3, data=regression_rows(36))
    trainer.train()
    weights, calls = whole_weights(trainer), getattr(trainer, "calls", 9)
    trainer.engine.close()
    return weights, calls


def test_losses_are_what_a_subclass_declares(tmp_path: Path) -> None:
    wanted = pool(2).run(declared, str(tmp_path), None)[0][0]
    for scaled in (True, False):
        for weights, calls in pool(2).run(declared, str(tmp_path), scaled):
            assert weight_distance(weights, wanted) < 1e-6
            assert calls == 9  # no trace of the measurement


class FromLists(Trainer):
    """Gets lists of samples and makes the tensors itself."""

    loss_is_scaled_for_ga = False

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        batch = {name: torch.stack([row[name] for row in inputs]) for name in inputs[0]}
        return super()._prepare_inputs(batch)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["x", "labels"]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        outputs = model(**inputs)
        return (outputs[0], outputs) if return_outputs else outputs[0]

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None


def from_lists(output_dir: str, lists: bool) -> tuple[Any, float]:
    data = regression_rows(7)  # the last micro-step of an evaluation has no samples for the second rank
    trainer = made(FromLists if lists else Trainer, output_dir, data=data, per_device_eval_batch_size=2)
    if lists:
        trainer.data_collator = list
    trainer.train()
    weights, evaluated = whole_weights(trainer), trainer.evaluate()["eval_loss"]
    trainer.engine.close()
    return weights, evaluated


def test_batches_may_be_lists_that_a_subclass_converts(tmp_path: Path) -> None:
    (weights, evaluated), _ = pool(2).run(from_lists, str(tmp_path), False)
    for own_weights, own_evaluated in pool(2).run(from_lists, str(tmp_path), True):
        assert weight_distance(own_weights, weights) < 1e-6
        assert own_evaluated == pytest.approx(evaluated, rel=1e-6)


def test_a_plain_model_is_not_affected(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, model=PlainLanguageModel(), data=RaggedTokens(8))
    trainer.train()
    assert trainer._ds_trainer.losses.rule.scale == 1.0 and trainer._ds_trainer.losses.rule.replicas is None


class Detached(Trainer):
    """A mistake: the loss has lost its graph."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        return model(**inputs).loss.detach()


def test_a_loss_without_a_graph_is_one_sentence(tmp_path: Path) -> None:
    trainer = made(Detached, str(tmp_path), model=tiny_llama(), data=RaggedTokens(16), zero_stage=0)
    with pytest.raises(ConfigError, match="The loss has no gradient: it was detached"):
        trainer.train()
    trainer.engine.close()


def test_a_directory_in_place_of_a_written_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json" / "x").mkdir(parents=True)
    trainer = made(Trainer, str(tmp_path), model=tiny_llama(), data=RaggedTokens(16), zero_stage=0)
    with pytest.raises(ConfigError, match=r"ds_config\.json cannot be written: Is a directory"):
        trainer.train()
