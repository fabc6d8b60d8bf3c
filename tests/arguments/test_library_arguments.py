"""A script that gives the Trainer transformers' own arguments, or the older name of the processing class."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from ds_trainer import ConfigError, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from ds_trainer.arguments.compat.library_arguments import own_arguments
from tests.support.models import RaggedTokens, tiny_llama


def library_arguments(path: Path, kind: Any = transformers.TrainingArguments, **changes: Any) -> Any:
    return kind(str(path), use_cpu=True, report_to="none", **changes)


def test_the_run_is_that_of_our_own_arguments(tmp_path: Path) -> None:
    values = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "seed": 5}
    values |= {"warmup_steps": 1, "gradient_accumulation_steps": 2, "save_strategy": "no", "disable_tqdm": True}
    losses = []
    for args in (
        library_arguments(tmp_path, **values),
        TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **values),
    ):
        trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(40))
        trainer.train()
        assert isinstance(trainer.args, TrainingArguments)
        losses.append([(e["loss"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e])
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_what_was_given_is_a_value_and_the_rest_a_default(tmp_path: Path) -> None:
    found = own_arguments(library_arguments(tmp_path, bf16=True, eval_strategy="epoch", debug="underflow_overflow"))
    assert found.bf16 is True and str(found.eval_strategy) == "epoch"
    assert found.given("bf16") and not found.given("learning_rate")
    assert found.debug == TrainingArguments(str(tmp_path), use_cpu=True, debug="underflow_overflow").debug


def test_every_default_of_transformers_is_accepted(tmp_path: Path) -> None:
    found, ours = own_arguments(library_arguments(tmp_path)), TrainingArguments(str(tmp_path), use_cpu=True)
    given = {name for name in found.origins if found.given(name)}
    assert given <= {"output_dir", "use_cpu", "report_to"}
    assert found.learning_rate == ours.learning_rate


def test_generation_arguments_make_ours(tmp_path: Path) -> None:
    found = own_arguments(
        library_arguments(tmp_path, transformers.Seq2SeqTrainingArguments, predict_with_generate=True)
    )
    assert type(found) is Seq2SeqTrainingArguments and found.predict_with_generate
    with pytest.raises(ConfigError, match="Seq2SeqTrainer needs generation arguments"):
        Seq2SeqTrainer(tiny_llama(), library_arguments(tmp_path))


def test_unsupported_values_are_refused_as_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(tiny_llama(), library_arguments(tmp_path, fsdp="full_shard"))
    assert "full_shard is zero_stage=3" in str(caught.value) and "fsdp_config" not in str(caught.value)


@dataclasses.dataclass
class Extended(transformers.TrainingArguments):
    """What a script may add."""

    temperature: float = 0.5


def test_a_subclass_keeps_what_it_adds(tmp_path: Path) -> None:
    trainer = Trainer(tiny_llama(), library_arguments(tmp_path, Extended, temperature=0.25, learning_rate=1e-3))
    assert trainer.args.temperature == 0.25 and trainer.args.learning_rate == 1e-3  # type: ignore[attr-defined]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"args is a dict; pass a ds_trainer\.TrainingArguments"):
        Trainer(tiny_llama(), {"output_dir": str(tmp_path)})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer])
def test_tokenizer_is_the_older_name_of_processing_class(kind: Any, tmp_path: Path) -> None:
    class Tokenizer:
        def pad(self, rows: Any, **keywords: Any) -> Any:
            raise NotImplementedError

        def save_pretrained(self, directory: str) -> None:
            Path(directory, "tokenizer.txt").write_text("saved")

    made = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    tokenizer = Tokenizer()
    with pytest.warns(FutureWarning, match="tokenizer is now called processing_class") as caught:
        trainer = kind(tiny_llama(), made, tokenizer=tokenizer)
    assert caught[0].filename == __file__
    assert trainer.processing_class is tokenizer
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.txt").read_text() == "saved"
    with pytest.raises(ConfigError, match="Keep processing_class"):
        kind(tiny_llama(), made, processing_class=tokenizer, tokenizer=tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(tiny_llama(), made, processing_class=tokenizer)
