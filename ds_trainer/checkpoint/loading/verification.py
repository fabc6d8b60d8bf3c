"""Comparing the weights that an engine holds with the files that they were loaded from, before anything is trained.

Whatever loaded them: every rank takes samples of all that it holds of every tensor, in any layout, and compares them
with the same elements of the files, which are found on another way than loading takes. That costs some small reads a
tensor, so it is done at every start.

What samples notice: a tensor, a shard or a slice that is another one's, that is displaced, or that was never loaded;
two experts or layers that are exchanged. What they cannot notice: a few wrong elements between them; an exchange of
tensors that are equal where they are looked at, as norms that are all ones.
"""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.checkpoint.loading.expected_weights import ExpectedWeights, may_be_missing
from ds_trainer.checkpoint.loading.held_weights import (
    Held,
    ModelTensor,
    base_model,
    held_masters,
    held_weights,
    sample,
    sampled_positions,
    tensors_of,
    whole_indices,
)
from ds_trainer.checkpoint.loading.sampled_files import SampledFiles
from ds_trainer.engine.quantized import quantized_bits, scale_names
from ds_trainer.engine.state.units import UnknownState
from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from ds_trainer.engine.evaluation_engine import EvaluationEngine
    from ds_trainer.engine.training_engine import TrainingEngine

_NAMED = 8  # names in a message
_NEAR = 5000  # names among which the nearest is looked for


@dataclass(frozen=True)
class Verification:
    """What a comparison found; alike on all ranks, except for what it cost.

    Attributes:
        directory: of the files.
        tensors: parameters and buffers of the model that are to be in the files; tied weights count once.
        verified: those of which every rank's samples are what the files have.
        missing: in no file.
        different: samples are other numbers, with the highest rank that saw it.
        misshapen: another shape in the files: ``(shape in the model, shape in the files)``.
        uncomparable: in another form than in the files: quantized.
        unexpected: in the files, but not in the model.
        new: in no file, as it was said.
        nearest: for each missing tensor, a name in the files that looks like it.
        seconds, bytes_read: of this rank; bytes are those of the pages that were touched.
        masters: whether the optimizer has master weights, which were compared too; None where DeepSpeed keeps them in a
            way that is not known.
    """

    directory: Path
    tensors: int
    verified: int
    missing: tuple[str, ...]
    different: Mapping[str, int]
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    uncomparable: tuple[str, ...]
    unexpected: tuple[str, ...]
    new: tuple[str, ...]
    nearest: Mapping[str, str]
    seconds: float
    bytes_read: int
    masters: bool | None

    @property
    def good(self) -> bool:
        """Whether nothing contradicts the files."""
        return not (self.missing or self.different or self.misshapen)

    def __str__(self) -> str:
        parts = [f"{self.verified:,} of {self.tensors:,} tensors", f"{len(self.missing):,} missing"]
        for name in ("different", "misshapen", "uncomparable", "new"):
            if found := getattr(self, name):
                parts.append(f"{len(found):,} {_WORDS[name]}")
        parts.append(f"{len(self.unexpected):,} unexpected")
        if self.masters is None:
            parts.append("master weights not compared")
        return f"{'verified' if self.good else 'not verified'}, {', '.join(parts)} ({self.seconds:.1f} s)"

    def problems(self) -> list[str]:
        """One sentence for each thing that contradicts the files; empty where the model is what they hold."""
        found = []
        if self.missing:
            near = [
                f"{name} (nearest in the files: {self.nearest[name]})" if name in self.nearest else name
                for name in self.missing
            ]
            found.append(
                f"{_count(self.missing, self.tensors)} in no file of {self.directory}, and would be trained from "
                f"random numbers: {_listed(near)}. Correct the files or the model's class, or name those that are "
                "new in allow_new_weights."
            )
        if self.misshapen:
            said = [
                f"{name} ({list(a)} in the model, {list(b)} in the files)" for name, (a, b) in self.misshapen.items()
            ]
            found.append(
                f"{_count(self.misshapen, self.tensors)} of another shape than in {self.directory}: {_listed(said)}. "
                "Take the configuration that belongs to the files, or name those that are new in allow_new_weights."
            )
        if self.different:
            said = [f"{name} (rank {rank})" for name, rank in self.different.items()]
            found.append(
                f"{_count(self.different, self.tensors)} not what {self.directory} holds (never loaded, exchanged, or "
                f"changed since): {_listed(said)}. Load the model again, or set verify_weights='never' "
                "where they were changed on purpose."
            )
        return found


