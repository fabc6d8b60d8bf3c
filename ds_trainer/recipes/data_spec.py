"""``DataSpec``: the section ``data`` of a recipe."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from ds_trainer.arguments.checks.value_checks import length_problems
from ds_trainer.samples.sources.spec import FileFormat, SourceSpec
from ds_trainer.utils.units import parse_tokens

TRAIN_ON = ("assistant", "last_turn", "all")
ROLES = ("system", "user", "assistant", "tool")
_OF_BLOCKS = ("held_out_every",)
_OF_SAMPLES = ("held_out", "chat_template", "prepared_dir")


@dataclass(frozen=True)
class DataSpec:
    """The data: text for blocks of ``sequence_length`` tokens, or samples of up to ``max_length`` tokens.

    ``train`` and ``eval`` list sources: a path (file, directory, glob pattern or ``python-stdlib``), or a mapping with
    the keys of a source: ``path``, ``name``, ``weight``, ``limit``, ``kind``, and its own ``format``, ``text_key``,
    ``file_pattern`` and ``exclude``. A list in place of the section is its ``train``.

    Attributes:
        train: training data.
        eval: evaluation data; its files are excluded from training.
        held_out_every: instead of ``eval``, for text in blocks: hold out every N-th document of ``train``, starting
            with the first in path order. A document is a text file, or a record of another format.
        held_out: instead of ``eval``, for samples: the number of samples of ``train`` to hold out, or their share
            (below 1); 0: none. Samples are selected by their content, so that equal ones are on the same side.
        format: ``auto`` detects it from directory contents and file names.
        text_key: key (jsonl) or column (parquet, dataset) of the text; default: ``text``, or the format of the samples.
        file_pattern: pattern for the files of a directory; default: all; for ``python-stdlib``: ``*.py``.
        exclude: patterns; a file is excluded if one matches its path within the directory, or any component of it.
        bad_lines: ``error`` refuses files with lines that cannot be used, ``skip`` counts them and leaves them out.
        tokenizer: ``bytes`` (a token is a byte), or a directory or Hub name with a Hugging Face tokenizer; default:
            the tokenizer of ``model.path``, or ``bytes`` for an architecture.
        sequence_length: tokens per sample, for text in blocks.
        max_length: most tokens of a sample, for samples of different lengths (a number, or a text such as 4K). It is
            the ``max_length`` of the arguments as well.
        long_samples: for a sample that is longer: ``truncate`` it, ``drop`` it, ``split`` it (text), or ``error``.
        chat_template: for conversations: the name of a template, a file, or the template itself (Jinja); default: that
            of the tokenizer.
        train_on: which tokens of conversations: ``assistant``, ``last_turn``, ``all``, or a list of roles.
        prepared_dir: directory for tokenized samples, which later runs find there; default: a cache directory of the
            user.
        streaming: read and tokenize ``train`` while training, for sources that are too large to be tokenized before.
            Needs ``max_steps``, and weights if there are several sources.
        shuffle_window: with ``streaming``: records of a source that are shuffled together.
    """

    train: tuple[str | SourceSpec, ...] = ()
    eval: tuple[str | SourceSpec, ...] = ()
    held_out_every: int | None = None
    held_out: int | float | None = None
    format: FileFormat = "auto"
    text_key: str | None = None
    file_pattern: str | None = None
    exclude: tuple[str, ...] = ()
    bad_lines: Literal["error", "skip"] = "error"
    tokenizer: str | None = None
    sequence_length: int = 0
    max_length: int | str | None = None
    long_samples: Literal["truncate", "drop", "split", "error"] = "truncate"
    chat_template: str | None = None
    train_on: Literal["assistant", "last_turn", "all"] | tuple[str, ...] = "assistant"
    prepared_dir: str | None = None
    streaming: bool = False
    shuffle_window: int = 1000

    def __post_init__(self) -> None:
        if len(self.train_on) == 1 and self.train_on[0] in TRAIN_ON:  # YAML gives a text as a list of one
            object.__setattr__(self, "train_on", self.train_on[0])
        for name in ("held_out", "held_out_every"):
            if getattr(self, name) == 0:  # nothing is held out
                object.__setattr__(self, name, None)

    @property
    def has_eval(self) -> bool:
        """Whether there is evaluation data."""
        return bool(self.eval) or self.held_out is not None or self.held_out_every is not None

    def sources(self, split: Literal["train", "eval"]) -> list[tuple[str, SourceSpec]]:
        """The sources of a split with their names in messages; the keys of the section are their defaults."""
        entries = getattr(self, split)
        sources = []
        for index, entry in enumerate(entries):
            spec = entry if isinstance(entry, SourceSpec) else SourceSpec(path=(entry,))
            key = f"data.{split}" if all(isinstance(other, str) for other in entries) else f"data.{split}[{index}]"
            defaults = {name: getattr(self, name) for name in ("text_key", "file_pattern") if not getattr(spec, name)}
            if spec.format == "auto":
                defaults["format"] = self.format
            sources.append((key, dataclasses.replace(spec, exclude=(*self.exclude, *spec.exclude), **defaults)))
        return sources

    def problems(self, arguments: dict[str, Any] | None = None) -> list[str]:
        """What cannot work, as one sentence per problem; ``arguments`` are those of the recipe."""
        problems = []
        if not self.train:
            problems.append("data.train is missing; list files, directories or 'python-stdlib'.")
        for name in ("held_out_every", "held_out"):
            if self.eval and getattr(self, name) is not None:
                listed = ", ".join(path for _, spec in self.sources("eval") for path in spec.path)
                problems.append(
                    f"data: 'eval' ({listed}) and '{name}' ({getattr(self, name)}) both select evaluation data; remove "
                    "one."
                )
        if self.held_out_every is not None and self.held_out_every < 2:
            problems.append(f"data.held_out_every={self.held_out_every} must be 2 or more.")
        if self.held_out is not None and not (0 < self.held_out < 1 or _is_count(self.held_out)):
            problems.append(f"data.held_out={self.held_out} must be a number of samples, or a share between 0 and 1.")
        problems += self._stream_problems(arguments or {}) + self._length_problems(arguments or {})
        return problems + self._source_problems() + self._role_problems()

    def fine_tunes(self, arguments: dict[str, Any]) -> bool:
        """Whether samples of different lengths are trained on, not blocks of text."""
        return self.max_length is not None or (not self.sequence_length and arguments.get("max_length") is not None)

    def _length_problems(self, arguments: dict[str, Any]) -> list[str]:
        if not self.fine_tunes(arguments):
            if self.sequence_length == 0:
                return [
                    "data.sequence_length is missing, or 0; set it to the number of tokens per sample for text in "
                    "blocks. For conversations and other samples set data.max_length, the most tokens of one."
                ]
            problems = (
                [] if self.sequence_length > 1 else [f"data.sequence_length={self.sequence_length} must be 2 or more."]
            )
            unused = [name for name in _OF_SAMPLES if getattr(self, name) is not None]
            unused += [name for name in ("train_on", "long_samples") if getattr(self, name) != getattr(DataSpec, name)]
            mixed = [spec for _, spec in self.sources("train") if spec.weight or spec.limit or spec.kind != "auto"]
            unused += ["train with weight, limit or kind"] if mixed else []
            return problems + [
                f"data: {', '.join(unused)} are for samples of up to max_length tokens, but sequence_length="
                f"{self.sequence_length} makes blocks of text; set data.max_length in its place."
                for _ in unused[:1]
            ]
        problems = [f"data.{problem}" for problem in length_problems(self.max_length)]
        if self.sequence_length:
            problems.append(
                f"data: 'sequence_length' ({self.sequence_length}) makes blocks of text, 'max_length' "
                f"({self.max_length}) samples of different lengths; remove one."
            )
        length = arguments.get("max_length")
        if not problems and None not in (length, self.max_length) and _tokens(length) != _tokens(self.max_length):
            problems.append(f"data.max_length={self.max_length} and arguments.max_length={length} differ; remove one.")
        problems += [
            f"data.{name}={getattr(self, name)} is for text in blocks (sequence_length); use data.held_out."
            for name in _OF_BLOCKS
            if getattr(self, name) is not None
        ]
        return problems

    def _stream_problems(self, arguments: dict[str, Any]) -> list[str]:
        problems = []
        if self.shuffle_window < 1:
            problems.append(f"data.shuffle_window={self.shuffle_window} must be 1 or more.")
        if not self.streaming:
            changed = self.shuffle_window != DataSpec.shuffle_window
            return problems + (["data.shuffle_window needs data.streaming: true."] if changed else [])
        if not self.fine_tunes(arguments):
            problems.append("data.streaming is for samples of up to max_length tokens; set data.max_length.")
        if self.held_out is not None:
            problems.append(
                f"data.held_out={self.held_out} would have to read all of a stream; name files in data.eval in its "
                "place, or remove data.streaming."
            )
        if len(self.train) > 1 and any(spec.weight is None for _, spec in self.sources("train")):
            problems.append("data.streaming: several sources need a weight each, because their sizes are not known.")
        steps = arguments.get("max_steps")
        if steps is None or (isinstance(steps, int) and steps <= 0):
            problems.append("data.streaming: a stream has no end; set arguments.max_steps.")
        return problems

    def _source_problems(self) -> list[str]:
        problems = [
            f"{key}: {problem}"
            for split in ("train", "eval")
            for key, spec in self.sources(split)
            for problem in spec.problems()
        ]
        sources = self.sources("train")
        without = [key for key, spec in sources if spec.weight is None]
        if without and len(without) < len(sources):
            problems.append(
                f"{', '.join(without)}: has no weight, but other sources have; give all of them one, or none."
            )
        names = [spec.name for _, spec in sources if spec.name is not None]
        problems += [
            f"data.train: two sources have the name {name!r}."
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        problems += [
            f"{key}: weight is for training data; remove it." for key, spec in self.sources("eval") if spec.weight
        ]
        return problems

    def _role_problems(self) -> list[str]:
        if isinstance(self.train_on, str):
            if self.train_on in TRAIN_ON:
                return []
            return [f"data.train_on={self.train_on!r} is not one of {', '.join(TRAIN_ON)}, or a list of roles."]
        wrong = [role for role in self.train_on if role not in ROLES]
        return (
            [f"data.train_on: {', '.join(map(repr, wrong))} is no role; roles are {', '.join(ROLES)}."] if wrong else []
        )


def _is_count(number: float) -> bool:
    return math.isfinite(number) and number == int(number) > 0


def _tokens(length: int | str | None) -> int | None:
    return parse_tokens(length) if isinstance(length, str) else length
