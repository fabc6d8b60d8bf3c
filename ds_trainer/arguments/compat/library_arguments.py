"""Arguments that a script has made with transformers' own ``TrainingArguments``."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError


def own_arguments(args: Any) -> Any:
    """``args``, or the same arguments as this package's class if they are an object of transformers.

    Fields are taken by name. Those that have the default of transformers are left out, because they were not given; a
    value that this package does not support is refused as if it had been given to its own class. What a subclass of the
    user adds is copied as attributes.

    Raises:
        ConfigError: ``args`` is no object with arguments, or a value is not supported.
    """
    if args is None or isinstance(args, TrainingArguments):
        return args
    library = _library_class(type(args))
    if library is None:
        raise ConfigError(
            f"args is a {type(args).__name__}; pass a ds_trainer.TrainingArguments, for example "
            'Trainer(args=TrainingArguments("output")).'
        )
    defaults = library(output_dir=args.output_dir, use_cpu=args.use_cpu)  # other defaults follow from it
    names = {field.name for field in dataclasses.fields(library) if field.init}
    given = {name: _plain(getattr(args, name)) for name in names if getattr(args, name) != getattr(defaults, name)}
    if "fsdp" in given:
        given.pop("fsdp_config", None)  # filled in by transformers
    made_of = Seq2SeqTrainingArguments if library.__name__ == "Seq2SeqTrainingArguments" else TrainingArguments
    made = made_of(output_dir=args.output_dir, **given)
    added = [field.name for field in dataclasses.fields(args) if field.name not in names and field.init]
    for name in added:
        setattr(made, name, getattr(args, name))
    made.fields_of_subclass = frozenset(added)
    return made


def _library_class(given: type) -> Any:
    """The class of transformers that ``given`` is or extends; None if it is something else."""
    for base in given.__mro__:
        if base.__module__.startswith("transformers.") and base.__name__.endswith("TrainingArguments"):
            return base
    return None


def _plain(value: Any) -> Any:
    """``value`` without the enums and classes of transformers."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.to_dict() if dataclasses.is_dataclass(value) and hasattr(value, "to_dict") else value
