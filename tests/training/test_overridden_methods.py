"""Overridden methods for optimizer, schedule, logs and evaluation, in the shapes of scripts: as in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.compare import weight_distance
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.test_own_steps import Classifier, rows


class SetsOptimizer:
    def create_optimizer(self: Any) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class ReturnsOptimizer:
    def create_optimizer(self: Any) -> Any:
        groups = [{"params": self.model.first.parameters(), "lr": 0.1}, {"params": self.model.second.parameters()}]
        self.optimizer = torch.optim.SGD(groups, lr=0.01)
        return self.optimizer


class ChangesOptimizer:
    def create_optimizer(self: Any, *given: Any, **keywords: Any) -> Any:
        optimizer = super().create_optimizer(*given, **keywords)  # type: ignore[misc]
        for group in self.optimizer.param_groups:
            group.update(weight_decay=0.0, lr=0.02)
        return optimizer


class ChoosesClass:
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}


class ChoosesDecay:
    def get_decay_parameter_names(self: Any, model: Any) -> list[str]:
        return ["first.weight"]


class SetsSchedule:
    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> None:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))


class Logs:
    def log(self: Any, logs: dict[str, float], start_time: Any = None) -> None:
        super().log({**logs, "extra": 1.5}, start_time)  # type: ignore[misc]


class LogsAlone:
    def log(self: Any, logs: dict[str, float], *given: Any) -> None:
        self.state.log_history.append({**logs, "extra": 2.5})


class Evaluates:
    def evaluate(self: Any, *given: Any, **keywords: Any) -> Any:
        metrics = super().evaluate(*given, **keywords)  # type: ignore[misc]
        self.log({"extra": metrics["eval_loss"]})
        return metrics


class EvaluatesOnly:
    def evaluate(self: Any, *given: Any, **keywords: Any) -> None:
        super().evaluate(*given, **keywords)  # type: ignore[misc]


class Loops:
    def evaluation_loop(self: Any, *given: Any, **keywords: Any) -> Any:
        output = super().evaluation_loop(*given, **keywords)  # type: ignore[misc]
        output.metrics["extra"] = 4.0
        return output


class Predicts:
    def prediction_step(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        with torch.no_grad():
            outputs = model(**self._prepare_inputs(inputs))
        return outputs["loss"], None, None


class Operations:
    def floating_point_ops(self: Any, inputs: Any) -> int:
        return 10


class StoresOperations:
    def store_flos(self: Any) -> None:
        self.state.total_flos = 7


CASES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(SetsOptimizer, ReturnsOptimizer, ChangesOptimizer, ChoosesClass, ChoosesDecay, SetsSchedule, Logs, LogsAlone),
        *(Evaluates, EvaluatesOnly, Loops, Predicts, Operations, StoresOperations),
    )
}


def trained(library: Any, case: str, output_dir: str, **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        max_steps=4,
        learning_rate=0.05,
        optim="adamw_torch",
        weight_decay=0.1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
    )
    args = library.TrainingArguments(output_dir, **{**values, **changes})
    cls = type("Own", (CASES[case], library.Trainer), {})
    trainer = cls(Classifier(), args, train_dataset=rows(32), eval_dataset=rows(8))
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    keys = ("loss", "eval_loss", "learning_rate", "extra", "total_flos")
    return [{key: round(entry[key], 4) for key in keys if key in entry} for entry in trainer.state.log_history]


def theirs(case: str, output_dir: str) -> Any:
    import transformers

    trainer = trained(transformers, case, output_dir)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, logged(trainer)


def ours(case: str, output_dir: str, stages: tuple[int, ...], micro_batch: int) -> list[Any]:
    import ds_trainer

    found = []
    for stage in stages:
        trainer = trained(ds_trainer, case, output_dir, zero_stage=stage, per_device_train_batch_size=micro_batch)
        found.append((whole_weights(trainer), logged(trainer)))
        trainer.engine.close()
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", CASES)
def test_an_overridden_method_has_the_effect_that_it_has_in_transformers(case: str, tmp_path: Any) -> None:
    wanted, wanted_logs = pool(1).run(theirs, case, str(tmp_path / "theirs"))[0]
    for world, stages in ((1, (0,)), (2, (2, 3))):
        for weights, logs in pool(world).run(ours, case, str(tmp_path / "ours"), stages, 4 // world)[0]:
            assert weight_distance(weights, wanted) < 1e-4, world
            if case == "Operations":  # those of all ranks are added up
                wanted_logs[-1]["total_flos"] *= world
            assert logs == wanted_logs, world
            if case == "Operations":
                wanted_logs[-1]["total_flos"] /= world
