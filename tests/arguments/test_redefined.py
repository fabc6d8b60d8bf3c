"""Fields under the names of this package's packing that belong to a subclass of another package are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_trainer import TrainingArguments
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