_GOOD, _UNCOMPARABLE, _MISSHAPEN, _MISSING, _DIFFERENT = range(5)  # the last and above: plus the rank that saw it

_WORDS = {"different": "different", "misshapen": "of another shape", "uncomparable": "not compared", "new": "new"}


def _count(found: Any, tensors: int) -> str:
    return f"{len(found):,} of the model's {tensors:,} tensors {'is' if len(found) == 1 else 'are'}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def verify_weights(
    model: nn.Module,
    directory: Path,
    engine: TrainingEngine | EvaluationEngine | None = None,
    allowed_new: bool | Sequence[str] = (),
    key_mapping: Mapping[str, str] | None = None,
) -> Verification:
    """Compare what all ranks hold of ``model`` with the files in ``directory``. Collective.

    Args:
        model: as the engine holds it: whole, sliced or sharded, on any device.
        directory: holds ``model.safetensors`` or ``pytorch_model.bin``, or several files with their index.
        engine: the model's, if it has one.
        allowed_new: tensors that need not be in the files: their names, those of modules, or patterns with ``*``; True
            for all.
        key_mapping: what ``from_pretrained`` was given.

    Returns:
        What was found; nothing is refused here.

    Raises:
        ConfigError: a file cannot be read.
    """
    start = time.perf_counter()
    tensors = [entry for entry in tensors_of(model) if not entry.is_new]
    files = SampledFiles(directory)
    base = base_model(model)
    shapes = {name: entry.shape for entry in tensors for name in entry.names}
    expected = ExpectedWeights(base, shapes, files, key_mapping)
    votes = [_verdict_of_files(entry, expected) for entry in tensors]
    masters = _compare(tensors, votes, expected, _loaded_as(base), engine)
    # One number a tensor, so that all ranks know what any of them found.
    verdicts = distributed.agree(torch.tensor(votes, dtype=torch.int64))

    quantized = {name for entry in tensors if quantized_bits(entry.tensor) for name in entry.names}
    verified, computed, new = 0, 0, []
    uncomparable: list[str] = []
    missing: list[str] = []
    different: dict[str, int] = {}
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for entry, verdict in zip(tensors, verdicts, strict=True):
        name = entry.names[0]
        if entry.is_buffer and verdict == _MISSING:
            computed += 1  # its values are the code's own
        elif verdict == _GOOD:
            verified += 1
        elif verdict == _UNCOMPARABLE:
            uncomparable.append(name)
        elif _is_new(entry, base, allowed_new, missing=verdict == _MISSING):
            new.append(name)
        elif verdict == _MISSING:
            missing.append(name)
        elif verdict == _MISSHAPEN:
            misshapen[name] = (entry.shape, _shape_in_files(entry, expected))
        else:
            different[name] = verdict - _DIFFERENT
    return Verification(
        directory=directory,
        tensors=len(tensors) - len(new) - computed,
        verified=verified,
        missing=tuple(missing),
        different=different,
        misshapen=misshapen,
        uncomparable=tuple(uncomparable),
        unexpected=tuple(name for name in expected.unexpected if not scale_names(name) & quantized),
        new=tuple(new),
        nearest=_nearest(missing[:_NAMED], expected, files),
        seconds=time.perf_counter() - start,
        bytes_read=files.bytes_read,
        masters=masters,
    )


def _verdict_of_files(entry: ModelTensor, expected: ExpectedWeights) -> int:
    """What can be said of a tensor before its elements are looked at."""
    there = [expected.shapes[name] for name in entry.names if name in expected.shapes]
    if not there:
        return _MISSING
    if entry.shape not in there:  # packed weights have another shape than what they were quantized from
        return _MISSHAPEN if quantized_bits(entry.tensor) is None else _UNCOMPARABLE
    return _GOOD


def _shape_in_files(entry: ModelTensor, expected: ExpectedWeights) -> tuple[int, ...]:
    return next((expected.shapes[name] for name in entry.names if name in expected.shapes), ())


