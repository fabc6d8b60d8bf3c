"""Evaluation: exact loss, several sets, half precision, sharded weights before training, losses that are not finite."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer
from ds_trainer.training.evaluation.loss_mean import LossMean
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils.errors import ConfigError
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.oracle import stack, token_loss
from tests.support.pool import pool
from tests.support.predictions import Pair, arguments, class_rows, make
from tests.support.runs import whole_weights


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions[0].argmax(-1) == found.label_ids).mean())}


def loss_and_items(output_dir: str, model: Any, stage: int, **changes: Any) -> tuple[float, int, float]:
    args = arguments(output_dir, zero_stage=stage, per_device_eval_batch_size=3, **changes)
    trainer = Trainer(model(), args, eval_dataset=RaggedTokens(13))
    evaluated = trainer.evaluate()
    predicted = trainer.predict(RaggedTokens(13))
    return evaluated["eval_loss"], evaluated["eval_items"], predicted.metrics["test_loss"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", [tiny_llama, PlainLanguageModel])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
def test_the_loss_is_the_token_mean_with_and_without_predictions(
    model: Any, world: int, stage: int, tmp_path: Path
) -> None:
    """prediction_step gives the mean of each batch; the mean of those means would be another number."""
    data = RaggedTokens(13)
    with torch.no_grad():
        wanted = token_loss(model(), stack(data.rows)).item()
        means = [token_loss(model(), stack(data.rows[i : i + 3])).item() for i in range(0, 13, 3)]
    for loss, items, predicted in pool(world).run(loss_and_items, str(tmp_path), model, stage):
        assert loss == pytest.approx(wanted, rel=1e-5) == predicted
        assert items == sum(int((row["labels"][1:] != -100).sum()) for row in data.rows)
    assert sum(means) / len(means) != pytest.approx(wanted, rel=1e-4)


def step_means(output_dir: str, model: Any) -> list[tuple[float, float]]:
    trainer = Trainer(model(), arguments(output_dir), eval_dataset=RaggedTokens(4))
    join_ranks(trainer.args)
    found = []
    for batch in trainer.get_eval_dataloader():
        loss, _, _ = trainer.prediction_step(trainer.model, dict(batch), True)
        with torch.no_grad():
            found.append((float(loss), token_loss(trainer.model, batch).item()))
    return found


@pytest.mark.parametrize("model", [tiny_llama, PlainLanguageModel])
def test_a_step_gives_the_mean_of_its_batch(model: Any, tmp_path: Path) -> None:
    for found, wanted in step_means(str(tmp_path), model):
        assert found == pytest.approx(wanted, rel=1e-5)


# -- several sets ----------------------------------------------------------------------------------------------------


class LooksAtNames(Trainer):
    asked: Any = ()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self.asked = [*self.asked, eval_dataset if isinstance(eval_dataset, str) else type(eval_dataset).__name__]
        return super().get_eval_dataloader(eval_dataset)


def test_several_sets_have_prefixed_metrics(tmp_path: Path) -> None:
    sets = {"a": class_rows(5), "b": class_rows(9)}
    trainer = LooksAtNames(Pair(), arguments(tmp_path), eval_dataset=sets, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    assert trainer.asked == ["a", "b"]
    one = trainer.evaluate("b", metric_key_prefix="eval_b")
    assert trainer.evaluate(sets)["eval_a_loss"] == metrics["eval_a_loss"]
    assert trainer.asked == ["a", "b", "b", "list", "list"]
    assert {"eval_a_loss", "eval_b_loss", "eval_a_accuracy", "eval_b_accuracy", "epoch"} <= metrics.keys()
    assert one["eval_b_accuracy"] == metrics["eval_b_accuracy"] and one["eval_b_loss"] == metrics["eval_b_loss"]


class LogsItself(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in well-known scripts for question answering: the result is what was logged."""
        output = self.evaluation_loop(self.get_eval_dataloader(), "Evaluation")
        self.log(output.metrics)
        return output.metrics


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [Trainer, LogsItself])
def test_metrics_have_the_epoch_after_they_are_logged(kind: type[Trainer], tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=3, per_device_train_batch_size=2)
    trainer = kind(Pair(), args, train_dataset=class_rows(8), eval_dataset=class_rows(4))
    trainer.train()
    assert trainer.evaluate()["epoch"] == 0.75 == trainer.state.log_history[-1]["epoch"]


# -- before training, sharded ----------------------------------------------------------------------------------------


