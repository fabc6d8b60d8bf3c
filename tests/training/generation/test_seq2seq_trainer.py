"""``Seq2SeqTrainer`` in one process: metrics, tokens and labels of transformers' own, and what decides about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_trainer import ConfigError, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainingArguments
from tests.support.translations import (
    END,
    ENDS,
    MODELS,
    PAD,
    arguments,
    make,
    pad_left,
    pad_pairs,
    pairs,
    prompts,
    text_metrics,
    tiny_t5,
)

METRICS = ("exact", "words", "order", "targets")


def transformers_trainer(kind: str, directory: Path, samples: int = 5, **changes: Any) -> Any:
    import transformers

    args = transformers.Seq2SeqTrainingArguments(
        str(directory), use_cpu=True, per_device_eval_batch_size=2, predict_with_generate=True, report_to="none",
        disable_tqdm=True, **changes
    )  # fmt: skip
    alone = kind == "decoder"
    rows = prompts(samples) if alone else pairs(samples)
    collate = pad_left if alone else pad_pairs
    return transformers.Seq2SeqTrainer(
        MODELS[kind](), args, data_collator=collate, eval_dataset=rows, compute_metrics=text_metrics
    )


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, arguments, keywords
    "t5": ("t5", {"generation_max_length": 12}, {}),
    "t5, beams": ("t5", {"generation_max_length": 9, "generation_num_beams": 4}, {}),
    "t5, longer than the configuration": ("t5", {}, {"max_new_tokens": 24, "num_beams": 2}),
    "t5, smoothed": ("t5", {"label_smoothing_factor": 0.1}, {"max_length": 8}),
    "bart": ("bart", {}, {"max_length": 10, "num_beams": 4}),
    "decoder": ("decoder", {}, {"max_new_tokens": 6}),
}


@pytest.mark.parametrize("name", CASES)
def test_metrics_tokens_and_labels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes, keywords = CASES[name]
    other = transformers_trainer(kind, tmp_path, samples=4, **changes)
    ours = make(kind, tmp_path, 4, **changes)
    wanted = other.predict(other.eval_dataset, **keywords)
    found = ours.predict(ours.eval_dataset, **keywords)
    np.testing.assert_array_equal(found.predictions, wanted.predictions)
    np.testing.assert_array_equal(found.label_ids, wanted.label_ids)
    assert found.metrics is not None
    for metric in METRICS:
        assert found.metrics[f"test_{metric}"] == wanted.metrics[f"test_{metric}"]
    assert len({tuple(row) for row in found.predictions.tolist()}) > 1  # or the comparison would show little


def test_evaluate_is_that_of_transformers_and_the_loss_the_mean_over_tokens(tmp_path: Path) -> None:
    ours, other = make("t5", tmp_path, 2), transformers_trainer("t5", tmp_path, samples=2)
    found = ours.evaluate(metric_key_prefix="dev", max_length=7)
    wanted = other.evaluate(metric_key_prefix="dev", max_length=7)  # one batch: their mean over batches is exact
    for metric in ("loss", *METRICS):
        assert found[f"dev_{metric}"] == pytest.approx(wanted[f"dev_{metric}"], abs=1e-6)
    many = make("t5", tmp_path, 5).evaluate(max_length=7)
    with torch.no_grad():
        full_model = tiny_t5().eval()(**pad_pairs(pairs(5)))
    assert many["eval_loss"] == pytest.approx(full_model.loss.item(), abs=1e-6)


def seen(trainer: Seq2SeqTrainer) -> list[dict[str, Any]]:
    """The keywords of each call of ``generate`` from now on."""
    calls: list[dict[str, Any]] = []
    generate = trainer.model.generate

    def watched(**keywords: Any) -> Any:
        calls.append({k: keywords[k] for k in ("max_length", "num_beams", "max_new_tokens") if k in keywords})
        return generate(**keywords)

    trainer.model.generate = watched  # type: ignore[assignment]
    return calls


def test_keywords_override_arguments(tmp_path: Path) -> None:
    """In evaluations of one dataset and of several; the next plain evaluation has those of the arguments again."""
    trainer = make("t5", tmp_path, 2, generation_max_length=6, generation_num_beams=2)
    trainer.eval_dataset = {"a": pairs(2), "b": pairs(2, seed=3)}
    calls = seen(trainer)
    trainer.evaluate(max_length=5, num_beams=1)
    trainer.evaluate()
    trainer.predict(pairs(1), max_new_tokens=3)
    trainer.predict(pairs(1), max_length=None, num_beams=None)
    trainer.prediction_step(trainer.model, pad_pairs(pairs(1)), False, num_beams=3)
    given, usual = {"max_length": 5, "num_beams": 1}, {"max_length": 6, "num_beams": 2}
    assert calls[:4] == [given, given, usual, usual]
    assert calls[4:] == [{"max_new_tokens": 3, "num_beams": 2}, usual, {"max_length": 6, "num_beams": 3}]


def test_evaluations_during_training_generate_with_the_arguments(tmp_path: Path) -> None:
    trainer = make(
        "t5", tmp_path, 3, max_steps=2, eval_strategy="steps", eval_steps=1, generation_max_length=5, zero_stage=0
    )
    calls = seen(trainer)
    trainer.train()
    assert calls == [{"max_length": 5}] * 4
    assert all("eval_exact" in entry for entry in trainer.state.log_history if "eval_loss" in entry)


def test_a_generation_config_may_have_every_form(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    fields = {"max_new_tokens": 3, "eos_token_id": END, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    config = GenerationConfig(**fields)
    config.save_pretrained(tmp_path)
    path = tmp_path / "own.json"
    path.write_text(config.to_json_string(), encoding="utf-8")
    for form in (config, fields, json.dumps(fields), str(tmp_path), tmp_path, str(path)):
        trainer = make("t5", tmp_path / "out", 2, generation_config=form)
        assert trainer.predict(pairs(2)).predictions.shape == (2, 20)
        assert trainer.model.generation_config.max_new_tokens == 3  # type: ignore[union-attr]
        assert trainer.model.generation_config is not config
        assert (trainer.predict(pairs(2)).predictions[:, 4:] == PAD).all()
        json.dumps(trainer.args.to_dict())
    assert arguments(tmp_path, generation_config=config).to_dict()["generation_config"]["max_new_tokens"] == 3


def test_a_new_model_gets_the_generation_config_and_it_is_not_modified(tmp_path: Path) -> None:
    args = arguments(tmp_path, generation_config={"max_new_tokens": 4, "pad_token_id": PAD, "eos_token_id": ENDS})
    trainer = Seq2SeqTrainer(args=args, model_init=tiny_t5, data_collator=pad_pairs, compute_metrics=text_metrics)
    for model in (trainer.model, trainer.call_model_init()):
        assert model.generation_config.max_new_tokens == 4  # type: ignore[union-attr]
    before = make("t5", tmp_path, 2)
    kept = before.model.generation_config.to_dict()  # type: ignore[union-attr,operator]
    before.evaluate()
    assert before.model.generation_config.to_dict() == kept  # type: ignore[union-attr,operator]


WRONG: list[tuple[Any, str]] = [
    ({"num_beam": 2}, "'num_beam' is not a field of GenerationConfig. Did you mean 'num_beams'?"),
    ({"num_beams": 0}, "num_beams=0 must be a positive integer"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"do_sample": False, "temperature": 0.5}, "temperature"),
    ("absent/of/mine.json", "does not exist"),
    ("{broken", "is not valid JSON"),
    (7, "a int is not a generation configuration"),
]


@pytest.mark.parametrize(("value", "message"), WRONG)
def test_an_invalid_generation_config_is_rejected_at_construction(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Seq2SeqTrainer(tiny_t5(), arguments(tmp_path, generation_config=value))
    assert "generation_config" in str(error.value) and message in str(error.value)


def test_a_directory_without_a_generation_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no generation_config\.json"):
        arguments(tmp_path, generation_config=tmp_path)
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="does not hold a mapping"):
        arguments(tmp_path, generation_config=str(tmp_path / "list.json"))
    with pytest.raises(ConfigError, match="is not one of auto, always, never"):
        arguments(tmp_path, generation_gather="sometimes")
    with pytest.raises(ConfigError, match="two orders of the samples"):
        arguments(tmp_path, sortish_sampler=True, train_sampling_strategy="group_by_length")


def test_other_wrong_uses_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Pass Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(tiny_t5(), TrainingArguments(str(tmp_path)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Linear has no method generate"):
        Seq2SeqTrainer(nn.Linear(2, 2), arguments(tmp_path))
    trainer = make("decoder", tmp_path, 2)
    trainer.model.config.pad_token_id = trainer.model.generation_config.pad_token_id = None  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="pad_token_id"):
        trainer.predict(prompts(2), max_new_tokens=4, pad_token_id=PAD)
    assert isinstance(Seq2SeqTrainer(tiny_t5(), None).args, Seq2SeqTrainingArguments)


def test_predictions_without_labels_and_with_the_loss_only(tmp_path: Path) -> None:
    unlabelled = make("t5", tmp_path, 3, labelled=False)
    output = unlabelled.predict(unlabelled.eval_dataset, max_length=6)
    assert output.label_ids is None and "test_loss" not in (output.metrics or {})
    assert output.predictions.shape == (3, 20)
    alone = make("t5", tmp_path, 3, prediction_loss_only=True)
    calls = seen(alone)
    output = alone.predict(alone.eval_dataset)
    assert output.predictions is None and "test_loss" in (output.metrics or {}) and not calls
    alone.compute_metrics = None
    assert "eval_loss" in alone.evaluate() and not calls  # nobody would look at tokens


def test_decoder_inputs_derived_from_the_labels_are_not_used(tmp_path: Path) -> None:
    """Or the model would continue the answer."""
    trainer = make("bart", tmp_path, 4)
    wanted = trainer.predict(trainer.eval_dataset, max_length=8).predictions

    def with_decoder_inputs(rows: Any) -> dict[str, torch.Tensor]:
        batch = pad_pairs(rows)
        made = trainer.model.prepare_decoder_input_ids_from_labels(batch["labels"])  # type: ignore[operator]
        return {**batch, "decoder_input_ids": made}

    trainer.data_collator = with_decoder_inputs
    np.testing.assert_array_equal(trainer.predict(trainer.eval_dataset, max_length=8).predictions, wanted)
