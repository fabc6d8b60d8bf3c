"""What a script reads of weights that ZeRO 3 has released, first in a later step: whole sizes, or one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_trainer
from ds_trainer.engine.zero3.shard_access import ReleasedParameter
from tests.training.test_own_steps import Classifier, rows
from tests.training.test_written_weights import LARGE

METHODS = ("log", "evaluate", "prediction_step", "save_model", "_save_checkpoint", "get_batch_samples", "training_step")
PLACES = (*METHODS, "compute_loss", "on_step_end", "on_save", "forward", "gradient", "compute_metrics", "preprocess")
SIZES = [(6, 4), (6,), (2, 6), (2,)]
WEIGHTS: list[Any] = []
"""A list that was made before the training, which no module owns."""
VALUES = {
    "detach": lambda weights: sum(float(weight.detach().norm()) for weight in weights),
    "data": lambda weights: [weight.data for weight in weights],
    "pow": lambda weights: sum(weight.pow(2).sum() for weight in weights),
    "stack": lambda weights: torch.stack([weights[0], weights[0]]),
    "tolist": lambda weights: weights[0].tolist(),
    "__set__": lambda weights: setattr(weights[0], "data", torch.zeros(6, 4)),
}


class Own(Classifier):
    """Its forward reads."""

    read: Any = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.read()
        return super().forward(x, labels)


def trained(output_dir: str, where: str, read: Any) -> tuple[list[Any], Any]:
    """What ``read`` has found in ``where`` in step 3, and the Trainer."""
    found: list[Any] = []
    model = Own() if where == "forward" else Classifier()
    WEIGHTS[:] = model.parameters()

    def reached() -> None:
        if trainer.state.global_step >= 2 and not found:
            found.append(read(WEIGHTS))

    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        reached()
        return getattr(super(kind, self), where)(*args, **keywords)

    kind: Any = type("Probing", (ds_trainer.Trainer,), {where: method} if where in (*METHODS, "compute_loss") else {})
    called = {where: lambda self, *args, **keywords: reached()} if where.startswith("on_") else {}
    callback = type("Probe", (ds_trainer.TrainerCallback,), called)
    given: dict[str, Any] = {"callbacks": [callback()]} if called else {}
    if where == "forward":
        model.read = reached  # type: ignore[assignment]
    elif where == "gradient":
        model.first.bias.register_hook(lambda gradient: reached())
    elif where in ("compute_metrics", "preprocess"):
        given["compute_metrics"] = lambda result: {} if where == "preprocess" else reached() or {}
        if where == "preprocess":
            given["preprocess_logits_for_metrics"] = lambda logits, labels: reached() or logits
    values: dict[str, Any] = dict(max_steps=4, use_cpu=True, disable_tqdm=True, logging_steps=1, save_steps=3, **LARGE)
    values |= {"eval_strategy": "steps", "eval_steps": 1, "self_test": "never"}
    args = ds_trainer.TrainingArguments(output_dir, **values)
    trainer = kind(model, args, train_dataset=rows(64), eval_dataset=rows(8), **given)
    trainer.train()
    return found, trainer


@pytest.mark.parametrize("where", PLACES)
def test_sizes_are_whole_and_values_are_an_error(where: str, tmp_path: Any) -> None:
    sizes = [
        lambda weights: [tuple(weight.shape) for weight in weights],
        lambda weights: [tuple(weight.size()) for weight in weights],
        lambda weights: [(weight.numel(), weight.ndim, len(weight)) for weight in weights],
    ]
    found, trainer = trained(str(tmp_path), where, lambda weights: [size(weights) for size in sizes])
    assert found == [[SIZES, SIZES, [(24, 2, 6), (6, 1, 6), (12, 2, 2), (2, 1, 2)]]]
    trainer.engine.close()
    with pytest.raises(ds_trainer.ConfigError, match=r"detach was called for (first|second)\.\w+, but ZeRO 3 has only"):
        trained(str(tmp_path / "values"), where, VALUES["detach"])


@pytest.mark.parametrize("values", VALUES)
def test_all_functions_that_use_values_are_an_error(values: str, tmp_path: Any) -> None:
    with pytest.raises(ds_trainer.ConfigError, match="but ZeRO 3 has only a part of each weight"):
        trained(str(tmp_path), "log", VALUES[values])


def test_gathered_weights_are_read_as_they_are(tmp_path: Any) -> None:
    """And a weight that is whole is looked at by nobody."""
    import deepspeed

    def read(weights: list[Any]) -> Any:
        with deepspeed.zero.GatheredParameters(weights):
            inside = [type(weight) for weight in weights], sum(float(weight.norm()) for weight in weights)
        return inside, [type(weight) for weight in weights]

    (((kinds, norm), after),), trainer = trained(str(tmp_path), "log", read)
    assert kinds == [nn.Parameter] * 4 and norm > 1 and after == [ReleasedParameter] * 4
    trainer.engine.close()
