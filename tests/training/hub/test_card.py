"""The model card: metadata that the Hub's own library reads, and what was really done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.hub import card_facts
from ds_trainer.training.hub.card import MARKER, CardFacts, card_text, results_table
from tests.support.hub_server import HubServer
from tests.support.models import RaggedTokens, tiny_llama
from tests.training.hub.support import make_trainer

HISTORY = [
    {"loss": 2.5, "learning_rate": 0.1, "epoch": 0.5, "step": 1},
    {"eval_loss": 2.0, "eval_accuracy": 0.25, "eval_runtime": 3.0, "eval_items": 9, "epoch": 1.0, "step": 2},
    {"loss": 1.5, "epoch": 1.5, "step": 3},
    {"eval_loss": 1.0, "eval_accuracy": 0.75, "eval_runtime": 3.0, "eval_f1_macro": float("nan"), "step": 4},
    {"train_loss": 1.7, "train_runtime": 9.0, "step": 4},
]


def card_of(trainer: Trainer) -> ModelCard:
    return ModelCard.load(Path(str(trainer.args.output_dir)) / "README.md")


def test_the_metadata_is_what_the_hub_reads() -> None:
    facts = CardFacts(
        model_name="My model",
        language=["en"],
        license="apache-2.0",
        tags=["fine"],
        base_model="owner/base",
        tasks=["text-classification"],
        library="transformers",
        dataset_tags=["glue"],
        dataset_names=["GLUE MRPC"],
        dataset_args=["mrpc"],
        log_history=HISTORY,
        versions={"torch": "2"},
    )
    card = ModelCard(card_text(facts))
    data = card.data
    assert data.language == ["en"] and data.license == "apache-2.0" and data.library_name == "transformers"
    assert data.base_model == "owner/base" and data.datasets == ["glue"] and data.metrics == ["accuracy"]
    assert data.tags == ["fine", "generated_from_trainer"] and data.model_name == "My model"
    found = {(r.task_type, r.dataset_type, r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results}
    key = ("text-classification", "glue", "GLUE MRPC")
    assert found == {(*key, "loss"): 1.0, (*key, "accuracy"): 0.75}  # no run times, nothing that is no number
    assert "# My model" in card.text and "fine-tuned version of [owner/base]" in card.text


def test_the_table_has_a_row_for_each_evaluation() -> None:
    assert results_table(HISTORY).splitlines() == [
        "| Training loss | Epoch | Step | Validation loss | Accuracy | F1 macro |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 2.5 | 1 | 2 | 2 | 0.25 |  |",
        "| 1.5 | None | 4 | 1 | 0.75 | nan |",
    ]
    assert results_table(HISTORY[:1]) == ""
    assert "eval_results" not in ModelCard(card_text(CardFacts("x", log_history=HISTORY[:1]))).data.to_dict()


class Named(RaggedTokens):
    """As a data set of the library ``datasets`` names itself."""

    builder_name, config_name = "toy_tokens", "small"


def test_a_card_of_a_real_run(hub: HubServer, tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        seed=7,
        zero_stage=2,
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=Named(12), eval_dataset=Named(4))
    trainer.train()
    trainer.create_model_card(license="mit", tags="toy")
    trainer.engine.close()
    card = card_of(trainer)
    assert card.data.license == "mit" and card.data.tags == ["toy", "generated_from_trainer"]
    assert card.data.datasets == ["toy_tokens"] and card.data.library_name == "transformers"
    assert {result.task_type for result in card.data.eval_results} == {"text-generation"}
    (loss,) = (result.metric_value for result in card.data.eval_results if result.metric_type == "loss")
    assert loss == trainer.state.log_history[-2]["eval_loss"]
    for line in (
        "- learning_rate: 0.0003",
        "- total_train_batch_size: 6",
        "- zero_stage: 2",
        "- precision: fp32",
        "- seed: 7",
        "- lr_scheduler_type: cosine",
        "- lr_scheduler_warmup_steps: 1",
        "- training_steps: 2",
        "- layout: dp 1 x tp 1 x cp 1 x sp 1",
    ):
        assert line in card.text
    assert "- deepspeed 0" in card.text and card.text.count("\n| ") == 4
    assert hub.requests == []
    # What was said holds until something else is said.
    trainer.create_model_card(language="de")
    second = card_of(trainer)
    assert second.data.license == "mit" and second.data.language == ["de"]


def test_a_card_written_by_a_person_is_kept(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, push_to_hub=False)
    trainer.create_model_card()
    path = tmp_path / "run" / "README.md"
    assert MARKER in path.read_text()
    trainer.create_model_card(license="mit")
    assert card_of(trainer).data.license == "mit"
    custom = path.read_text().replace(MARKER, "").replace("More information needed", "It counts sheep.")
    path.write_text(custom)
    trainer.create_model_card(license="apache-2.0")
    assert path.read_text() == custom
    trainer.push_to_hub()
    assert hub.files("tester/run")["README.md"].decode() == custom


def test_adapters_name_their_base_model_and_library(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_llama()
    model.config._name_or_path = "owner/base"
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, model=adapted, push_to_hub=False, data=RaggedTokens(4))
    trainer.save_model()
    assert (tmp_path / "run" / "README.md").exists()  # peft's template, with nothing filled in
    trainer.create_model_card()
    data = card_of(trainer).data
    assert data.library_name == "peft" and data.base_model == "owner/base" and "lora" in data.tags
    assert "Model Card for Model ID" not in card_of(trainer).text


def test_the_license_of_the_base_model_is_looked_up(hub: HubServer, tmp_path: Path) -> None:
    card_facts._license_of.cache_clear()
    trainer = make_trainer(tmp_path, model=tiny_llama(), data=RaggedTokens(4))
    trainer.model.config._name_or_path = "tester/run"
    trainer.create_model_card()
    assert card_of(trainer).data.license == "mit" and card_of(trainer).data.base_model == "tester/run"
    for unknown in ("tester/none", "/of/another/machine", str(tmp_path)):
        trainer.model.config._name_or_path = unknown
        trainer.create_model_card()
        assert card_of(trainer).data.license is None
        assert card_of(trainer).data.base_model == ("tester/none" if unknown == "tester/none" else None)


@pytest.mark.parametrize(
    ("name", "task"),
    [("BertForSequenceClassification", "text-classification"), ("GPT2LMHeadModel", "text-generation"), ("Mine", None)],
)
def test_the_task_follows_from_the_architecture(name: str, task: str | None) -> None:
    assert card_facts._task_of(type(name, (), {})()) == task
