"""Tensors and objects of all ranks, in lists, tuples and dicts of any depth.

accelerate's operations do the work. What is added: they never see shapes that do not fit (gloo ends the process for
those, NCCL hangs), and what is gathered for metrics is exact, since evaluation here repeats no sample and ranks may
hold unequal numbers of them.

The ranks of a replica (tensor, context, sequence parallelism) hold the same, so its first rank speaks for all of them,
and everyone hears it. While a batch is cut along its sequences (inside ``compute_loss``) each rank of a sequence group
holds other tokens: then all of these speak, and only tensor-parallel ranks are silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from ds_trainer.data.loader import FillerBatch
from ds_trainer.parallel.attention import active_cut
from ds_trainer.training.accelerator.processes import Processes
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


class Collectives(Processes):
    """What ranks exchange. In a world of one rank nothing is sent and no process group is needed."""

    _filler = False
    _triggered = False

    @property
    def _speakers(self) -> list[int]:
        """Ranks whose data differ now."""
        if active_cut() is not None:
            return self._layout.groups(("dp", "cp", "sp"))[0]
        return self._layout.speakers

    @property
    def _counts(self) -> bool:
        """Whether what this rank computed from the current batch is to be heard."""
        return not self._filler and self.process_index in self._speakers

    @contextmanager
    def batch(self, inputs: Any) -> Iterator[None]:
        """The batch that is worked on, told by the loop: what is computed from a filler counts for nothing."""
        self._filler = isinstance(inputs, FillerBatch)
        try:
            yield
        finally:
            self._filler = False

    def gather(self, tensor: Any) -> Any:
        """Tensors of all replicas, concatenated along the first dimension in their order; 0-d ones are one row each.

        Args:
            tensor: a tensor or a nest of them, with the same shapes on all ranks.

        Raises:
            ConfigError: shapes or types differ over the ranks; the message has those of all.
        """
        if not self.use_distributed:
            return _leaves(_one_dimensional, tensor)
        self._joined()
        self._check(tensor, "gather", _shape, "Use gather_for_metrics, or pad_across_processes first.")
        speakers = self._speakers
        everything = _operations().gather(tensor)
        if len(speakers) == self.num_processes:
            return everything
        return _leaves(
            lambda found: torch.cat([found.chunk(self.num_processes)[rank] for rank in speakers]), everything
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What was computed from the current batches, exactly: nothing twice, nothing padded, fillers left out.

        Args:
            input_data: a tensor or a nest of them, whose first dimensions may differ over the ranks; or a list of
                objects.
            use_gather_object: send tensors as objects; shapes are free then.

        Returns:
            Tensors concatenated in the order of the replicas, or the concatenated list. After a loader of
            :meth:`prepare`, which repeats samples to fill the last batch, the repeated ones are cut off.

        Raises:
            ConfigError: types, or dimensions other than the first, differ over the ranks.
        """
        if not self.use_distributed:
            return input_data if use_gather_object or _has_objects(input_data) else self.gather(input_data)
        self._joined()
        remedy = "Pad those dimensions with pad_across_processes, or pass use_gather_object=True."
        objects = self._check(input_data, "gather_for_metrics", _shape_of_row, remedy, use_gather_object)
        if objects:
            everything = _operations().gather_object(input_data if self._counts else [])
        else:
            everything = self._gather_rows(input_data)
        return _without_repeated(everything, objects)

    def _gather_rows(self, data: Any) -> Any:
        """Concatenation along the first dimension, of as many rows as each rank has."""
        rows: list[int] = []
        counts_here = self._counts
        _leaves(lambda t: rows.append(0 if not counts_here else t.shape[0] if t.dim() else 1), data)
        if not rows:
            return data
        gather = _operations().gather
        sizes = gather(torch.tensor([rows], device=distributed.collective_device())).tolist()
        per_leaf = iter(zip(*sizes, strict=True))

        def of_all(tensor: torch.Tensor) -> torch.Tensor:
            counts = next(per_leaf)
            most = max(counts)
            own = _one_dimensional(tensor)[: counts[self.process_index]]
            if most == 0:
                return own
            if min(counts) == most:
                return gather(own)
            padded = own.new_zeros((most, *own.shape[1:]))
            padded[: len(own)] = own
            parts = gather(padded).split(most)
            return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

        return _leaves(of_all, data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Element-wise ``"sum"``, ``"mean"`` or ``"max"`` over all replicas, on every rank, as new tensors.

        Args:
            tensor: a tensor or a nest of them, with the same shapes on all ranks.
            reduction: what to do; ``"none"`` adds up as well, as in accelerate.
            scale: 1; accelerate applies another one on XLA devices only.

        Raises:
            ConfigError: another reduction or scale, or shapes that differ over the ranks.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise ConfigError(f"reduce: reduction={reduction!r} is none of 'sum', 'mean', 'max', 'none'.")
        if scale != 1.0:
            raise ConfigError(f"reduce: scale={scale} would have an effect on XLA only. Multiply the result yourself.")
        if not self.use_distributed:
            return _leaves(torch.clone, tensor)
        self._joined()
        self._check(tensor, "reduce", _shape, "Make them equal with pad_across_processes.")
        speakers = self._speakers
        if len(speakers) == self.num_processes or reduction == "max":
            return _operations().reduce(tensor, reduction)
        if self.process_index not in speakers:
            tensor = _leaves(torch.zeros_like, tensor)
        total = _operations().reduce(tensor, "sum")
        return _leaves(lambda found: found / len(speakers), total) if reduction == "mean" else total

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along ``dim`` to the largest size that it has on any rank.

        Args:
            tensor: a tensor or a nest of them, with equally many dimensions on all ranks.
            dim: the dimension; tensors without it stay as they are.
            pad_index: value of the padding.
            pad_first: pad at the beginning.

        Raises:
            ConfigError: the numbers of dimensions differ over the ranks.
        """
        if not self.use_distributed:
            return tensor
        self._joined()
        self._check(tensor, "pad_across_processes", _dimensions, "Bring them to equally many dimensions.")
        return _operations().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that :meth:`check_trigger` tells all ranks about."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank called :meth:`set_trigger` since the last True; lowers the flag. Collective."""
        if self.use_distributed:
            self._joined()
        anyone = bool(distributed.agree(torch.tensor([int(self._triggered)]))[0])
        if anyone:
            self._triggered = False
        return anyone

    def _check(
        self,
        data: Any,
        operation: str,
        describe: Callable[[torch.Tensor], str],
        remedy: str,
        as_objects: bool | None = None,
    ) -> bool:
        """Compare what all ranks bring, in one small all-reduce; whether any of them wants objects to be sent.

        Raises:
            ConfigError: the descriptions of the tensors differ.
            TypeError: no objects are allowed (``as_objects`` is None) and ``data`` has something else than tensors.
        """
        objects = False if as_objects is None else as_objects or _has_objects(data)
        found: list[str] = []
        if not objects:
            _leaves(lambda tensor: found.append(describe(tensor)), data)
        digest = int.from_bytes(blake2b(repr(found).encode(), digest_size=7).digest(), "big")
        highest, lowest, anybody = distributed.agree(torch.tensor([digest, -digest, int(objects)]))
        if anybody:
            return True
        if highest != -lowest:
            everyone = distributed.gather_objects(", ".join(found) or "nothing")
            listing = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(everyone))
            raise ConfigError(f"accelerator.{operation}: the ranks bring tensors that do not fit. {listing}. {remedy}")
        return False


def _without_repeated(gathered: Any, objects: bool) -> Any:
    """Less the samples that a loader of accelerate repeated to fill the last batch."""
    from accelerate.state import GradientState

    loader = GradientState()
    if not loader.end_of_dataloader or loader.remainder <= 0:
        return gathered
    if objects:
        return gathered[: loader.remainder]
    return _leaves(lambda tensor: tensor[: loader.remainder], gathered)


def _operations() -> Any:
    from accelerate.utils import operations

    return operations


def _leaves(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """``function`` of every tensor in a nest of lists, tuples and dicts; TypeError for anything else in it."""
    return _operations().recursively_apply(function, data, error_on_other_type=True)


def _has_objects(data: Any) -> bool:
    try:
        _leaves(lambda tensor: tensor, data)
    except TypeError:
        return True
    return False


def _one_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.clone()[None]


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {_kind(tensor)}"


def _shape_of_row(tensor: torch.Tensor) -> str:
    return f"[:{''.join(f', {size}' for size in tensor.shape[1:])}] {_kind(tensor)}"


def _dimensions(tensor: torch.Tensor) -> str:
    return f"{tensor.dim()} dimensions {_kind(tensor)}"


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
