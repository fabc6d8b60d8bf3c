"""Arguments that decide the trajectory: taken over when they differ; with strict_resume refused unless allowed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError, Trainer, TrainingArguments
from ds_trainer.training.resume.compatibility import NAMES, allowed_names
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

ROWS = regression_rows(40)


def trainer_of(output_dir: Path | str, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=3,
        disable_tqdm=True,
        use_cpu=True,
        optim="adamw_torch",
    )
    return Trainer(Regression(), TrainingArguments(str(output_dir), **{**values, **arguments}), train_dataset=ROWS)


def trained(output_dir: Path | str, resume: Any = None, **arguments: Any) -> Trainer:
    trainer = trainer_of(output_dir, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("written")
    trained(directory).engine.close()
    return str(directory / "checkpoint-3")


CHANGED: list[tuple[str, Any, str]] = [
    ("learning_rate", 5e-3, "learning_rate was 0.01 when"),
    ("lr_scheduler_type", "linear", "lr_scheduler_type was cosine when"),
    ("lr_scheduler_kwargs", {"num_cycles": 1.0}, 'and is {"num_cycles": 1.0}'),
    ("warmup_steps", 2, "warmup_steps was 0"),
    ("max_steps", 9, "max_steps was 6"),
    ("weight_decay", 0.0, "weight_decay was 0.1"),
    ("adam_beta2", 0.9, "adam_beta2 was 0.999"),
    ("max_grad_norm", 0.0, "max_grad_norm was 1.0"),
    ("optim", "sgd", "optim was adamw_torch"),
    ("seed", 7, "seed was 42"),
    ("train_sampling_strategy", "sequential", "train_sampling_strategy was random"),
    ("per_device_train_batch_size", 2, "global_batch was 4"),
    ("bf16", True, "bf16 was false"),
    ("grad_accum_dtype", "fp32", "grad_accum_dtype was null"),
    ("deepspeed", {"gradient_clipping": 1.0, "data_types": {"grad_accum_dtype": "fp32"}}, "deepspeed."),
]


@pytest.mark.parametrize(("name", "value", "message"), CHANGED, ids=[name for name, _, _ in CHANGED])
def test_arguments_that_decide_the_weights_are_compared(
    name: str, value: Any, message: str, checkpoint: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, strict_resume=True, **{name: value})
    with pytest.raises(ConfigError) as error:
        trainer.train(resume_from_checkpoint=checkpoint)
    assert message in str(error.value) and checkpoint in str(error.value)
    assert "Set it back, or resume with the new value: allow_changed_on_resume=[" in str(error.value)


def test_all_differences_are_reported_at_once(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trained(
            tmp_path,
            checkpoint,
            strict_resume=True,
            learning_rate=5e-3,
            weight_decay=0.0,
            allow_changed_on_resume=["weight_decay"],
            seed=1,
        )
    assert [problem.partition(" was ")[0] for problem in error.value.problems] == ["learning_rate", "seed", "data_seed"]


FREE: list[dict[str, Any]] = [
    {"zero_stage": 2, "logging_steps": 2},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    {"dataloader_drop_last": True},  # leaves out nothing: 40 samples are 10 micro_steps
    {"save_steps": 2, "run_name": "another", "seed": 42, "data_seed": 42},
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("arguments", FREE, ids=str)
def test_other_arguments_may_change(arguments: dict[str, Any], checkpoint: str, tmp_path: Path) -> None:
    trainer = trained(tmp_path, checkpoint, strict_resume=True, **arguments)
    assert trainer.state.global_step == 6
    trainer.engine.close()


def test_the_length_is_compared_only_if_the_schedule_depends_on_it(tmp_path: Path) -> None:
    for kind, free in (("constant", True), ("linear", False)):
        directory = tmp_path / kind
        trained(directory, lr_scheduler_type=kind, max_steps=3).engine.close()
        trainer = trainer_of(directory, lr_scheduler_type=kind, max_steps=6, strict_resume=True)
        if free:
            assert trainer.train(resume_from_checkpoint=True).global_step == 6
        else:
            with pytest.raises(ConfigError, match=r"max_steps was 3 when .* and is 6"):
                trainer.train(resume_from_checkpoint=True)
        if trainer._ds_trainer.engines.training_or_none is not None:
            trainer.engine.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changed",
    [{"learning_rate": 5e-3}, {"lr_scheduler_type": "linear"}, {"warmup_steps": 2}, {"max_steps": 8}],
    ids=str,
)
def test_an_allowed_schedule_change_continues_at_the_step(
    changed: dict[str, Any], checkpoint: str, tmp_path: Path
) -> None:
    """From the step on its rates are those of a run that had them from the beginning."""
    uninterrupted = trained(tmp_path / "whole", **changed)
    strict = {"strict_resume": True, "allow_changed_on_resume": list(changed)}
    found = trained(tmp_path / "found", checkpoint, **strict, **changed)
    assert logged(found, "learning_rate")[3:] == logged(uninterrupted, "learning_rate")[3:]
    assert logged(found, "learning_rate")[:3] != logged(uninterrupted, "learning_rate")[:3]
    for trainer in (uninterrupted, found):
        trainer.engine.close()


@pytest.mark.parametrize("strict", [True, False])
def test_allowed_changes_take_effect(strict: bool, checkpoint: str, tmp_path: Path) -> None:
    names = ["weight_decay", "adam_beta1", "adam_epsilon"]
    trainer = trained(
        tmp_path,
        checkpoint,
        weight_decay=0.3,
        adam_beta1=0.5,
        adam_epsilon=1e-4,
        strict_resume=strict,
        allow_changed_on_resume=names if strict else [],
    )
    groups = trainer.optimizer.param_groups
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.3]
    assert {group["betas"][0] for group in groups} == {0.5} and {group["eps"] for group in groups} == {1e-4}
    assert {group["betas"][1] for group in groups} == {0.999}
    trainer.engine.close()


def test_another_optimizer_starts_without_states(checkpoint: str, tmp_path: Path) -> None:
    names = ["optim", "learning_rate"]
    trainer = trained(tmp_path, checkpoint, optim="sgd", learning_rate=1e-3, allow_changed_on_resume=names)
    assert type(trainer.optimizer).__name__ == "SGD" and trainer.state.global_step == 6
    assert logged(trainer, "learning_rate")[3] == pytest.approx(0.5e-3)
    trainer.engine.close()


def test_the_restored_state_is_printed(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, checkpoint, learning_rate=5e-3).engine.close()
    text = capsys.readouterr().out
    start = text.index("Resumed from ")
    lines = text[start:].splitlines()[:11]
    assert lines[0] == f"Resumed from {checkpoint}: step 3 of 6"
    words = dict(line.split(maxsplit=1) for line in lines[1:] if not line.strip().startswith(("state of", "random")))
    assert words["weights"] == words["optimizer"] == "restored"
    assert words["schedule"] == "LambdaLR, moved to learning rate 0.0025"
    assert words["data"] == "epoch 0, after 12 samples"
    assert lines[8:10] == ["Changed since then:", "  argument       was   is     what follows"]
    assert words["learning_rate"] == "0.01  0.005  the schedule is computed anew: learning rate 0.0025 at step 4"


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'learning_rat' is not compared .* Did you mean 'learning_rate'"):
        allowed_names(["learning_rat"])
    assert allowed_names(["num_train_epochs", "gradient_accumulation_steps"]) == {"max_steps", "global_batch"}
    assert "global_batch" in NAMES


def test_the_arguments_are_in_the_checkpoint(checkpoint: str) -> None:
    written = json.loads((Path(checkpoint) / "training_args.json").read_text())
    assert written["learning_rate"] == 1e-2 and written["allow_changed_on_resume"] == []


# -- weights only ----------------------------------------------------------------------------------------------------


def weights_at_the_start(output_dir: str, source: str, stage: int) -> dict[str, torch.Tensor]:
    """What a run that takes its weights from elsewhere has after a step that changes nothing."""
    from tests.support.runs import whole_weights

    arguments = {"learning_rate": 0.0, "weight_decay": 0.0, "max_steps": 1, "zero_stage": stage}
    args = TrainingArguments(
        output_dir, start_from_weights=source, use_cpu=True, disable_tqdm=True, save_strategy="no", **arguments
    )
    trainer = Trainer(Regression(seed=5), args, train_dataset=ROWS)
    trainer.train()
    found = whole_weights(trainer)
    trainer.engine.close()
    return found


def saved_weights(output_dir: str) -> dict[str, torch.Tensor]:
    from tests.support.runs import whole_weights

    trainer = trained(output_dir, zero_stage=3, per_device_train_batch_size=2, save_steps=6)
    found = whole_weights(trainer)
    trainer.save_model(f"{output_dir}/exported")
    trainer.engine.close()
    return found


@pytest.mark.cases(3)
@pytest.mark.parametrize("source", ["checkpoint-6", "exported"])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_a_run_can_start_from_weights_only(source: str, world: int, stage: int, tmp_path: Path) -> None:
    wanted = pool(2).run(saved_weights, str(tmp_path))[0]
    for found in pool(world).run(weights_at_the_start, str(tmp_path / "new"), str(tmp_path / source), stage):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_paths_without_weights_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        trained(tmp_path, start_from_weights=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        trained(tmp_path, start_from_weights=str(tmp_path / "empty"))


def test_tied_weights_are_found_by_either_name(tmp_path: Path) -> None:
    from tests.support.models import tiny_llama

    tiny_llama(seed=1, tied=True).save_pretrained(tmp_path / "tied")
    assert pool(1).run(partial(begun_tied, str(tmp_path)))[0]


def begun_tied(directory: str) -> bool:
    from tests.support.models import RaggedTokens, tiny_llama

    args = TrainingArguments(
        directory,
        start_from_weights=f"{directory}/tied",
        max_steps=1,
        learning_rate=0.0,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(tiny_llama(seed=2, tied=True), args, train_dataset=RaggedTokens(8))
    trainer.train()
    wanted = dict(tiny_llama(seed=1, tied=True).named_parameters())
    same = all(torch.equal(p.detach(), wanted[name]) for name, p in trainer.model.named_parameters())
    trainer.engine.close()
    return same