def _compare(
    tensors: Sequence[ModelTensor],
    votes: list[int],
    expected: ExpectedWeights,
    loaded_as: torch.dtype | None,
    engine: TrainingEngine | EvaluationEngine | None,
) -> bool | None:
    """Look at samples of what this rank holds, and note in ``votes`` what differs; whether masters were among it."""
    number_of = {id(entry): number for number, entry in enumerate(tensors)}
    tp_rank = 0 if engine is None else engine.groups.place.tp
    held = list(held_weights(tensors, tp_rank))
    masters: bool | None = False
    if engine is not None and engine.deepspeed.basic_optimizer is not None:
        try:
            stepped = list(held_masters(tensors, engine.deepspeed, tp_rank))
        except UnknownState:
            masters = None
        else:
            masters = bool(stepped)
            held += stepped
    held = [part for part in held if len(part.place) and votes[number_of[id(part.tensor)]] == _GOOD]
    held.sort(key=lambda part: number_of[id(part.tensor)])  # samples of one tensor of the files are read together
    seed = distributed.rank()
    positions = [sampled_positions(part, _sources(part.tensor, expected), seed) for part in held]
    for part, at, found in zip(held, positions, sample(held, positions), strict=True):
        number = number_of[id(part.tensor)]
        names = [name for name in part.tensor.names if expected.shapes.get(name) == part.tensor.shape]
        if not _comparable(part, names, expected):
            votes[number] = max(votes[number], _UNCOMPARABLE)
            continue
        indices = whole_indices(part.place, at)
        types = (part.memory.dtype, part.tensor.tensor.dtype, loaded_as)
        if not any(_equal(found, expected.at(name, indices), expected.dtype(name), types) for name in names):
            votes[number] = _DIFFERENT + distributed.rank()
    return masters


def _sources(entry: ModelTensor, expected: ExpectedWeights) -> int:
    return max(len(expected.sources(name)) for name in entry.names if name in expected.shapes)


def _comparable(part: Held, names: Sequence[str], expected: ExpectedWeights) -> bool:
    """Not where a number here stands for another one in the files: quantized weights."""
    types = [expected.dtype(name) for name in names]
    return all(part.memory.dtype.is_floating_point == dtype.is_floating_point for dtype in types)


def _equal(found: torch.Tensor, wanted: torch.Tensor, stored: torch.dtype, types: Sequence[torch.dtype | None]) -> bool:
    """Whether ``found`` is what becomes of ``wanted`` on its way through ``types``.

    Exactly, unless one of them is coarser than ``stored``: then up to the rounding to the coarsest, which may have
    happened twice.
    """
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if stored.is_floating_point:
        on_the_way = [torch.finfo(dtype) for dtype in types if dtype is not None and dtype.is_floating_point]
        coarse = [of for of in on_the_way if of.eps > torch.finfo(stored).eps or of.max < torch.finfo(stored).max]
        if coarse:
            error = max(of.eps for of in coarse) * wanted.abs() + max(of.smallest_normal * of.eps for of in coarse)
            same |= (found - wanted).abs() <= error
    return bool(same.all())


def _loaded_as(model: Any) -> torch.dtype | None:
    """The type in which transformers loaded the model: it may have been changed since."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _is_new(entry: ModelTensor, model: Any, allowed: bool | Sequence[str], missing: bool) -> bool:
    if allowed is True or (missing and any(may_be_missing(model, name) for name in entry.names)):
        return True
    patterns = allowed or ()
    return any(
        name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
        for name in entry.names
        for pattern in patterns
    )


def _nearest(missing: Sequence[str], expected: ExpectedWeights, files: SampledFiles) -> dict[str, str]:
    """For each name the most similar one in the files, first among those that belong to nothing."""
    found = {}
    for name in missing:
        last = name.rpartition(".")[2]
        others = [other for other in files.tensors if other.rpartition(".")[2] == last]
        for candidates in (expected.unexpected[:_NEAR], others[:_NEAR]):
            if near := difflib.get_close_matches(name, candidates, n=1):
                found[name] = near[0]
                break
        if name in expected.failed:
            found[name] = expected.failed[name]
    return found
