"""A Trainer that is given a name: what it makes of it, and what works before and beside training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from ds_trainer.checkpoint.loading.file_weights import FileWeights
from ds_trainer.engine.loading.weight_source import attached_weight_source
from ds_trainer.monitor.header import load_text
from ds_trainer.utils.units import human_bytes
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.saved_models import Labelled, saved


def arguments(output_dir: Path, kind: Any = TrainingArguments, **values: Any) -> Any:
    common: dict[str, Any] = dict(use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", self_test="never")
    return kind(str(output_dir / "out"), **{**common, "max_steps": 2, "per_device_train_batch_size": 4, **values})


def trainer_of(model: Any, output_dir: Path, data: Any = None, kind: Any = Trainer, **values: Any) -> Any:
    keywords = {name: values.pop(name) for name in ("model_init", "peft_config") if name in values}
    rows = RaggedTokens(16) if data is None else data
    return kind(model, arguments(output_dir, **values), train_dataset=rows, eval_dataset=rows, **keywords)


def transformers_llama(directory: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def on_meta(trainer: Any) -> bool:
    return all(parameter.is_meta for parameter in trainer.model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_named_model_can_be_used_before_training(stage: int, llama: str, tmp_path: Path) -> None:
    trainer = trainer_of(Path(llama), tmp_path, zero_stage=stage)
    assert on_meta(trainer)
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in tiny_llama().parameters())
    assert trainer._ds_trainer.telemetry.flop_rule(trainer.model).flops_per_token(1) > 0
    assert on_meta(trainer)  # the weights were not needed for that
    trainer.save_model(str(tmp_path / "copy"))
    copy, expected = transformers_llama(str(tmp_path / "copy")), transformers_llama(llama)
    assert all(torch.equal(p, q) for p, q in zip(copy.parameters(), expected.parameters(), strict=True))
    other = trainer_of(expected, tmp_path, zero_stage=stage)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"], abs=1e-6)
    trainer = trainer_of(llama, tmp_path, zero_stage=stage)
    rows = RaggedTokens(4)
    assert abs(trainer.predict(rows).predictions - other.predict(rows).predictions).max() < 1e-5
    assert trainer._ds_trainer.engines.load_report.bytes_read > 0


def test_half_precision_evaluation_of_a_named_model(llama: str, tmp_path: Path) -> None:
    half = trainer_of(llama, tmp_path, bf16_full_eval=True).evaluate()["eval_loss"]
    expected = trainer_of(transformers_llama(llama), tmp_path, bf16_full_eval=True).evaluate()["eval_loss"]
    assert half == expected

    class Placing(TrainingArguments):
        place_model_on_device = True

    trainer = Trainer(llama, arguments(tmp_path, Placing), train_dataset=RaggedTokens(8))
    assert not any(parameter.is_meta for parameter in trainer.model.parameters())


def test_header_and_metrics_report_the_load(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(llama, tmp_path)
    metrics = trainer.train().metrics
    size = (Path(llama) / "model.safetensors").stat().st_size
    report = trainer._ds_trainer.engines.load_report
    assert report.tensors == 21 and 0 < report.bytes_read <= 1.2 * size
    assert report.host_peak_bytes > 50e6 and report.device_peak_bytes == 0
    printed = capsys.readouterr().out
    assert f"; loaded from {llama}: 21 tensors, " in printed and " read in " in printed
    wanted = {"load_seconds", "load_bytes_read", "load_host_peak_bytes", "load_device_peak_bytes"}
    assert wanted <= metrics.keys() and wanted <= trainer.state.log_history[-1].keys()
    trainer.log_metrics("train", metrics)
    assert f"load_bytes_read = {human_bytes(metrics['load_bytes_read'])}" in " ".join(capsys.readouterr().out.split())
    second = trainer.train().metrics  # the model has its weights by now
    assert second["load_bytes_read"] == metrics["load_bytes_read"]
    from dataclasses import replace

    large = replace(report, source="DIR", tensors=291, bytes_read=int(16.06e9), seconds=9.0, host_peak_bytes=int(2.3e9))
    assert load_text(large) == "loaded from DIR: 291 tensors, 16.1 GB read in 9 s, host peak 2.3 GB"
    assert load_text(replace(large, device_peak_bytes=int(2e10))).endswith(", device peak 20 GB")


def test_arguments_reach_from_pretrained(tmp_path: Path) -> None:
    directory = saved("bert", tmp_path / "bert")
    kind = {"auto_class": "AutoModelForSequenceClassification", "num_labels": 3}
    with pytest.raises(ConfigError, match=r"pass allow_new_weights=\[.*classifier\.\*"):
        trainer_of(directory, tmp_path, Labelled(8), model_init_kwargs=kind)
    allowed = ["bert.pooler.*", "classifier.*"]
    for given in (kind, json.dumps(kind)):
        trainer = trainer_of(directory, tmp_path, Labelled(8), model_init_kwargs=given, allow_new_weights=allowed)
        assert trainer.model.classifier.out_features == 3
    assert arguments(tmp_path, allow_new_weights=True).allow_new_weights == ["*"]
    assert arguments(tmp_path).allow_new_weights == []
    assert trainer_of(directory, tmp_path, Labelled(8), model_init_kwargs=kind, allow_new_weights=True).train()


def test_unused_model_arguments_are_rejected(llama: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"require a model given as a directory.*but the model is a LlamaForCausalLM"):
        trainer_of(tiny_llama(), tmp_path, model_init_kwargs={"dtype": "float32"})
    config = tiny_llama().config
    with pytest.raises(ConfigError, match=r"require a model given as a directory.*but the model is a LlamaConfig"):
        trainer_of(config, tmp_path, model_init_kwargs={"revision": "main"})


@pytest.mark.parametrize("given", [7, ["a"], object()], ids=["a number", "a list", "an object"])
def test_values_that_are_no_model_are_rejected(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a torch.nn.Module, the name of a model, or its configuration"):
        trainer_of(given, tmp_path)
    with pytest.raises(ConfigError, match=r"model_init returned a .*, not a torch.nn.Module, the name"):
        trainer_of(None, tmp_path, model_init=lambda: given)


@pytest.mark.extended
def test_model_init_may_return_a_name_or_a_configuration(llama: str, tmp_path: Path) -> None:
    expected = trainer_of(transformers_llama(llama), tmp_path)
    losses = expected.train().training_loss
    named = trainer_of(None, tmp_path, model_init=lambda: llama)
    assert [named.train().training_loss for _ in range(2)] == [losses, losses]  # each starts again

    def new(seed: int) -> Any:
        kwargs = {"auto_class": "AutoModelForCausalLM"}
        return trainer_of(None, tmp_path, model_init=lambda: tiny_llama().config, model_init_kwargs=kwargs, seed=seed)

    first = new(1)
    first.train()
    found = [first.train().training_loss, new(1).train().training_loss, new(2).train().training_loss]
    assert found[0] == found[1] != found[2]


@pytest.mark.extended
def test_every_trial_loads_the_model_again(llama: str, tmp_path: Path) -> None:
    trainer = trainer_of(None, tmp_path, model_init=lambda: llama)
    losses = [trainer.train(trial={"learning_rate": rate}).training_loss for rate in (1e-2, 1e-3, 1e-2)]
    assert losses[0] == losses[2] != losses[1]


def test_the_batch_size_is_found_on_a_named_model(llama: str, tmp_path: Path) -> None:
    plain = trainer_of(llama, tmp_path).train().training_loss
    assert trainer_of(llama, tmp_path, auto_find_batch_size=True).train().training_loss == plain


def test_a_named_model_can_generate(tmp_path: Path) -> None:
    directory = saved("t5", tmp_path / "t5")
    values: dict[str, Any] = {
        "kind": Seq2SeqTrainingArguments,
        "predict_with_generate": True,
        "generation_max_length": 5,
    }
    args = arguments(tmp_path, **values)
    trainer = Seq2SeqTrainer(directory, args, train_dataset=RaggedTokens(8), eval_dataset=RaggedTokens(4))
    assert trainer.predict(RaggedTokens(4)).predictions.shape[0] == 4
    from transformers import T5Config

    small = T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    made = Seq2SeqTrainer(None, args, model_init=lambda: small, train_dataset=RaggedTokens(8))
    assert type(made.model).__name__ == "T5ForConditionalGeneration"


def test_model_changes_by_arguments_apply_to_a_named_model(llama: str, tmp_path: Path) -> None:
    settings = {"activation_checkpointing": True, "neftune_noise_alpha": 5.0}
    found = trainer_of(llama, tmp_path, **settings).train().training_loss
    assert found == trainer_of(transformers_llama(llama), tmp_path, **settings).train().training_loss
    body = Path(saved("llama", tmp_path / "body"))
    with pytest.raises(ConfigError, match=r"LlamaModel returns hidden states"):
        trainer_of(str(body), tmp_path, model_init_kwargs={"auto_class": "AutoModel"})


def test_a_resumed_run_does_not_read_the_base_weights(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    uninterrupted = trainer_of(llama, tmp_path, **values).train()
    resumed = trainer_of(llama, tmp_path, **values)
    source = attached_weight_source(resumed.model)
    assert isinstance(source, FileWeights)
    output = resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert source.bytes_read == 0 and output.global_step == uninterrupted.global_step == 3
    assert output.metrics["load_bytes_read"] == 0
    last = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert all(loss == loss for loss in last)
