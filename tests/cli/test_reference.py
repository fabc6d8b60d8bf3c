"""``ds-trainer reference``: the page of all members and arguments is the code's, and complete."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from ds_trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from ds_trainer.arguments.better import BETTER
from ds_trainer.cli.main import main
from ds_trainer.cli.reference import argument_rows, member_rows
from ds_trainer.training.members import REFERENCE

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """When this fails: ds-trainer reference > docs/reference.md"""
    assert main(["reference"]) == 0
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == capsys.readouterr().out


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
    documented -= {"end"}  # of a distributed hyper-parameter search, not in the reference
    assert documented <= set(REFERENCE["Trainer"])
    assert {row[0] for row in member_rows()} >= {f"`Trainer.{name}`" for name in documented}


def test_no_row_is_empty() -> None:
    """Every member exists and says what it does."""
    for name, state, meaning in member_rows():
        assert state in ("supported", "better", "refused"), name
        assert meaning.endswith((".", "`")), (name, meaning)


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


def test_the_constructor_is_the_references() -> None:
    import transformers

    wanted = list(inspect.signature(transformers.Trainer.__init__).parameters.values())
    ours = list(inspect.signature(Trainer.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(wanted)]] == [(p.name, p.default) for p in wanted]
    assert [p.name for p in ours[len(wanted) :]] == ["peft_config"]


@pytest.mark.parametrize("name", ["__init__", "evaluate", "predict", "prediction_step"])
def test_the_seq2seq_trainer_takes_the_references_arguments(name: str) -> None:
    import transformers

    wanted = list(inspect.signature(getattr(transformers.Seq2SeqTrainer, name)).parameters.values())
    ours = list(inspect.signature(getattr(Seq2SeqTrainer, name)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(wanted)]] == [(p.name, p.default) for p in wanted]


def test_wrong_words() -> None:
    assert main(["reference", "--all"]) == 2
