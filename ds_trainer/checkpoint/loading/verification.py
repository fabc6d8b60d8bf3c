"""Verifies the weights that an engine holds against the files that they were loaded from, before training starts.

Regardless of what loaded them, every rank samples its part of every tensor, in any layout, and compares the samples
with the same elements of the files, located by code that is independent of loading. This costs a few small reads per
tensor, so it runs at every start.

Samples detect: a tensor, shard or slice that is displaced, belongs elsewhere or was never loaded; swapped experts or
layers. They cannot detect: a few wrong elements between samples; swapped tensors that are equal at the sampled
positions, such as norms that are all ones.
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
from ds_trainer.checkpoint.loading.local_weights import (
    LocalShard,
    ModelTensor,
    ends_of_tensor,
    local_masters,
    local_weights,
    model_tensors,
    sample,
    sampled_positions,
    sampling,
    whole_indices,
)
from ds_trainer.checkpoint.loading.sampled_files import SampledFiles
from ds_trainer.engine.quantized_weights import quantized_bits, scale_names
from ds_trainer.engine.state.flat_partitions import UnknownState
from ds_trainer.engine.weights import without_adapters
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import listed

if TYPE_CHECKING:
    from ds_trainer.engine.evaluation_engine import EvaluationEngine
    from ds_trainer.engine.training_engine import TrainingEngine

_MAX_NAMES = 8  # names in a message
_MAX_CANDIDATES = 5000  # names that are searched for the nearest one


@dataclass(frozen=True)
class Verification:
    """The result of a verification; the same on all ranks except for its cost.

    Attributes:
        directory: the directory of the files.
        tensors: number of parameters and buffers that the files should contain; tied weights count once.
        verified: number of tensors whose samples match the files on every rank.
        missing: tensors that are in no file.
        different: tensors whose samples differ, with the highest rank that detected it.
        shape_mismatches: ``(shape in the model, shape in the files)`` of tensors whose shapes differ.
        not_compared: tensors in a different representation than in the files (quantized).
        unexpected: names that are in the files but not in the model.
        new: tensors that are in no file, as allowed.
        nearest: for each missing tensor, the most similar name in the files.
        seconds, bytes_read: cost on this rank; bytes are those of the pages that were accessed.
        masters: whether the optimizer has master weights, which were verified too; None if DeepSpeed stores them in an
            unknown layout.
    """

    directory: Path
    tensors: int
    verified: int
    missing: tuple[str, ...]
    different: Mapping[str, int]
    shape_mismatches: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    not_compared: tuple[str, ...]
    unexpected: tuple[str, ...]
    new: tuple[str, ...]
    nearest: Mapping[str, str]
    seconds: float
    bytes_read: int
    masters: bool | None

    @property
    def good(self) -> bool:
        """Whether nothing differs from the files."""
        return not (self.missing or self.different or self.shape_mismatches)

    def __str__(self) -> str:
        parts = [f"{self.verified:,} of {self.tensors:,} tensors", f"{len(self.missing):,} missing"]
        for name in ("different", "shape_mismatches", "not_compared", "new"):
            if names := getattr(self, name):
                parts.append(f"{len(names):,} {_LABELS[name]}")
        parts.append(f"{len(self.unexpected):,} unexpected")
        if self.masters is None:
            parts.append("master weights not compared")
        return f"{'verified' if self.good else 'not verified'}, {', '.join(parts)} ({self.seconds:.1f} s)"

    def problems(self) -> list[str]:
        """Returns one message per kind of difference; empty if the model matches the files."""
        problems = []
        if self.missing:
            near = [
                f"{name} (nearest in the files: {self.nearest[name]})" if name in self.nearest else name
                for name in self.missing
            ]
            problems.append(
                f"{_count(self.missing, self.tensors)} in no file of {self.directory} and would be trained from "
                f"random values: {listed(near, _MAX_NAMES)}. Correct the files or the model class, or list new tensors "
                "in allow_new_weights."
            )
        if self.shape_mismatches:
            shapes = [
                f"{name} ({list(a)} in the model, {list(b)} in the files)"
                for name, (a, b) in self.shape_mismatches.items()
            ]
            problems.append(
                f"{_count(self.shape_mismatches, self.tensors)} of a different shape than in {self.directory}: "
                f"{listed(shapes, _MAX_NAMES)}. Use the configuration that belongs to the files, or list new tensors "
                "in allow_new_weights."
            )
        if self.different:
            ranks = [f"{name} (rank {rank})" for name, rank in self.different.items()]
            problems.append(
                f"{_count(self.different, self.tensors)} different from {self.directory} (never loaded, swapped, or "
                f"changed since): {listed(ranks, _MAX_NAMES)}. Load the model again, or set verify_weights='never' if "
                "they were changed on purpose."
            )
        return problems


# Verdicts. _DIFFERENT + r: rank r detected a difference.
_GOOD, _NOT_COMPARED, _SHAPE_MISMATCH, _MISSING, _DIFFERENT = range(5)

_LABELS = {
    "different": "different",
    "shape_mismatches": "of a different shape",
    "not_compared": "not compared",
    "new": "new",
}


def _count(names: Any, tensors: int) -> str:
    return f"{len(names):,} of the model's {tensors:,} tensors {'is' if len(names) == 1 else 'are'}"


def verify_weights(
    model: nn.Module,
    directory: Path,
    engine: TrainingEngine | EvaluationEngine | None = None,
    allowed_new: bool | Sequence[str] = (),
    key_mapping: Mapping[str, str] | None = None,
) -> Verification:
    """Compare the shards of ``model`` on all ranks with the files in ``directory``. Collective.

    Args:
        model: the model as the engine holds it: whole, sliced or sharded, on any device.
        directory: contains ``model.safetensors`` or ``pytorch_model.bin``, or several files with their index.
        engine: the engine of the model, if any.
        allowed_new: tensors that may be absent from the files: names of tensors or modules, or patterns with ``*``;
            True allows all.
        key_mapping: the argument of ``from_pretrained``.

    Returns:
        The result; differences raise no error here.

    Raises:
        ConfigError: a file cannot be read.
    """
    start = time.perf_counter()
    tensors = [entry for entry in model_tensors(model) if not entry.is_new]
    files = SampledFiles(directory)
    base = without_adapters(model)
    shapes = {name: entry.shape for entry in tensors for name in entry.names}
    expected = ExpectedWeights(base, shapes, files, key_mapping)
    votes = [_verdict_of_files(entry, expected) for entry in tensors]
    masters = _compare(tensors, votes, expected, _loaded_as(base), engine)
    # One integer per tensor, so that all ranks know every rank's result.
    verdicts = distributed.agree(torch.tensor(votes, dtype=torch.int64), patient=True)

    quantized = {name for entry in tensors if quantized_bits(entry.tensor) for name in entry.names}
    verified, computed, new = 0, 0, []
    not_compared: list[str] = []
    missing: list[str] = []
    different: dict[str, int] = {}
    shape_mismatches: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for entry, verdict in zip(tensors, verdicts, strict=True):
        name = entry.names[0]
        if entry.is_buffer and verdict == _MISSING:
            computed += 1  # its values come from the model's code
        elif verdict == _GOOD:
            verified += 1
        elif verdict == _NOT_COMPARED:
            not_compared.append(name)
        elif _is_new(entry, base, allowed_new, missing=verdict == _MISSING):
            new.append(name)
        elif verdict == _MISSING:
            missing.append(name)
        elif verdict == _SHAPE_MISMATCH:
            in_files = (expected.shapes[one] for one in entry.names if one in expected.shapes)
            shape_mismatches[name] = (entry.shape, next(in_files, ()))
        else:
            different[name] = verdict - _DIFFERENT
    return Verification(
        directory=directory,
        tensors=len(tensors) - len(new) - computed,
        verified=verified,
        missing=tuple(missing),
        different=different,
        shape_mismatches=shape_mismatches,
        not_compared=tuple(not_compared),
        unexpected=tuple(name for name in expected.unexpected if not scale_names(name) & quantized),
        new=tuple(new),
        nearest=_nearest(missing[:_MAX_NAMES], expected, files),
        seconds=time.perf_counter() - start,
        bytes_read=files.bytes_read,
        masters=masters,
    )


def _verdict_of_files(entry: ModelTensor, expected: ExpectedWeights) -> int:
    """Returns the verdict on a tensor from names and shapes alone."""
    shapes = [expected.shapes[name] for name in entry.names if name in expected.shapes]
    if not shapes:
        return _MISSING
    if entry.shape not in shapes:  # packed weights do not have the shape of the original weights
        return _SHAPE_MISMATCH if quantized_bits(entry.tensor) is None else _NOT_COMPARED
    return _GOOD


def _compare(
    tensors: Sequence[ModelTensor],
    votes: list[int],
    expected: ExpectedWeights,
    loaded_as: torch.dtype | None,
    engine: TrainingEngine | EvaluationEngine | None,
) -> bool | None:
    """Compare samples of the local shards and update ``votes``. Returns ``Verification.masters``."""
    number_of = {id(entry): number for number, entry in enumerate(tensors)}
    tp_rank = 0 if engine is None else engine.groups.coordinates.tp
    held = list(local_weights(tensors, tp_rank))
    masters: bool | None = False
    if engine is not None and engine.deepspeed.basic_optimizer is not None:
        try:
            master_shards = list(local_masters(tensors, engine.deepspeed, tp_rank))
        except UnknownState:
            masters = None
        else:
            masters = bool(master_shards)
            held += master_shards
    held = [part for part in held if len(part.slice) and votes[number_of[id(part.tensor)]] == _GOOD]
    held.sort(key=lambda part: number_of[id(part.tensor)])  # samples of one stored tensor are read together
    tp, rank = 1 if engine is None else engine.groups.layout.tp, distributed.rank()
    sources = [_sources(part.tensor, expected) for part in held]
    chosen = sampling(held, sources, rank // tp, distributed.world_size() // tp)
    positions = [
        sampled_positions(part, stored, rank) if whole else ends_of_tensor(part)
        for part, stored, whole in zip(held, sources, chosen, strict=True)
    ]
    held = [part for part, at in zip(held, positions, strict=True) if len(at)]
    positions = [at for at in positions if len(at)]
    for part, at, elements in zip(held, positions, sample(held, positions), strict=True):
        number = number_of[id(part.tensor)]
        names = [name for name in part.tensor.names if expected.shapes.get(name) == part.tensor.shape]
        if not _comparable(part, names, expected):
            votes[number] = max(votes[number], _NOT_COMPARED)
            continue
        indices = whole_indices(part.slice, at)
        types = (part.memory.dtype, part.tensor.tensor.dtype, loaded_as)
        if not any(_equal(elements, expected.elements(name, indices), expected.dtype(name), types) for name in names):
            votes[number] = _DIFFERENT + distributed.rank()
    return masters


def _sources(entry: ModelTensor, expected: ExpectedWeights) -> int:
    return max(len(expected.sources(name)) for name in entry.names if name in expected.shapes)


def _comparable(part: LocalShard, names: Sequence[str], expected: ExpectedWeights) -> bool:
    """False for quantized weights, whose stored values represent other values."""
    types = [expected.dtype(name) for name in names]
    return all(part.memory.dtype.is_floating_point == dtype.is_floating_point for dtype in types)


def _equal(
    actual: torch.Tensor, expected: torch.Tensor, stored: torch.dtype, types: Sequence[torch.dtype | None]
) -> bool:
    """Whether ``actual`` equals ``expected`` after conversion through ``types``.

    Exact, unless one of ``types`` is coarser than ``stored``: then up to rounding to the coarsest type, which may have
    happened twice.
    """
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if stored.is_floating_point:
        formats = [torch.finfo(dtype) for dtype in types if dtype is not None and dtype.is_floating_point]
        exact = torch.finfo(stored)
        coarse = [info for info in formats if info.eps > exact.eps or info.max < exact.max]
        if coarse:
            error = max(info.eps for info in coarse) * expected.abs()
            error += max(info.smallest_normal * info.eps for info in coarse)
            same |= (actual - expected).abs() <= error
    return bool(same.all())


def _loaded_as(model: Any) -> torch.dtype | None:
    """Returns the dtype in which transformers loaded the model; it may have changed since."""
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
    """Returns the most similar name in the files for each missing name; unexpected names are preferred."""
    nearest = {}
    for name in missing:
        last = name.rpartition(".")[2]
        others = [other for other in files.tensors if other.rpartition(".")[2] == last]
        for candidates in (expected.unexpected[:_MAX_CANDIDATES], others[:_MAX_CANDIDATES]):
            if near := difflib.get_close_matches(name, candidates, n=1):
                nearest[name] = near[0]
                break
        if name in expected.failed:
            nearest[name] = expected.failed[name]
    return nearest
