"""What decides the samples of a recipe decides where they are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import TrainingArguments
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.encoding import RecordEncoder
from ds_trainer.recipes.fine_tuning_data import FineTuningData, read_fine_tuning_data
from ds_trainer.recipes.fine_tuning_job import data_card
from ds_trainer.samples.chat.encoder import Encoder
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.utils.errors import ConfigError
from tests.support.chat_model import chat_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(6)))
    return tmp_path


def read(folder: Path, tokenizer: Any = None, **data: Any) -> FineTuningData:
    spec = DataSpec(
        **{"train": (str(folder / "x.jsonl"),), "max_length": 400, "prepared_dir": str(folder / "prepared"), **data}
    )
    args = TrainingArguments(str(folder / "out"), use_cpu=True, report_to="none")
    encoder = RecordEncoder(Encoder(tokenizer or chat_tokenizer(), EncodeOptions(max_length=400)), False)
    return read_fine_tuning_data(spec, args, encoder)


def test_a_file_read_in_another_format_gives_other_samples(folder: Path) -> None:
    tokenizer, data = chat_tokenizer(), read(folder)
    assert len(data.train) == 6
    assert len(data_card(data, tokenizer)["samples"]) == 3
    assert len(read(folder, format="text").train) == 1
    assert len(read(folder, format="jsonl").train) == 6


def test_ids_of_a_tokenizer_with_gaps_can_be_prepared(folder: Path) -> None:
    class Gaps(type(chat_tokenizer())):  # type: ignore[misc]
        """A vocabulary in which some numbers stand for nothing, as those of some models."""

        def __len__(self) -> int:
            return 100

    tokenizer = chat_tokenizer()
    largest = max(tokenizer.get_vocab().values())
    tokenizer.__class__ = Gaps
    sample = read(folder, tokenizer).train[0]
    assert 100 < int(sample["input_ids"].max()) <= largest


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (1e-9, "takes none of the records (1e-09 of them are wanted). {equal} give a larger"),
        (1 - 1e-9, "takes all of the records (1 of them are wanted). {equal} give a smaller"),
    ],
)
def test_a_share_that_leaves_one_side_empty_is_explained(folder: Path, share: float, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(folder, held_out=share)
    found = found.format(equal="Equal records are on the same side;")
    assert f"data.held_out {found} share, or a number of samples." in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_named(folder: Path, text: str) -> None:
    (folder / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(folder, held_out=0.05)
    assert str(caught.value) == "data.train: x.jsonl: there are no records in it."
