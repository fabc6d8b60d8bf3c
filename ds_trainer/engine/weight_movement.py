"""Whether the weights that an optimizer steps move, how far, and whether all ranks hold the same copies.

The weights are the ones that are stepped: the masters where there are any, of which each rank has its part. A tensor
that moves changes its 2-norm in float64, so nothing is copied; how far a step goes is seen at a sample of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.engine.state.flat_partitions import UnknownState, flat_partitions
from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine
    from ds_trainer.parallel.groups import ParallelGroups

_SAMPLE = 256  # elements of a tensor that are compared before and after a step
_SAME = 1e-12  # relative difference of two norms in float64 of the same values, on different devices
_FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StepSize(NamedTuple):
    """How far one step moved a tensor: relative to its weights (2-norm), and which part of its elements changed."""

    ratio: float
    changed: float


class WeightMovement:
    """Compares the weights of ``engine`` at different times.

    Args:
        engine: the engine.
        names: of the trainable parameters, the same on all ranks.

    Attributes:
        known: whether the optimizer's weights can be read here. Not those on NVMe, of ZenFlow and of SuperOffload.
        dtype: number format of the stepped weights.
    """

    def __init__(self, engine: TrainingEngine, names: Sequence[str]) -> None:
        self._engine = engine
        named = dict(engine.deepspeed.module.named_parameters())
        self._number = {id(named[name]): number for number, name in enumerate(names)}  # a script may change names
        self._first: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None
        self._sample: torch.Tensor | None = None
        self.dtype = torch.float32
        known = 1
        try:
            partitions = flat_partitions(engine.deepspeed, engine.groups.coordinates.tp)
            known = int(all(one.tensor.numel() == one.numel for one in partitions))
            self.dtype = partitions[0].tensor.dtype if partitions else torch.float32
        except UnknownState:
            known = 0
        self.known = not distributed.agree(torch.tensor([1 - known]))[0]
        self._owners: list[int] = []

    def _parts(self) -> list[torch.Tensor]:
        """This rank's parts of the stepped weights; their numbers are in ``_owners``."""
        parts, self._owners = [], []
        for partition in flat_partitions(self._engine.deepspeed, self._engine.groups.coordinates.tp):
            flat = partition.tensor.detach().reshape(-1)
            for fragment in partition.fragments:
                if len(fragment.slice) and id(fragment.parameter) in self._number:
                    parts.append(flat[fragment.offset : fragment.offset + len(fragment.slice)])
                    self._owners.append(self._number[id(fragment.parameter)])
        return parts

    def begin(self) -> None:
        """Note the weights from which on movement counts."""
        self._first = norms(self._parts())

    def rates(self) -> list[float | None]:
        """The peak learning rate of each name; None if no rank's optimizer steps it. Collective."""
        rates = torch.full((len(self._number),), -1.0, dtype=torch.float64)
        for partition in flat_partitions(self._engine.deepspeed, self._engine.groups.coordinates.tp):
            rate = partition.group.get("initial_lr", partition.group.get("lr")) or 0.0
            for fragment in partition.fragments:
                if id(fragment.parameter) in self._number:
                    rates[self._number[id(fragment.parameter)]] = float(rate)
        return [None if rate < 0 else rate for rate in distributed.largest(rates).tolist()]

    def moved(self) -> list[bool]:
        """Which of the names have other weights than at :meth:`begin`, on any rank. Collective; waits for the device.

        Weights that something put back before the last :meth:`before_step` have not moved.
        """
        assert self._first is not None
        changed = norms(self._parts()) != self._first
        if self._kept is not None:
            changed &= self._kept != self._first
        moved = torch.zeros(len(self._number), dtype=torch.int64)
        moved[[owner for owner, one in zip(self._owners, changed.tolist(), strict=True) if one]] = 1
        return [bool(one) for one in distributed.agree(moved)]

    def before_step(self, put_back: bool) -> None:
        """Copy the sample of weights for :meth:`step_sizes`. ``put_back``: all weights should have moved by now."""
        self._sample = self._sampled()
        self._kept = norms(self._parts()) if put_back else None

    def _sampled(self) -> torch.Tensor:
        parts = [part[:: max(1, len(part) // _SAMPLE)] for part in self._parts()]
        self._lengths = [len(part) for part in parts]
        return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)

    def step_sizes(self) -> list[StepSize | None]:
        """How far each name has moved since :meth:`before_step`; None for what was zero. Collective, waits."""
        after, before, self._sample = self._sampled(), self._sample, None
        assert before is not None
        count = len(self._number)
        sums = torch.zeros(4, count, dtype=torch.float64, device=after.device)
        if after.numel():
            owners = torch.tensor(self._owners).repeat_interleave(torch.tensor(self._lengths)).to(after.device)
            step, weight = (after.double() - before.double()), before.double()
            values = torch.stack([step.square(), weight.square(), (step != 0).double(), torch.ones_like(step)])
            sums.index_add_(1, owners, values)
        sums = sums.to(distributed.collective_device())
        distributed.all_reduce_sum(sums)
        moved, weights, changed, elements = sums.tolist()
        rows = zip(moved, weights, changed, elements, strict=True)
        return [StepSize((m / w) ** 0.5, c / n) if w else None for m, w, c, n in rows]


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each of ``tensors``, added up in float64. Does not wait for the device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    device = tensors[0].device
    return torch.stack([norm.to(device) for norm in torch._foreach_norm(list(tensors), 2, torch.float64)])


class WeightDifference(NamedTuple):
    """A tensor of which ranks hold different copies: its name, and a rank that holds another one than rank 0 does."""

    name: str
    rank: int


def different_copies(model: nn.Module, groups: ParallelGroups, buffers: bool) -> list[WeightDifference]:
    """The tensors whose copies on several ranks differ. Collective: one small all-reduce; waits for the device.

    Parameters that ZeRO 3 shards have copies on tensor-parallel ranks only.

    Args:
        model: the module.
        groups: of the layout.
        buffers: compare the buffers too. Some models change theirs in each forward pass.
    """
    if distributed.world_size() == 1:
        return []
    named: list[tuple[str, Any]] = list(model.named_parameters())
    if buffers:
        named += model.named_buffers()
    named = [(name, one) for name, one in named if one.dtype in _FORMATS and getattr(one, "allreduce", True)]
    held = [getattr(one, "ds_tensor", one).detach() for _, one in named]
    own = norms(held).to(distributed.collective_device()).nan_to_num_(nan=-1.0)
    replicated = torch.tensor([not hasattr(one, "ds_tensor") for _, one in named])
    whole = torch.tensor([not is_sliced(one) for _, one in named])
    different = torch.zeros(len(named), dtype=torch.bool)
    for group, compared in ((groups.seq_data_parallel, replicated), (groups.tp, whole)):
        if dist.get_world_size(group) > 1:
            ends = torch.cat([own, -own])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
            largest, smallest = ends[: len(own)], -ends[len(own) :]
            different |= (largest - smallest > _SAME * largest.abs()).cpu() & compared
    differs = [bool(one) for one in distributed.agree(different.long())]
    return list(_with_ranks([name for (name, _), one in zip(named, differs, strict=True) if one], own.cpu(), differs))


def _with_ranks(names: Sequence[str], own: torch.Tensor, differs: Sequence[bool]) -> Iterable[WeightDifference]:
    """Each of the different tensors with the first rank whose copy is another than that of rank 0. Collective."""
    if not names:
        return
    values = distributed.gather_numbers(own[torch.tensor(differs)])
    for column, name in enumerate(names):
        others = ((values[:, column] - values[0, column]).abs() > _SAME * values[0, column].abs()).nonzero()
        yield WeightDifference(name, int(others[0]) if len(others) else 0)


def broken_ties(model: nn.Module) -> Iterator[str]:
    """A sentence for each pair of tensors that ``model`` declares as one.

    That is ``all_tied_weights_keys`` of transformers. Frozen pairs are left out.
    """
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    if not isinstance(declared, Mapping) or not getattr(getattr(model, "config", None), "tie_word_embeddings", True):
        return
    for one, other in declared.items():
        try:
            pair = model.get_parameter(one), model.get_parameter(other)
        except AttributeError:  # a part that an adapter or a quantization has replaced
            continue
        if pair[0] is not pair[1] and any(parameter.requires_grad for parameter in pair):
            yield (
                f"{one} and {other} are two tensors, although the model ties them: they are trained apart, and a saved "
                "model has one of them. Call model.tie_weights() before the Trainer is made, or set "
                "tie_word_embeddings=False in its configuration."
            )
