"""Passes over a few samples, together and in parts: how the loss of all follows from the losses of the parts.

A loss that communicates between ranks is computed once more while every second replica has other samples. If it differs
then, it depends on the samples of the other ranks, which no comparison on one rank shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.data.batch_structure import number_of_samples
from ds_trainer.engine.zero3.shard_access import ReleasedWeight, ShardAccess
from ds_trainer.training.loop.batch_splitting import samples_of_batch
from ds_trainer.training.out_of_memory import NotRepeatable, is_out_of_memory
from ds_trainer.utils import distributed
from ds_trainer.utils.row_random import DrawsOfSamples
from ds_trainer.utils.seeds import random_state, restore_random_state, seed_this_process
from ds_trainer.utils.undisturbed import modes_restored, train_but_for_noise

if TYPE_CHECKING:
    from ds_trainer.training.loop.loss_computation import LossComputation

_SMALLEST = 1e-6  # a loss below is taken as 0
_SPLITS: Mapping[int, tuple[tuple[list[int], list[int]], ...]] = {
    1: (),
    2: (([0], [1]),),
    3: (([0], [1, 2]), ([0, 1], [2])),
    4: (([0, 1], [2, 3]), ([0, 2], [1, 3])),
}
"""By the number of samples: two ways to cut them in two parts. Pairs, where possible: some losses need two samples."""
PAIRS = (([0, 2], [1, 3]),)
"""The way to cut two samples of two rows each, where the batch has the first rows of all before the second ones."""


class NoticedCollectives(TorchDispatchMode):
    """Notices collectives of the script and of what it calls, not those of the engine that runs the model.

    Args:
        refusal: raised at the first one instead of calling it.
    """

    supports_higher_order_operators = True

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__()
        self.found, self._refusal = False, refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found and str(getattr(func, "namespace", "")).strip("_").startswith("c10d"):
            self.found = _is_of_script(sys._getframe(1))
            if self.found and self._refusal is not None:
                raise self._refusal
        return func(*args, **(kwargs or {}))


def _is_of_script(frame: Any) -> bool:
    """Whether the innermost caller that is more than a wrapper of torch's collectives is no part of an engine."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_ENGINES) and not name.startswith(_WRAPPERS):
            return False
        # What torch deprecates is wrapped by typing_extensions.
        if not name.startswith(("torch.", "contextlib", "typing_ext", "accelerate.", *_WRAPPERS)) and name != "torch":
            return True
        frame = frame.f_back
    return False


_WRAPPERS = ("deepspeed.comm", "deepspeed.utils", "ds_trainer.accelerator", "ds_trainer.utils", ShardAccess.__module__)
_ENGINES = ("deepspeed.", "ds_trainer.", "torch.distributed.tensor", "torch.distributed.fsdp")


