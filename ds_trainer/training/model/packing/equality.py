"""Proves before the first step that packed samples train like the same samples alone, on samples of the first batch.

Two comparisons, in evaluation mode and without gradients, on a few tokens of a few samples:

1. *Alone*: the samples are packed into rows, and run one by one as without packing. Outputs per token, the number of
   targets, and the loss (of the rows, and the token-weighted losses of the samples) must be equal within rounding. So
   positions that run on, a missing or additional target, and a wrong weight of a sample are found.
2. *Other neighbors*: the same rows run again with other tokens in some samples. The outputs of all other samples must
   stay. Both runs have the same shapes, so there is almost no rounding, and an influence of a single token is found in
   16-bit formats too.

If one of them fails, hooks find the first module whose output differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_trainer.data.packing.batch import Document, PackedFormat
from ds_trainer.data.packing.token_counts import TOKENS
from ds_trainer.parallel.attention import active_sharding, use_sharding
from ds_trainer.training.model.sequence_sharding.setup import per_token_output, value_of
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.two_runs import first_difference, rms
from ds_trainer.utils.undisturbed import evaluation_mode

_SAMPLES = 4
_TOKENS = 32  # of each sample
_ROUNDING = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 8e-2, "fp16": 2e-2}
_SAME_SHAPES = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-4, "fp16": 1e-4}  # two runs with equal shapes: almost none


@dataclass(frozen=True)
class PackedPass:
    """How a batch runs through the model of a training.

    Attributes:
        model: the engine, or the module without one.
        loss: computes loss and outputs of a batch, or of this rank's shard of it. The loss is a mean over its targets;
            None if a part of it is not (an auxiliary loss).
        count: number of targets of a batch.
        prepare: moves a batch to the device.
        sharded: a context with this rank's shard of a batch.
        sum_of_shards: adds a number over the ranks that share a sequence. Collective.
        number_format: type of the matrix products: fp32, tf32, bf16, fp16.
        experts: whether tokens share experts, whose products have other shapes with other tokens.
    """

    model: nn.Module
    loss: Callable[[nn.Module, dict[str, Any]], tuple[torch.Tensor | None, Any]]
    count: Callable[[Mapping[str, Any]], torch.Tensor]
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]]
    sharded: Callable[[Mapping[str, Any]], AbstractContextManager[Any]]
    sum_of_shards: Callable[[torch.Tensor], torch.Tensor]
    number_format: str
    experts: bool = False

    @property
    def rounding(self) -> tuple[float, float]:
        """Relative differences that are rounding: between other shapes, and between equal shapes."""
        of_shapes = _ROUNDING.get(self.number_format, _ROUNDING["fp32"])
        return of_shapes, 0.1 * of_shapes if self.experts else _SAME_SHAPES.get(self.number_format, 1e-5)


@dataclass(frozen=True)
class Equality:
    """The result of the proof: relative differences, and the rounding that was allowed.

    Attributes:
        samples: samples that were compared.
        outputs: largest difference of an output per token from that of the sample alone; None without such outputs.
        loss: difference of the losses; None if they were not compared.
        neighbors: largest difference of an output when other samples of the row change; None without such outputs.
    """

    samples: int
    outputs: float | None
    loss: float | None
    neighbors: float | None

    def text(self) -> str:
        """One line for the log."""
        parts = [
            f"{name} {value:.1e}"
            for name, value in (("outputs", self.outputs), ("loss", self.loss), ("other neighbors", self.neighbors))
            if value is not None
        ]
        differences = f"{self.samples} compared; largest differences: {', '.join(parts)}"
        return f"packed samples equal the same samples alone ({differences})"


class _Rows:
    """The rows of the proof: ``documents`` distributed over ``count`` rows, and the batch of each way to run them."""

    def __init__(self, documents: Sequence[Document], count: int, format: PackedFormat) -> None:
        size = len(documents) // count
        self.rows = [list(documents[index * size : (index + 1) * size]) for index in range(count)]
        self.length = max(sum(len(document[TOKENS]) for document in row) for row in self.rows)
        self._format = format
        # In the first row the second sample changes, between others; in a further row the last one.
        self._changed = [(0, 1 if size > 2 else 0), *((index, size - 1) for index in range(1, count))]

    def packed(self) -> dict[str, Any]:
        return self._format.assemble(self.rows, self.length)

    def with_other_neighbors(self) -> dict[str, Any]:
        rows = [list(row) for row in self.rows]
        others = torch.cat([document[TOKENS] for row in rows for document in row]).unique()
        for row, index in self._changed:
            tokens = rows[row][index][TOKENS]
            following = (torch.searchsorted(others, tokens) + 1) % len(others)
            rows[row][index] = {**rows[row][index], TOKENS: others[following].to(tokens.dtype)}
        return self._format.assemble(rows, self.length)

    def alone(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Row and first token of each sample, and its batch."""
        for index, row in enumerate(self.rows):
            start = 0
            for document in row:
                yield index, start, self._format.alone(document)
                start += len(document[TOKENS])

    def unchanged(self) -> torch.Tensor:
        """Which tokens belong to samples that :meth:`with_other_neighbors` leaves: bool ``[rows, length]``."""
        kept = torch.zeros(len(self.rows), self.length, dtype=torch.bool)
        for row, documents in enumerate(self.rows):
            start = 0
            for index, document in enumerate(documents):
                end = start + len(document[TOKENS])
                kept[row, start:end] = (row, index) not in self._changed
                start = end
        return kept


