"""The length of the sequences of a run, from what is known before the first batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.redefined import packs

_OF_ARGUMENTS = ("max_length", "max_seq_length", "model_max_length")  # of TRL and of common scripts
_SAMPLES = 64
_LONGEST = 8192  # models are made for more positions than they are usually trained with


@dataclass(frozen=True)
class SequenceLength:
    """Tokens of a sequence.

    Attributes:
        tokens: their number.
        source: where it is from.
        of_data: whether samples have this length; otherwise it is only a limit.
    """

    tokens: int
    source: str
    of_data: bool


def sequence_length(args: Any, dataset: Any, main_input: str, model_length: int | None) -> SequenceLength:
    """The length: of the samples, else the limit of the arguments, else that of the model.

    Samples are read only if that has no effect: those of a list or of a ``datasets.Dataset``.

    Args:
        args: the training arguments; those of libraries may have a ``max_length``.
        dataset: the training data.
        main_input: key of the tokens in a sample.
        model_length: positions for which the model was made; None if unknown.
    """
    if packs(args) and args.max_length is not None:
        return SequenceLength(int(args.max_length), "max_length, the length of packed rows", True)
    fixed = getattr(dataset, "sequence_length", None)
    if isinstance(fixed, int):
        return SequenceLength(fixed, "the training data", True)
    longest = _longest_sample(dataset, main_input)
    if longest:
        return SequenceLength(longest, f"the longest of the first {_SAMPLES} samples", True)
    for name in _OF_ARGUMENTS:
        value = getattr(args, name, None)
        if isinstance(value, int) and value > 0:
            return SequenceLength(value, name, False)
    tokens = min(model_length or _LONGEST, _LONGEST)
    return SequenceLength(tokens, "the positions of the model" if tokens == model_length else "a default", False)


def main_input_name(model: Any) -> str:
    """Key of the tokens in the samples of a model."""
    return str(getattr(model, "main_input_name", "input_ids"))


def _longest_sample(dataset: Any, main_input: str) -> int:
    is_table = type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "__len__")
    if is_table and dataset.format["type"] != "custom" and main_input in dataset.column_names:
        return max((_length(row) for row in dataset[:_SAMPLES][main_input]), default=0)
    if isinstance(dataset, list | tuple):
        rows = (sample.get(main_input) for sample in dataset[:_SAMPLES] if isinstance(sample, dict))
        return max((_length(row) for row in rows), default=0)
    return 0


def _length(tokens: Any) -> int:
    shape = getattr(tokens, "shape", None)
    if shape is not None:
        return int(shape[-1]) if len(shape) else 0
    return len(tokens) if isinstance(tokens, list | tuple) else 0
