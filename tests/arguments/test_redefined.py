"""Fields under the names of this package's packing that belong to a subclass of another package are ignored."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import HfArgumentParser, TrainingArguments
from ds_trainer.arguments.redefined import is_redefined, packs


@dataclass
class OfAnotherPackage(TrainingArguments):
    packing: bool = False
    packing_strategy: str = "bfd"
    max_length: int | None = 1024


@dataclass
class WithMore(TrainingArguments):
    rank: int = 8


def test_a_redefined_field_belongs_to_its_class(tmp_path: Path) -> None:
    args = OfAnotherPackage(str(tmp_path), packing=True)
    assert args.packing_strategy == "bfd" and not packs(args)
    assert is_redefined(args, "max_length") and not is_redefined(args, "eval_packing")


def test_any_other_subclass_packs(tmp_path: Path) -> None:
    assert packs(WithMore(str(tmp_path), packing=True)) and packs(TrainingArguments(str(tmp_path), packing=True))
    assert not packs(WithMore(str(tmp_path)))


@dataclass
class DataOptions:
    """Options of a script, with names that this package uses too."""

    max_length: int = 512
    packing: bool = False
    zero_stage: int = 7


@pytest.mark.parametrize("order", [(DataOptions, TrainingArguments), (TrainingArguments, DataOptions)])
def test_a_flag_of_the_script_is_the_scripts(order: tuple[Any, ...], tmp_path: Path) -> None:
    parser = HfArgumentParser(order)
    line = ["--output_dir", "o", "--max_length", "77", "--packing", "--max_steps", "3"]
    values = {"output_dir": "o", "max_length": 77, "packing": True, "max_steps": 3}
    file = tmp_path / "values.yaml"
    file.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items()))
    for found in (
        parser.parse_args_into_dataclasses(line),
        parser.parse_dict(values),
        parser.parse_yaml_file(str(file)),
    ):
        options = next(one for one in found if isinstance(one, DataOptions))
        args = next(one for one in found if isinstance(one, TrainingArguments))
        assert (options.max_length, options.packing, options.zero_stage) == (77, True, 7)
        assert (args.max_length, args.packing, args.zero_stage, args.max_steps) == (None, False, None, 3)


def test_only_additions_are_left_to_the_script() -> None:
    @dataclass
    class Colliding:
        max_steps: int = 1

    with pytest.raises(argparse.ArgumentError, match="max_steps"):
        HfArgumentParser((Colliding, TrainingArguments))