def check_packed_model(batch: Mapping[str, Any], format: PackedFormat, run: PackedPass) -> Equality:
    """Compare packed samples of ``batch`` with the same samples alone. Collective.

    Every rank runs the same number of forward passes, whatever its samples are.

    Args:
        batch: the first batch of packed rows, in host memory; the same on all ranks of a replica.
        format: how it was made.
        run: how batches run through the model.

    Raises:
        ConfigError: on all ranks, if a difference exceeds rounding; names the module that mixes samples.
    """
    documents = _short_documents(format.documents(batch))
    rows = _Rows(documents, 2 if batch[TOKENS].shape[0] > 1 else 1, format)
    try:
        with evaluation_mode(run.model), torch.no_grad():
            return _compare(rows, run)
    except (ValueError, TypeError) as error:  # some modules of transformers say that they cannot keep samples apart
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{_name_of(run.model)}: packing=True, but its forward pass refuses packed samples: {error} Or set "
            "packing=False."
        ) from error


def _short_documents(documents: Sequence[Document]) -> list[Document]:
    """The beginnings of :data:`_SAMPLES` samples: of the longer ones if there are enough, repeated if there are few."""
    longer = [document for document in documents if len(document[TOKENS]) >= 8]
    chosen = longer if len(longer) >= _SAMPLES else list(documents)
    picked = [chosen[index % len(chosen)] for index in range(_SAMPLES)]
    return [{key: value[:_TOKENS] for key, value in document.items()} for document in picked]


def _compare(rows: _Rows, run: PackedPass) -> Equality:
    packed = rows.packed()
    key: Any = None
    expected: list[tuple[int, int, torch.Tensor]] = []
    total, targets = 0.0, 0
    with use_sharding(None, None):
        for row, start, sample in rows.alone():
            loss, outputs = run.loss(run.model, run.prepare(sample))
            count = int(run.count(sample))
            total += 0.0 if loss is None or not count else float(loss) * count
            targets += count
            length = sample[TOKENS].shape[1]
            key = per_token_output(outputs, length) if outputs is not None and key is None else key
            if key is not None:
                expected.append((row, start, value_of(outputs, key)[0].detach()))
    loss_of_rows, result, tokens = _run(packed, run, key)
    _, other, _ = _run(rows.with_other_neighbors(), run, key)
    in_rows = int(run.count(packed))
    outputs_differ = None if result is None else _difference_from(expected, result, tokens)
    neighbors = None if result is None or other is None else _difference(result, other, rows.unchanged(), tokens)
    loss_differs = None
    if loss_of_rows is not None and targets:
        loss_differs = abs(loss_of_rows * in_rows - total) / max(abs(total), 1e-30)
    worst = [outputs_differ or 0.0, loss_differs or 0.0, neighbors or 0.0, float(abs(in_rows - targets))]
    numbers = torch.tensor([value if value == value else float("inf") for value in worst], dtype=torch.float64)
    agreed = distributed.largest(numbers).tolist()
    limits = (run.rounding[0], *run.rounding, 0.0)
    if all(difference <= limit for difference, limit in zip(agreed, limits, strict=True)):
        return Equality(_SAMPLES, outputs_differ, loss_differs, neighbors)
    raise ConfigError(
        _refusal(
            differences=agreed,
            limits=limits,
            counts=(targets, in_rows),
            rows=rows,
            run=run,
            packed=packed,
            tokens=tokens,
        )
    )


def _run(batch: dict[str, Any], run: PackedPass, key: Any) -> tuple[float | None, torch.Tensor | None, torch.Tensor]:
    """Mean loss of packed rows, this rank's outputs per token, and the positions of these tokens in the rows."""
    length = batch[TOKENS].shape[1]
    with run.sharded(batch) as local:
        sharding = active_sharding()
        loss, outputs = run.loss(run.model, run.prepare(local))
        result = None if key is None else value_of(outputs, key).detach()
        tokens = torch.arange(length)
        if sharding is not None:
            coordinates = sharding.groups.coordinates
            tokens = sharding.plan.positions(coordinates.cp, coordinates.sp)
        own = run.count(local)
        if loss is None:
            return None, result, tokens
        share = torch.nan_to_num(loss.detach()).double() * own.to(loss.device)
        total = run.sum_of_shards(share) if sharding is not None else share
        return float(total) / max(int(run.count(batch)), 1), result, tokens


