"""A search over two ranks: both see the same values, a trial is pruned or fails on both, and the next one is clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import BestRun, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils import distributed
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

RATES = [0.03, 0.05, 0.04, 0.1, 1e-5, 0.2, 0.08, 2e-5]
MICRO_BATCHES = [2, 4, 4, 2, 4, 4, 2, 2]
HOPELESS = (4, 7)  # by their learning rates
BROKEN = 2


class Notes(TrainerCallback):
    """What this rank saw of the trials; in trial ``BROKEN`` the ranks ``failing`` raise in the second step."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        self.failing = failing
        self.seen: list[tuple[str, float, int, int, int]] = []
        self.objectives: list[tuple[str, int, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        rate, accumulation = args.learning_rate, args.gradient_accumulation_steps
        self.seen.append((state.trial_name, rate, args.per_device_train_batch_size, accumulation, args.seed))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.trial_name == f"run-{BROKEN}" and state.global_step == 1 and distributed.rank() in self.failing:
            raise RuntimeError(f"rank {distributed.rank()} breaks")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.objectives.append((state.trial_name, state.global_step, metrics["eval_loss"]))


def make_model() -> nn.Module:
    return Regression()


def arguments(directory: str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        optim="sgd",
        max_grad_norm=1.0,
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
    )
    return TrainingArguments(directory, **{**values, **changes})


def make_trainer(args: TrainingArguments, **options: Any) -> Trainer:
    data = {"train_dataset": regression_rows(48), "eval_dataset": regression_rows(12, seed=1)}
    return Trainer(model_init=make_model, args=args, **data, **options)


def space(trial: Any) -> dict[str, Any]:
    assert distributed.rank() == 0
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1.0, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
        "gradient_accumulation_steps": 2,
        "seed": 7 + trial.number,
    }


def search(directory: str, failing: tuple[int, ...], stage: int) -> dict[str, Any]:
    notes = Notes(failing)
    args = arguments(directory, zero_stage=stage)
    given = dict(vars(args))
    trainer = make_trainer(args, callbacks=[notes])
    storage = f"sqlite:///{directory}/study.db"
    Path(directory).mkdir(exist_ok=True)
    # Keywords for a study whose trials are the planned ones; what has learned nothing by the second step is pruned.
    import optuna

    if distributed.rank() == 0:
        study = optuna.create_study(storage=storage, study_name="planned")
        for rate, size in zip(RATES, MICRO_BATCHES, strict=True):
            study.enqueue_trial({"learning_rate": rate, "per_device_train_batch_size": size})
    pruner = optuna.pruners.ThresholdPruner(upper=7.5, n_warmup_steps=2)  # the untrained model has 7.54
    best = trainer.hyperparameter_search(
        space,
        n_trials=8,
        backend="optuna",
        **({"storage": storage, "study_name": "planned", "load_if_exists": True, "pruner": pruner}),
    )
    same = trainer.args is args and dict(vars(args)) == given
    for name, value in best.hyperparameters.items():  # type: ignore[union-attr]
        setattr(trainer.args, name, value)
    trainer.args.gradient_accumulation_steps, trainer.args.seed = 2, 7 + int(best.run_id)  # type: ignore[union-attr]
    trainer.train()
    by_hand = trainer.state.log_history[-2]["eval_loss"]
    total = trainer.get_total_train_batch_size(trainer.args)
    trainer.engine.close()
    return {
        "best": best,
        "seen": notes.seen,
        "objectives": notes.objectives,
        "arguments are as before": same,
        "by hand": by_hand,
        "samples of a step": total,
    }


def alone(directory: str, number: int, stage: int) -> list[float]:
    """The evaluations of a plain run with the values of trial ``number``."""
    values = {
        "learning_rate": RATES[number],
        "per_device_train_batch_size": MICRO_BATCHES[number],
        "gradient_accumulation_steps": 2,
        "seed": 7 + number,
    }
    trainer = make_trainer(arguments(directory, zero_stage=stage, **values))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    trainer.engine.close()
    return losses


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "failing"), [(0, (1,)), (3, (0, 1))])
def test_a_study_of_eight_trials(stage: int, failing: tuple[int, ...], tmp_path: Path) -> None:
    import optuna

    directory = str(tmp_path / "search")
    first, second = pool(2).run(search, directory, failing, stage)
    study = optuna.load_study(study_name="planned", storage=f"sqlite:///{directory}/study.db")
    states = [trial.state.name for trial in study.trials]
    wanted = ["COMPLETE"] * 8
    wanted[BROKEN] = "FAIL"
    for number in HOPELESS:
        wanted[number] = "PRUNED"
    assert states == wanted
    assert "breaks" in study.trials[BROKEN].user_attrs["ds_trainer:error"]
    # Both ranks saw the same, and what was planned.
    assert first == second
    planned = [(f"run-{n}", RATES[n], MICRO_BATCHES[n], 2, 7 + n) for n in range(8)]
    assert first["seen"][:8] == planned
    # Every trial gives the numbers of a run of its own, also those after the one that failed.
    runs = {n: pool(2).run(alone, str(tmp_path / f"alone-{n}"), n, stage)[0] for n in range(8) if n != BROKEN}
    for number, losses in runs.items():
        found = [loss for name, _, loss in first["objectives"] if name == f"run-{number}"]
        assert found == losses[: len(found)]
        assert len(found) == (2 if number in HOPELESS else 4)
    finals = {n: losses[-1] for n, losses in runs.items() if n not in HOPELESS}
    best = min(finals, key=lambda n: finals[n])
    assert first["best"] == BestRun(
        str(best), finals[best], {"learning_rate": RATES[best], "per_device_train_batch_size": MICRO_BATCHES[best]}
    )
    # Afterwards: the trainer is its own again, and trains with the best values when they are set by hand.
    assert first["arguments are as before"]
    assert first["by hand"] == finals[best]
    assert first["samples of a step"] == 2 * 2 * MICRO_BATCHES[best]
    assert sorted(path.name for path in Path(directory).iterdir() if path.name.startswith("run-")) == [
        f"run-{n}" for n in range(8)
    ]
    assert torch.tensor(list(finals.values())).unique().numel() == len(finals)  # or equality would show nothing
