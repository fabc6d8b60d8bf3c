"""The best model: decided as transformers decides, saved, kept, and loaded when training ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.training.loop.best_model import judge
from ds_trainer.utils.errors import ConfigError
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.predictions import KINDS, Pair, arguments, class_rows
from tests.support.runs import whole_weights

# What an evaluation "finds", step by step: better, worse, best, worse, as good, hardly better, worse, worse.
SCORES = [0.5, 0.4, 0.8, 0.6, 0.8, 0.81, 0.7, 0.2]


class Script:
    """``compute_metrics`` with the values of a script, one for each evaluation."""

    def __init__(self, scores: list[float], start: int = 0) -> None:
        self.scores, self.next = scores, start

    def __call__(self, found: Any) -> dict[str, float]:
        self.next += 1
        return {"score": self.scores[self.next - 1]}


VALUES: dict[str, Any] = dict(
    max_steps=8,
    eval_strategy="steps",
    eval_steps=1,
    save_strategy="steps",
    save_steps=1,
    metric_for_best_model="score",
    learning_rate=0.05,
    per_device_train_batch_size=2,
)


def train_with_trainer(
    output_dir: Any,
    scores: list[float] = SCORES,
    callbacks: Any = None,
    start: int = 0,
    kind: str = "tuple",
    **changes: Any,
) -> Trainer:
    model, rows, collate = KINDS[kind]
    return Trainer(
        model(),
        arguments(output_dir, **{**VALUES, **changes}),
        data_collator=collate,
        train_dataset=rows(8),
        eval_dataset=rows(3),
        compute_metrics=Script(scores, start),
        callbacks=callbacks,
    )


def train_with_transformers(
    output_dir: Any, scores: list[float] = SCORES, callbacks: Any = None, **changes: Any
) -> Any:
    import transformers

    values = {**VALUES, "disable_tqdm": True, "use_cpu": True, "report_to": "none", **changes}
    return transformers.Trainer(
        Pair(),
        transformers.TrainingArguments(str(output_dir), **values),
        train_dataset=class_rows(8),
        eval_dataset=class_rows(3),
        compute_metrics=Script(scores),
        callbacks=callbacks,
    )


def best_of(trainer: Any, output_dir: Path) -> tuple[Any, ...]:
    state = trainer.state
    name = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name
    return (
        state.best_metric,
        state.best_global_step,
        name,
        sorted(path.name for path in output_dir.glob("checkpoint-*")),
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"greater_is_better": False},
        {"save_strategy": "no"},
        {"save_total_limit": 2},
        {"save_total_limit": 1},
        {"save_total_limit": 1, "load_best_model_at_end": True},
        {"save_total_limit": 3, "load_best_model_at_end": True, "save_steps": 2},
        {"save_strategy": "best", "save_total_limit": 1, "load_best_model_at_end": True},
        {"metric_for_best_model": None, "load_best_model_at_end": True},
    ],
    ids=str,
)
def test_the_best_checkpoint_is_that_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    wanted = train_with_transformers(tmp_path / "theirs", **changes)
    wanted.train()
    found = train_with_trainer(tmp_path / "mine", zero_stage=0, **changes)
    found.train()
    if changes.get("metric_for_best_model", "") is None:  # the loss: the numbers of two engines
        assert found.args.metric_for_best_model == "loss" and found.args.greater_is_better is False
        assert found.state.best_metric == min(e["eval_loss"] for e in found.state.log_history if "eval_loss" in e)
        return
    assert best_of(found, tmp_path / "mine") == best_of(wanted, tmp_path / "theirs")
    saved = TrainerState.load_from_json(tmp_path / "mine" / "trainer_state.json")
    assert (saved.best_metric, saved.best_global_step) == (found.state.best_metric, found.state.best_global_step)


# -- loading it --------------------------------------------------------------------------------------------------------


def llama_with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    return get_peft_model(tiny_llama(), config)


def token_rows(samples: int) -> list[Any]:
    return [RaggedTokens(samples)[index] for index in range(samples)]


KINDS["llama"] = (tiny_llama, token_rows, None)
KINDS["adapters"] = (llama_with_adapters, token_rows, None)


def train_and_compare(
    output_dir: str, load: bool, kind: str = "ragged tokens", **changes: Any
) -> tuple[bool, bool, int]:
    """Whether the weights at the end are those of the best evaluation, of the last one; the best step."""
    trainer = train_with_trainer(output_dir, load_best_model_at_end=load, kind=kind, **changes)
    weights: dict[int, Any] = {}
    evaluate = trainer.evaluate

    def note(*args: Any, **kwargs: Any) -> Any:
        weights[trainer.state.global_step] = whole_weights(trainer)
        return evaluate(*args, **kwargs)

    trainer.evaluate = note  # type: ignore[method-assign]
    trainer.train()
    end, best = whole_weights(trainer), trainer.state.best_global_step
    assert best is not None
    trainer.save_model(f"{output_dir}/final")
    trainer.engine.close()
    alike = [all(torch.equal(end[name], weights[step][name]) for name in end) for step in (best, 3)]
    return alike[0], alike[1], best


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "changes",
    [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3}, {"bf16": True}, {"bf16": True, "zero_stage": 3}],
    ids=str,
)
def test_the_best_weights_are_back_at_the_end(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"scores": [0.5, 0.8, 0.1], "max_steps": 3, **changes}
    for best, last, step in pool(2).run(partial(train_and_compare, str(tmp_path / "a"), True, **changes)):
        assert (best, last, step) == (True, False, 2)
    from safetensors.torch import load_file

    final = load_file(tmp_path / "a" / "final" / "model.safetensors")
    for best, last, _ in pool(2).run(partial(train_and_compare, str(tmp_path / "b"), False, **changes)):
        assert (best, last) == (False, True)
    other = load_file(tmp_path / "b" / "final" / "model.safetensors")
    assert not torch.equal(final["head.weight"], other["head.weight"])


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "changes",
    [
        *({"zero_stage": stage} for stage in (0, 1, 2, 3)),
        {"zero_stage": 3, "bf16": True},
        {"zero_stage": 1, "kind": "llama", "tensor_parallel_size": 2},
        {"zero_stage": 2, "kind": "adapters"},
        {"zero_stage": 3, "kind": "adapters"},
    ],
    ids=str,
)
def test_the_best_weights_are_back_without_other_states(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"scores": [0.5, 0.8, 0.1], "max_steps": 3, "save_only_model": True, **changes}
    for best, last, step in pool(2).run(partial(train_and_compare, str(tmp_path), True, **changes)):
        assert (best, last, step) == (True, False, 2)


def test_a_resumed_run_loads_a_best_model_of_weights_alone(tmp_path: Path) -> None:
    """The best evaluation is of the resumed part, which saves weights only; and its first checkpoint is whole."""
    train_with_trainer(tmp_path, zero_stage=1, max_steps=2).train()
    second = train_with_trainer(
        tmp_path, zero_stage=1, start=2, max_steps=4, save_only_model=True, load_best_model_at_end=True
    )
    second.train(resume_from_checkpoint=True)
    from safetensors.torch import load_file

    assert second.state.best_global_step == 3
    wanted = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    found = second.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not any((tmp_path / "checkpoint-3").glob("rank_*"))


def disagree(output_dir: str) -> tuple[Any, ...]:
    """A metric that differs over the ranks in its last digits."""
    args = arguments(output_dir, metric_for_best_model="score", eval_strategy="epoch", save_strategy="epoch")
    state = TrainerState()
    found = []
    for step, score in enumerate((0.5, 0.5 + 1e-9 * args.process_index, 0.7)):
        state.global_step = step + 1
        found.append(judge(args, state, {"eval_score": score}))
    return (*found, state.best_metric, state.best_global_step)


def test_ranks_agree_on_the_best(tmp_path: Path) -> None:
    assert pool(2).run(disagree, str(tmp_path)) == [(True, False, True, 0.7, 3)] * 2


# -- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_remembers_the_best_metric(tmp_path: Path) -> None:
    uninterrupted = train_with_trainer(tmp_path / "whole", zero_stage=0, load_best_model_at_end=True)
    uninterrupted.train()
    first = train_with_trainer(tmp_path / "parts", zero_stage=0, load_best_model_at_end=True, max_steps=4)
    first.train()
    assert first.state.best_global_step == 3
    second = train_with_trainer(tmp_path / "parts", zero_stage=0, load_best_model_at_end=True, start=4)
    second.train(resume_from_checkpoint=True)
    assert best_of(second, tmp_path / "parts") == best_of(uninterrupted, tmp_path / "whole")


def test_a_missing_best_checkpoint_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging
    import shutil

    logging.getLogger("ds_trainer").propagate = True
    train_with_trainer(tmp_path, zero_stage=0, max_steps=4).train()
    shutil.rmtree(tmp_path / "checkpoint-3")
    scores = [*SCORES[:4], 0.0, 0.0, 0.0, 0.0]
    trainer = train_with_trainer(tmp_path, scores, zero_stage=0, load_best_model_at_end=True, start=4)
    trainer.train(resume_from_checkpoint=True)
    assert "no longer exists: the model keeps its last weights" in caplog.text
    assert list_checkpoints(tmp_path)[-1].name == "checkpoint-8"


def test_a_metric_that_is_never_a_number_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    logging.getLogger("ds_trainer").propagate = True
    scores = [float("nan")] * 8
    train_with_trainer(tmp_path, scores, zero_stage=0, load_best_model_at_end=True).train()
    assert "was never a finite number (nan): the model keeps its last weights" in caplog.text


# -- early stopping, in runs -------------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (2, 0.0), (2, 0.05), (3, 0.0), (9, 0.0)])
def test_early_stopping_stops_where_transformers_stops(patience: int, threshold: float, tmp_path: Path) -> None:
    import transformers

    wanted = train_with_transformers(
        tmp_path / "theirs", callbacks=[transformers.EarlyStoppingCallback(patience, threshold)]
    )
    wanted.train()
    found = train_with_trainer(tmp_path / "mine", zero_stage=0, callbacks=[EarlyStoppingCallback(patience, threshold)])
    found.train()
    assert found.state.global_step == wanted.state.global_step
    assert best_of(found, tmp_path / "mine") == best_of(wanted, tmp_path / "theirs")


def stop_early(output_dir: Path, max_steps: int, start: int, resume: bool) -> tuple[int, int]:
    stopping = EarlyStoppingCallback(3)
    scores = [0.5, 0.4, 0.3, 0.2, 0.1]  # worse from the second on: over at step 4
    trainer = train_with_trainer(output_dir, scores, [stopping], start, max_steps=max_steps, zero_stage=0)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, stopping.early_stopping_patience_counter


def test_early_stopping_is_restored(tmp_path: Path) -> None:
    assert stop_early(tmp_path / "whole", 8, 0, False) == (4, 3)
    assert stop_early(tmp_path / "parts", 3, 0, False) == (3, 2)
    assert stop_early(tmp_path / "parts", 8, 3, True) == (4, 3)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_strategy": "no"}, "eval_strategy=no and save_strategy=steps"),
        ({"eval_strategy": "epoch"}, "eval_strategy=epoch and save_strategy=steps"),
        ({"save_steps": 3, "eval_steps": 2}, "save_steps=3 must be a multiple of eval_steps=2"),
        ({"save_steps": 0.5, "eval_steps": 2}, "save_steps=0.5 must be a multiple of eval_steps=2"),
        ({"save_steps": 0.3, "eval_steps": 0.2}, "save_steps=0.3 must be a multiple of eval_steps=0.2"),
    ],
    ids=str,
)
def test_load_best_model_at_end_is_checked(changes: dict[str, Any], message: str) -> None:
    values = {**VALUES, "load_best_model_at_end": True, **changes}
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **values)
    assert message in str(error.value) and len(error.value.problems) == 1


def test_valid_combinations_are_accepted() -> None:
    for changes in (
        {"save_steps": 0.3, "eval_steps": 0.1},
        {"save_steps": 4, "eval_steps": 2},
        {"save_strategy": "best"},
    ):
        args = TrainingArguments("out", **{**VALUES, "load_best_model_at_end": True, **changes})
        assert args.greater_is_better is True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy=best saves after an evaluation"),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, "save_strategy=best needs a metric"),
        ({"greater_is_better": True}, "greater_is_better=True compares metrics, but metric_for_best_model is not set"),
    ],
    ids=str,
)
def test_best_needs_a_metric_and_evaluations(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", **values)
    assert message in str(error.value) and len(error.value.problems) == 1


def test_a_missing_metric_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        train_with_trainer(tmp_path, zero_stage=0, metric_for_best_model="f1").train()
    assert "the evaluation has no metric eval_f1, only eval_score, eval_loss" in str(error.value)