def evaluate_sharded(output_dir: str, **changes: Any) -> tuple[list[int], float, float, float, int]:
    """Elements of each parameter that are here meanwhile; losses before, saved in between, and after training."""
    model = tiny_llama(tied=True)
    args = arguments(output_dir, zero_stage=3, max_steps=2, learning_rate=0.0, weight_decay=0.0, **changes)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(5))
    here: list[int] = []
    layer: Any = model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: here.extend(p.numel() for p in model.model.layers[0].parameters()))
    before = trainer.evaluate()
    assert before["eval_model_preparation_time"] > 0
    assert trainer.optimizer is None and trainer._ds_trainer.engines.training_or_none is None
    trainer.save_model(output_dir)
    repeated = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()
    assert "eval_model_preparation_time" not in after
    trainer.engine.close()
    return here, before["eval_loss"], repeated, after["eval_loss"], sum(p.ds_numel for p in model.parameters())


def test_zero3_evaluates_before_training_without_an_optimizer(tmp_path: Path) -> None:
    data = RaggedTokens(5)
    with torch.no_grad():
        wanted = token_loss(tiny_llama(tied=True), stack(data.rows)).item()
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000}}
    results = pool(2).run(partial(evaluate_sharded, str(tmp_path), deepspeed=config))
    full_model = tiny_llama(tied=True)
    for here, before, repeated, after, elements in results:
        assert before == pytest.approx(wanted, rel=1e-5) and repeated == before
        assert after == pytest.approx(wanted, rel=1e-5)
        assert elements == sum(p.numel() for p in full_model.parameters())
        assert here[:4] == [0, 0, 0, 0]  # the first layer has let go of its weights when the second one begins
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in full_model.state_dict().items() if name in saved)


# -- half precision ---------------------------------------------------------------------------------------------------


class Dtypes(nn.Module):
    """Says in which dtype it runs."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)
        self.register_buffer("shift", torch.tensor(0.1))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.seen.append(self.layer.weight.dtype)
        logits = self.layer(x) + self.shift
        return nn.functional.cross_entropy(logits, labels), logits


def full_eval(output_dir: str, train: bool, **changes: Any) -> tuple[list[Any], Any, bool]:
    model = Dtypes()
    args = arguments(output_dir, max_steps=1, **changes)
    trainer = Trainer(model, args, train_dataset=class_rows(4), eval_dataset=class_rows(3))
    if train:
        trainer.train()
    model.seen.clear()
    before = whole_weights(trainer)
    found = trainer.predict(class_rows(3))
    same = all(torch.equal(before[name], tensor) for name, tensor in whole_weights(trainer).items())
    return model.seen, found.predictions.dtype.name, same


@pytest.mark.parametrize(("name", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
@pytest.mark.parametrize(("train", "stage"), [(False, 0), (True, 0), (True, 1)])
def test_half_precision_evaluation(name: str, dtype: torch.dtype, train: bool, stage: int, tmp_path: Path) -> None:
    """Weights are cast while evaluating, and afterwards they are what they were."""
    changes: dict[str, Any] = {name: True, "zero_stage": stage}
    ((seen, predictions, same),) = pool(1).run(partial(full_eval, str(tmp_path), train, **changes))
    assert set(seen) == {dtype} and same
    assert predictions == ("float32" if dtype == torch.bfloat16 else "float16")  # numpy has no bfloat16
    ((seen, _, _),) = pool(1).run(partial(full_eval, str(tmp_path), train, zero_stage=stage))
    assert set(seen) == {torch.float32}


def refused_sharded(output_dir: str) -> str:
    with pytest.raises(ConfigError) as error:
        full_eval(output_dir, True, zero_stage=3, bf16_full_eval=True)
    return str(error.value)


def test_sharded_weights_are_evaluated_in_half_precision(tmp_path: Path) -> None:
    ((seen, _, _),) = pool(1).run(partial(full_eval, str(tmp_path), False, zero_stage=3, bf16_full_eval=True))
    assert set(seen) == {torch.bfloat16}
    assert "bf16_full_eval=True after training with ZeRO-3" in pool(1).run(refused_sharded, str(tmp_path))[0]


# -- losses that are not finite, and none at all ---------------------------------------------------------------------


def add_up(filtered: bool) -> Any:
    mean = LossMean(torch.device("cpu"), filtered)
    for loss, items in ((1.0, 3), (float("nan"), 2), (2.0, 1), (float("nan"), 0)):
        mean.add(torch.tensor(loss), torch.tensor(items))
    return mean.result()


def test_batches_with_a_non_finite_loss_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        assert add_up(filtered=True) == (pytest.approx(5 / 4), 6)
    assert "1 of 4 batches of an evaluation had a non-finite loss" in caplog.text
    unfiltered = add_up(filtered=False)
    assert unfiltered.mean != unfiltered.mean and unfiltered.items == 6
    assert LossMean(torch.device("cpu"), True).result() is None


def test_without_labels_there_is_no_loss_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_trainer").propagate = True
    trainer = make("tuple", tmp_path, 0)
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        metrics = trainer.evaluate([{"x": row["x"]} for row in class_rows(3)])
    assert "eval_loss" not in metrics and metrics["eval_runtime"] > 0
    assert "No batch of the evaluation had labels (labels)" in caplog.text