def _difference_from(
    expected: Sequence[tuple[int, int, torch.Tensor]], result: torch.Tensor, tokens: torch.Tensor
) -> float:
    """The largest relative difference of a token's output from that of its sample alone."""
    worst = 0.0
    size = rms(torch.cat([alone.flatten(1) for _, _, alone in expected]))
    for row, start, alone in expected:
        here = ((tokens >= start) & (tokens < start + len(alone))).nonzero().flatten()
        if len(here):
            of_row = result[row, here.to(result.device)].double().flatten(1)
            wanted = alone[(tokens[here] - start).to(alone.device)].double().flatten(1)
            worst = max(worst, (of_row - wanted).square().mean(1).sqrt().max().item())
    return worst / size if size else worst


def _difference(first: torch.Tensor, second: torch.Tensor, compared: torch.Tensor, tokens: torch.Tensor) -> float:
    """The largest relative difference of a token's output between two runs of the same shape."""
    inside = tokens < compared.shape[1]  # a sharded row is padded
    chosen = torch.zeros(compared.shape[0], len(tokens), dtype=torch.bool)
    chosen[:, inside] = compared[:, tokens[inside]]
    one, two = (value[chosen.to(value.device)].double().flatten(1) for value in (first, second))
    if not len(one):
        return 0.0
    size = rms(first)
    worst = (one - two).square().mean(1).sqrt().max().item()
    return worst / size if size else worst


# -- refusal ---------------------------------------------------------------------------------------------------------


def _refusal(
    differences: Sequence[float],
    limits: Sequence[float],
    counts: tuple[int, int],
    rows: _Rows,
    run: PackedPass,
    packed: dict[str, Any],
    tokens: torch.Tensor,
) -> str:
    outputs, loss, neighbors, miscounted = differences
    name = _name_of(run.model)
    before = f"{name}: packing=True, but packed samples do not train like the same samples alone"
    after = "Set packing=False."
    if neighbors > limits[2]:
        module = _agreed_name(_mixing_module(rows, run, tokens))
        return (
            f"{before}: the outputs of a sample change by a relative {neighbors:.2g} with the other samples in its row "
            f"(rounding allows {limits[2]:.0e}), and by {outputs:.2g} from those of the sample alone. The first module "
            f"that mixes samples is {module}. {after}"
        )
    if outputs > limits[0]:
        module = _agreed_name(_differing_module(rows, run, packed, tokens))
        return (
            f"{before}: the outputs of a sample in a row differ by a relative {outputs:.2g} from those of the sample "
            f"alone (rounding allows {limits[0]:.0e}), although other samples in the row have no influence: its "
            f"positions are different, for example. The first module with another output is {module}. {after}"
        )
    if miscounted:
        return (
            f"{before}: their loss has {counts[1]:,} targets in the rows, and {counts[0]:,} alone, so every sample "
            f"would have another weight. A loss must count the labels that are not -100, and the first token of a "
            f"sample is no target of the sample before it. {after}"
        )
    return (
        f"{before}: the loss of the rows differs by a relative {loss:.2g} from the losses of the samples alone, "
        f"weighted by their tokens (rounding allows {limits[1]:.0e}), although outputs and targets are equal: the loss "
        f"is not a mean over the labels that are not -100. {after}"
    )


def _name_of(model: nn.Module) -> str:
    return type(getattr(model, "module", model)).__name__


def _agreed_name(name: str | None) -> str:
    """The first name that a rank found; with sharded sequences, only some ranks hold tokens that differ. Collective."""
    names = [other for other in distributed.gather_objects(name) if other is not None]
    return names[0] if names else "unknown (no module returns one value per token)"


def _mixing_module(rows: _Rows, run: PackedPass, tokens: torch.Tensor) -> str | None:
    compared = rows.unchanged()

    def difference(one: torch.Tensor, two: torch.Tensor) -> float:
        per_token = one.shape == two.shape and one.shape[1] == len(tokens) and len(one) == len(compared)
        return _difference(one, two, compared, tokens) if per_token else 0.0

    return first_difference(
        run.model,
        lambda: _run(rows.packed(), run, None),
        lambda: _run(rows.with_other_neighbors(), run, None),
        difference,
        run.rounding[1],
        through_inputs=False,
    )


def _differing_module(rows: _Rows, run: PackedPass, packed: dict[str, Any], tokens: torch.Tensor) -> str | None:
    row, start, sample = list(rows.alone())[1]
    length = sample[TOKENS].shape[1]

    def alone() -> None:
        with use_sharding(None, None):
            run.loss(run.model, run.prepare(sample))

    def difference(one: torch.Tensor, two: torch.Tensor) -> float:
        if one.shape[1] != length or two.shape[1] != len(tokens) or one.shape[2:] != two.shape[2:]:
            return 0.0  # not one value per token
        return _difference_from([(min(row, len(two) - 1), start, one[0])], two, tokens)

    again = lambda: _run(packed, run, None)  # noqa: E731
    return first_difference(run.model, alone, again, difference, run.rounding[0], through_inputs=True)