class LossPasses:
    """Losses of some samples and of parts of them, in the mode that the model is in.

    Args:
        loss_of, model, replica: see :class:`~ds_trainer.training.loop.loss_measurement.LossMeasurement`.
        whole: two to four samples.
        units: the candidates.
        training: whether the model is in training mode.
        splits: ways to cut them in two parts.
        shards: shards their sequences; None without sequence sharding.

    Attributes:
        whole, model, training: see above.
        residuals: how far the loss of all is from the mean of the parts by each candidate, and from their sum: relative
            to the largest loss, the largest of all ranks; -1 if the losses are 0.
        fits: the candidates for which rounding explains it; the number of them stands for the sum.
        error: the first one on this or another rank; empty without.
        alike: whether all losses are equal, as where no sample has a negative: they may be of any kind.
        random: whether the loss is another one with other random numbers (masks, negatives, noise).
        drew, foreign: whether random numbers were drawn, and whether by NumPy or Python.
        repeats: whether each sample drew the same ones in all passes, as far as that is known.
        for_evaluation: whether the result is known to hold in evaluation mode.
        short: whether memory ran out on a rank.
        with_graph: whether the loss takes derivatives itself (``torch.autograd.grad``): passes then have a graph.
        among_ranks: the loss of a part, and its loss while other replicas have other samples, if these differ.
        whole_and_shards: the loss of all, and what those of their shards give by each candidate and as a sum.
        fit_shards: the candidates for which both are equal; None: not compared.
        of_shards: the candidates whose counts of the shards add up to that of all.
    """

    among_ranks: tuple[float, float] | None = None
    random = alike = with_graph = False

    def __init__(
        self,
        loss_of: Callable[[Any], Any],
        model: nn.Module,
        whole: Any,
        units: list[Any],
        training: bool,
        replica: int = 0,
        splits: Any = None,
        shards: LossComputation | None = None,
    ) -> None:
        self.whole, self._loss_of, self.model, self.training = whole, loss_of, model, training
        self._replica = replica
        self._splits = splits or _SPLITS[number_of_samples(whole)]
        self._units, self._shards = units, shards
        self._sharded = False
        self.whole_and_shards: list[float] = []
        self.fit_shards: list[int] | None = None
        self.of_shards: set[int] = set()
        self._parts = [[samples_of_batch(whole, rows) for rows in split] for split in self._splits]
        self._counts = [[[float(unit.rows(part).sum()) for part in pair] for unit in units] for pair in self._parts]
        self._start = random_state()
        self._losses: list[float] = []
        self.error, self.short, self.drew, self.foreign = "", False, False, False
        self.residuals: list[float] = []
        self.fits: list[int] = []
        self.repeats, self.for_evaluation = False, not training

    def run(self) -> LossPasses:
        """Compute the losses; returns this object. Collective."""
        (train_but_for_noise if self.training else nn.Module.eval)(self.model)
        everything = list(range(number_of_samples(self.whole)))
        noticed = NoticedCollectives() if distributed.world_size() > 1 else None
        self._add(everything, self.whole, None, noticed)
        start, end = self._start, random_state()
        drew = not torch.equal(start["torch"], end["torch"]) or not (
            start["cuda"] is None or torch.equal(start["cuda"], end["cuda"])
        )
        foreign = start["python"] != end["python"] or not np.array_equal(start["numpy"][1], end["numpy"][1])
        foreign = foreign or start["numpy"][2] != end["numpy"][2]
        found = noticed is not None and noticed.found
        votes = distributed.agree(torch.tensor([int(drew), int(foreign), int(found), self._replica % 2]))
        drew, foreign, communicates, several = map(bool, votes)
        self.drew, self.foreign = drew or foreign, foreign
        if self.drew:  # does the loss of all depend on these numbers?
            first = self._losses[0]
            seed_this_process(torch.initial_seed() % 2**31 + 1)
            self._start = random_state()
            [other] = self._more([everything], None)
            self._start = start
            far = abs(other - first) > _tolerance(self.model) * max(abs(other), abs(first))
            self.random = bool(distributed.agree(torch.tensor([int(far)]))[0])
        draws = DrawsOfSamples(len(everything)) if drew else None
        while True:
            if draws is not None:
                self._losses = []
                self._add(everything, self.whole, draws)
            self._add_split(0, draws) if self._splits else self._judge()
            if (self.fits or max(self.residuals) < 0) and len(self._splits) > 1:
                self._add_last_split(draws)
            if draws is None or not distributed.agree(torch.tensor([int(not draws.fits)]))[0]:
                break
            draws = draws.by_row()
        self._verify_sum(draws)
        if self._shards is not None and not self.drew and not self.error and abs(self._losses[0]) > _SMALLEST:
            self._compare_shards(self._shards)
        if communicates and several and self._splits and not self.error and max(self.residuals) >= 0:
            self._compare_ranks(draws)
        self.repeats = not foreign and draws is not None and bool(draws.drawn) and not draws.hidden
        if self.training and not drew and len(self._splits) == 1 and self.fits:
            self.model.eval()  # a part of one sample would not tell
            trained = self._losses[0]
            self._add(everything, self.whole, None)
            evaluated = self._losses.pop()
            near = abs(trained - evaluated) <= _tolerance(self.model) * max(abs(trained), abs(evaluated))
            self.for_evaluation = not distributed.agree(torch.tensor([int(not near)]))[0]
        spread = max(self._losses) - min(self._losses)
        varies = not spread <= _tolerance(self.model) * max(map(abs, self._losses))
        self.alike = not distributed.agree(torch.tensor([int(varies)]))[0]
        return self

    def _verify_sum(self, draws: DrawsOfSamples | None) -> None:
        """Compare a loss that may be a sum with those of single samples. Collective.

        A contrastive loss of alike vectors is the logarithm of their number: log 4 is log 2 + log 2. A loss that picks
        samples of the batch (the hardest, those beyond a threshold) may pick the same ones in parts of two.
        """
        total = len(self.residuals) - 1
        others = min(self.residuals[:total], default=float("inf"))
        like = max(self.residuals) >= 0 and self.residuals[total] < others and len(self._splits) > 1
        if self.error or not distributed.agree(torch.tensor([int(like)]))[0]:
            return
        alone = self._more([[row] for row in range(number_of_samples(self.whole))], draws)
        self.error = ""  # a loss of one sample may fail, and is no sum then
        far = abs(sum(alone) - self._losses[0]) / (max(map(abs, (*alone, self._losses[0]))) or 1.0)
        [found] = distributed.largest(torch.tensor([far if far == far else 1.0], dtype=torch.float64)).tolist()
        self.residuals[total] = max(self.residuals[total], found)
        if found > _tolerance(self.model):
            self.fits = [index for index in self.fits if index != total]

    def _compare_shards(self, shards: LossComputation) -> None:
        """Compare the loss of all samples with those of the shards of their sequences. Collective."""
        everything, self._sharded = list(range(number_of_samples(self.whole))), True
        weighted, counted = shards.of_shards(self._units, self.whole, lambda: self._more([everything], None)[0])
        self._sharded, ranks = False, counted[-1]
        wholes = [*(float(unit(self.whole)) for unit in self._units), 1.0]
        several = [found / n if n else 0.0 for found, n in zip(counted, wholes, strict=True)]
        self.of_shards = {index for index, times in enumerate(several) if abs(times - 1) < _SMALLEST}
        # What all shards have alike counts once, as samples do; what is neither is no candidate.
        alike = {index for index, times in enumerate(several) if abs(times - ranks) < _SMALLEST}
        divisors = [n if index in self.of_shards | alike else float("nan") for index, n in enumerate(wholes)]
        by_shards = [share / n for share, n in zip(weighted, divisors, strict=True)]
        first, bound = self._losses[0], 10 * _tolerance(self.model)  # attention rounds, too
        self.whole_and_shards = [first, *by_shards]
        far = [abs(found - first) / max(abs(found), abs(first)) for found in by_shards]
        far = [number if number == number else 1.0 for number in far]
        agreed = distributed.largest(torch.tensor(far, dtype=torch.float64)).tolist()
        self.fit_shards = [index for index, number in enumerate(agreed) if number <= bound]

    def _compare_ranks(self, draws: DrawsOfSamples | None) -> None:
        """Compute a part again while every second replica has another one, as in a step. Collective.

        Both parts have as many samples, because collectives of the script may need tensors of equal shapes.
        """
        first, other = self._splits[0]
        if len(other) != len(first):
            other = other[-len(first) :]
        rows = other if self._replica % 2 else first
        before, (now,) = self._losses[1], self._more([rows], draws)
        far = not self._replica % 2 and abs(now - before) > _tolerance(self.model) * max(abs(now), abs(before))
        if distributed.agree(torch.tensor([int(far)]))[0]:
            self.fits, self.among_ranks = [], (before, now)

    def _more(self, parts: list[list[int]], draws: DrawsOfSamples | None) -> list[float]:
        """The losses of further parts, in the mode of the first ones."""
        count = len(self._losses)
        with modes_restored(self.model):
            if self.training:
                train_but_for_noise(self.model)
            for rows in parts:
                self._add(rows, samples_of_batch(self.whole, rows), draws)
        losses = self._losses[count:]
        del self._losses[count:]
        return losses

    def _add_last_split(self, draws: DrawsOfSamples | None) -> None:
        """Add the second split: in evaluation mode, to see whether that is the same, unless random numbers differ."""
        if not self.training or draws is not None:
            return self._add_split(1, draws)
        self.model.eval()
        first = self.fits
        self._add_split(1, None)
        self.for_evaluation = bool(self.fits)
        if not self.fits and not self.error:
            train_but_for_noise(self.model)
            del self._losses[3:]
            self.fits = first
            self._add_split(1, None)

    def _add_split(self, index: int, draws: DrawsOfSamples | None) -> None:
        for rows, part in zip(self._splits[index], self._parts[index], strict=True):
            self._add(rows, part, draws)
        self._judge()

    def _add(self, rows: list[int], batch: Any, draws: DrawsOfSamples | None, noticed: Any = None) -> None:
        """Add the loss of ``batch``, with the same random numbers as before."""
        restore_random_state(self._start)
        try:
            with ExitStack() as stack, torch.set_grad_enabled(self.with_graph):
                for mode in (None if draws is None else draws.of(rows), noticed):
                    if mode is not None:
                        stack.enter_context(mode)
                if self._shards is not None and not self._sharded:
                    stack.enter_context(self._shards.unsharded())
                loss = self._loss_of(batch)
            self._losses.append(float("nan") if loss is None else float(loss.detach().mean()))
        except ReleasedWeight:
            raise
        except Exception as problem:  # a loss may need more samples than a part has; the real pass comes later
            if not self.with_graph and "does not require grad" in str(problem):  # on all ranks alike
                self.with_graph = True
                return self._add(rows, batch, draws, noticed)
            self.short = self.short or is_out_of_memory(problem)
            if self.short and _communicates(self.model):
                text = f"{problem}\nThis was a look at a few samples, which all ranks compute together"
                raise NotRepeatable(text) from problem  # a rank alone would leave the others waiting
            self._losses.append(float("nan"))
            self.error = self.error or f"{type(problem).__name__}: {problem}".split("\n")[0].rstrip(".")

    def _judge(self) -> None:
        """Compare the losses so far. Collective."""
        own = [self._residual(index) for index in [*range(len(self._units)), None]]
        own += [float(bool(self.error)), float(self.short)]
        *self.residuals, failed, short = distributed.largest(torch.tensor(own, dtype=torch.float64)).tolist()
        self.short = bool(short)
        if failed and not self.error:
            self.error = "an error on another rank"
        bound = _tolerance(self.model)
        # A candidate that rounding explains still loses to one that fits far better.
        bound = min(bound, max(bound / 20, 10 * min(self.residuals)))
        self.fits = [index for index, residual in enumerate(self.residuals) if residual <= bound]

    def is_ambiguous(self) -> bool:
        """Whether candidates that fit weight some parts differently, so that one of them is wrong."""
        return any(self._differ(self.fits[0], index) for index in self.fits[1:])

    def numbers(self) -> str:
        """The first losses, for a message."""
        return " ({:.4g}; parts {:.4g} and {:.4g})".format(*self._losses[:3]) if self._splits else ""

    def _residual(self, unit: int | None) -> float:
        """How far the loss of all samples is from the mean of the parts, or their sum: relative, -1 if they are 0."""
        whole = self._losses[0]
        worst = 0.0 if not self._splits and abs(whole) > _SMALLEST else -1.0
        for index in range((len(self._losses) - 1) // 2):
            losses = self._losses[1 + 2 * index : 3 + 2 * index]
            scale = max(abs(loss) for loss in (whole, *losses) if loss == loss) if whole == whole else 0.0
            if not _SMALLEST < scale < float("inf"):
                continue
            if unit is None:
                mean = sum(losses)
            else:
                weights = self._counts[index][unit]
                total = sum(weights)
                added = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
                mean = added / total if total else float("nan")
            worst = max(worst, abs(mean - whole) / scale if mean - mean == 0 else float("inf"))
        return worst

    def _differ(self, one: int, other: int) -> bool:
        for counts in self._counts:
            if len(counts) in (one, other):  # the sum
                return True
            first, second = (counts[index][0] / (sum(counts[index]) or 1.0) for index in (one, other))
            if abs(first - second) > _SMALLEST:
                return True
        return False


def _tolerance(model: nn.Module) -> float:
    """The relative difference that rounding explains, in the precision of ``model``."""
    autocast = getattr(model, "torch_autocast_enabled", None)
    kinds = {parameter.dtype for parameter in model.parameters()}
    if {torch.bfloat16, torch.float16} & kinds or torch.is_autocast_enabled() or (autocast is not None and autocast()):
        return 3e-3
    return 2e-5 if all(parameter.device.type == "cpu" for parameter in model.parameters()) else 2e-4


def _communicates(model: nn.Module) -> bool:
    """Whether ranks communicate while ``model`` runs: its weights are sharded or sliced."""
    if distributed.world_size() == 1:
        return False
    sliced = getattr(model, "mp_world_size", 1) > 1  # of DeepSpeed's engine
    return sliced or any(hasattr(parameter, "ds_id") for parameter in model.parameters())
