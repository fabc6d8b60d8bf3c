"""``tools/build_reference.py``: docs/reference/members.md matches the code and is complete."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from build_reference import PAGE, argument_rows, member_rows, reference_page
from reference_notes import BETTER, REFERENCE

from ds_trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from tests.support.transformers_version import needs_the_reference


def test_the_page_is_up_to_date() -> None:
    """When this fails: python tools/build_reference.py"""
    assert PAGE.read_text(encoding="utf-8") == reference_page() + "\n"


def test_every_argument_has_a_row_and_every_note_an_argument() -> None:
    names = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert [row[0] for row in argument_rows()] == [f"`{name}`" for name in names]
    assert set(BETTER) <= set(names)
    for name, state, note in argument_rows():
        assert state in ("supported", "better", "refused", "not yet"), name
        assert note.strip(), name


def test_every_member_of_the_reference_has_a_row() -> None:
    """Every public method of transformers' Trainer that its documentation lists."""
    import transformers

    documented = {
        name
        for name, member in vars(transformers.Trainer).items()
        if not name.startswith("_") and callable(getattr(transformers.Trainer, name)) and inspect.getdoc(member)
    }
    documented -= {"end"}  # of a distributed hyperparameter search, not in the reference
    assert documented <= set(REFERENCE["Trainer"])
    assert {row[0] for row in member_rows()} >= {f"`Trainer.{name}`" for name in documented}


def test_no_row_is_empty() -> None:
    """Every member exists and has a description."""
    for name, state, meaning in member_rows():
        assert state in ("supported", "better", "refused"), name
        assert meaning.endswith((".", "`")), (name, meaning)


@needs_the_reference
@pytest.mark.parametrize("name", [name for name in REFERENCE["Trainer"] if hasattr(Trainer, name)])
def test_a_member_can_be_called_as_in_the_reference(name: str) -> None:
    """The reference's parameters come first, with its names, order and defaults."""
    import transformers

    wanted = list(inspect.signature(getattr(transformers.Trainer, name)).parameters.values())
    ours = list(inspect.signature(getattr(Trainer, name)).parameters.values())
    assert [p.name for p in ours[: len(wanted)]] == [p.name for p in wanted]
    for mine, other in zip(ours, wanted, strict=False):
        if other.default is not other.empty:
            assert mine.default == other.default, mine.name
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in ours[len(wanted) :])


def test_the_constructor_is_that_of_transformers() -> None:
    import transformers

    wanted = list(inspect.signature(transformers.Trainer.__init__).parameters.values())
    ours = list(inspect.signature(Trainer.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(wanted)]] == [(p.name, p.default) for p in wanted]
    assert [p.name for p in ours[len(wanted) :]] == ["peft_config", "tokenizer"]


@pytest.mark.parametrize("name", ["__init__", "evaluate", "predict", "prediction_step"])
def test_the_seq2seq_trainer_has_the_arguments_of_transformers(name: str) -> None:
    import transformers

    wanted = list(inspect.signature(getattr(transformers.Seq2SeqTrainer, name)).parameters.values())
    ours = list(inspect.signature(getattr(Seq2SeqTrainer, name)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(wanted)]] == [(p.name, p.default) for p in wanted]
