"""Files and records that a run leaves behind, beside transformers' Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from tests.parity.library import FullTokens, Library, assert_same, both, logs, weights
from tests.support.models import tiny_llama

SAVING: dict[str, dict[str, Any]] = {
    "steps": {"save_strategy": "steps", "save_steps": 3},
    "a share": {"save_strategy": "steps", "save_steps": 0.4},
    "epochs": {"save_strategy": "epoch"},
    "the last two": {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2},
    "never": {"save_strategy": "no"},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", SAVING)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """Which checkpoints there are, and what their trainer_state.json says."""

    def script(library: Library) -> Any:
        library.trainer({"max_steps": 7, **SAVING[name]}).train()
        found = {}
        for path in sorted(library.directory.glob("checkpoint-*")):
            state = json.loads((path / "trainer_state.json").read_text())
            keys = ("global_step", "epoch", "max_steps", "num_train_epochs", "logging_steps", "save_steps")
            history = [[entry["step"], entry["loss"]] for entry in state["log_history"]]
            found[path.name] = [{key: state[key] for key in keys}, history]
        return found

    assert_same(*both(script, tmp_path))


def test_trainer_state_has_the_known_keys(tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        trainer = library.trainer()
        trainer.train()
        trainer.save_state()
        return json.loads((library.directory / "trainer_state.json").read_text())

    ours, reference = both(script, tmp_path)
    assert set(reference) <= set(ours)
    for our_log, other in zip(ours["log_history"], reference["log_history"], strict=True):
        assert set(other) <= set(our_log)


def test_the_returned_metrics(tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        output = library.trainer().train()
        return output._fields, sorted(output.metrics), output.global_step

    ours, reference = both(script, tmp_path)
    assert ours[0] == reference[0] and ours[2] == reference[2]
    assert set(reference[1]) <= set(ours[1])


def test_saved_weights_load_in_transformers(tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        from transformers import AutoModelForCausalLM

        trainer = library.trainer()
        trainer.train()
        trainer.save_model()
        loaded = AutoModelForCausalLM.from_pretrained(library.directory)
        for name, parameter in loaded.named_parameters():
            assert parameter.equal(weights(trainer)[name]), name
        written = {path.name for path in library.directory.iterdir()}
        return sorted(written & {"config.json", "generation_config.json", "model.safetensors"})

    assert_same(*both(script, tmp_path))


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("step", [2, 5])
def test_a_resumed_run_equals_the_uninterrupted_one(step: int, tmp_path: Path) -> None:
    """Stopped at ``step`` and resumed: the same history and weights as transformers' resumed run."""

    def script(library: Library) -> Any:
        changes = {"max_steps": 7, "save_strategy": "steps", "save_steps": step, "eval_strategy": "steps"}
        library.trainer({**changes, "eval_steps": 3}, eval_dataset=FullTokens(9)).train()
        trainer = library.trainer({**changes, "eval_steps": 3}, eval_dataset=FullTokens(9), model=tiny_llama(seed=9))
        trainer.train(resume_from_checkpoint=str(library.directory / f"checkpoint-{step}"))
        return {"logs": logs(trainer), "weights": weights(trainer), "step": trainer.state.global_step}

    assert_same(*both(script, tmp_path))


def test_a_run_of_transformers_is_extended(tmp_path: Path) -> None:
    """Four steps there, eight in all: the rates are those of eight steps, from the first resumed one on."""
    import transformers

    (tmp_path / "theirs").mkdir()
    theirs = Library(transformers, tmp_path / "theirs").trainer({"save_strategy": "steps", "save_steps": 4})
    theirs.train()
    ours = Library(ds_trainer, tmp_path / "ours").trainer({"max_steps": 8})
    ours.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-4"))
    rates = [entry["learning_rate"] for entry in logs(ours)]
    assert rates[4:] == pytest.approx([1e-2 * (8 - step) / 8 for step in range(4, 8)])
    assert ours.state.global_step == 8
    ours.engine.close()


def test_training_twice_with_model_init(tmp_path: Path) -> None:
    """Each train() starts from a new model: both give the same numbers."""

    def script(library: Library) -> Any:
        from transformers import LlamaForCausalLM

        config = tiny_llama().config
        trainer = library.trainer(model_init=lambda: LlamaForCausalLM(config))
        first = trainer.train().training_loss
        second = trainer.train().training_loss
        assert first == pytest.approx(second, rel=1e-6)
        return [first, second, logs(trainer), weights(trainer)]

    assert_same(*both(script, tmp_path))
