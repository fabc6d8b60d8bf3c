"""Scripts and libraries for transformers' Trainer on ours: resumed runs, and the models that they save."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.clients.clients import CLIENTS, LAYOUTS
from tests.clients.runs import Found, by_command_line, numbers, too_different, with_ds_trainer, with_transformers

SAVES = dict(save_strategy="steps", save_steps="2", eval_strategy="no")


def training(found: Found) -> Found:
    """The losses of the steps."""
    return {"history": [entry for entry in found["history"] if "loss" in entry]}


def evaluations(found: Found) -> Found:
    """What was measured after the training, without the epoch."""
    sections = {name: found[name] for name in ("evaluation", "prediction") if name in found}
    return {"history": []} | {
        name: {key: value for key, value in values.items() if key != "epoch"} for name, values in sections.items()
    }


@pytest.mark.parametrize("name", ["TRL SFT", "TRL DPO", "sentence-transformers"])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = training(with_ds_trainer(CLIENTS[name], tmp_path, **SAVES))
    newest = tmp_path / "checkpoint-2"
    assert newest.is_dir()
    resumed = with_ds_trainer(CLIENTS[name], tmp_path, resume_from_checkpoint=str(newest), **SAVES)
    assert len(whole["history"]) == 4
    assert too_different(whole, training(resumed), 1e-6) == []


@pytest.mark.parametrize(
    ("name", "layout"),
    [("masked language modeling", "1 rank"), ("text classification", "ZeRO 3"), ("prompt tuning", "ZeRO 2")],
)
def test_a_script_continues_from_the_newest_checkpoint_that_it_finds(name: str, layout: str, tmp_path: Path) -> None:
    chosen = LAYOUTS[layout]
    whole = with_ds_trainer(CLIENTS[name], tmp_path, chosen.ranks, settings=chosen.settings, **SAVES)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = with_ds_trainer(CLIENTS[name], tmp_path, chosen.ranks, settings=chosen.settings, **SAVES)
    assert len(training(whole)["history"]) == 4
    assert too_different(training(whole), training(resumed), 1e-6) == []
    assert resumed["evaluation"]["eval_loss"] == pytest.approx(whole["evaluation"]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("token classification", "ZeRO 3"),
        ("summarization, label smoothing", "ZeRO 2"),
        ("LoRA", "ZeRO 3"),
        ("prompt tuning", "1 rank"),
    ],
)
def test_transformers_evaluates_the_saved_model(name: str, layout: str, tmp_path: Path) -> None:
    chosen = LAYOUTS[layout]
    trained = with_ds_trainer(CLIENTS[name], tmp_path, chosen.ranks, settings=chosen.settings)
    again = with_transformers(CLIENTS[name], tmp_path / "again", do_train="False", model_name_or_path=str(tmp_path))
    wanted, found = evaluations(again), evaluations(trained)
    assert numbers(wanted)
    assert too_different(wanted, found, 1e-5) == []


def test_a_saved_embedding_model_is_complete(tmp_path: Path) -> None:
    """Also where weights were sharded: the library's own files, with the weights of the training."""
    from sentence_transformers import SentenceTransformer

    found = by_command_line(CLIENTS["sentence-transformers"], tmp_path, 2, ["zero_stage=3"])
    model = SentenceTransformer(str(tmp_path))
    assert model.encode(["a b c"])[0].tolist() == pytest.approx(found["encoded"], rel=1e-4, abs=1e-5)
