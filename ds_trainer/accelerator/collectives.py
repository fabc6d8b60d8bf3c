"""Collectives over tensors and objects, in lists, tuples and dicts of any depth.

accelerate's operations do the work. Two things are added: shapes are compared first (gloo ends the process for unequal
shapes, NCCL hangs), and results gathered for metrics are exact, since evaluation here repeats no sample and ranks may
have different numbers of samples.

The ranks of a replica (tensor, context, sequence parallelism) have the same data, so only its first rank contributes,
and all ranks receive. While a batch is sharded along its sequences (inside ``compute_loss``), each rank of a sequence
group has different tokens: then all of them contribute, and of each tensor-parallel group one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from ds_trainer.accelerator.process_control import ProcessControl
from ds_trainer.data.batch_structure import Dummy
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed


class Collectives(ProcessControl):
    """Collectives of the accelerator. With one rank, nothing is sent and no process group is needed."""

    _dummy = _in_batch = False
    _triggered = False

    @property
    def _replica_leaders(self) -> list[int]:
        """The ranks that contribute now: those with different data."""
        from ds_trainer.parallel.attention import active_sharding

        if active_sharding() is not None:
            return self._layout.groups(("dp", "cp", "sp"))[0]
        return self._layout.replica_leaders

    @property
    def _counts(self) -> bool:
        """Whether this rank's results for the current batch count."""
        return not self._dummy and self.process_index in self._replica_leaders

    @contextmanager
    def batch(self, inputs: Any) -> Iterator[None]:
        """The current batch, set by the loop: results computed from a dummy do not count."""
        self._dummy, self._in_batch = isinstance(inputs, Dummy), True
        try:
            yield
        finally:
            self._dummy = self._in_batch = False

    def gather(self, tensor: Any) -> Any:
        """Tensors of all replicas, concatenated along the first dimension in their order; 0-d ones are one row each.

        While the loop runs a batch, ranks may have different numbers of rows, because the last batches of an evaluation
        are those of one process; rows computed from a dummy are left out.

        Args:
            tensor: a tensor or nested tensors, with equal shapes on all ranks.

        Raises:
            ConfigError: shapes or dtypes differ between ranks; the message lists those of all ranks.
        """
        if not self.use_distributed:
            return _leaves(_one_dimensional, tensor)
        self.join_group()
        dimensions: list[int] = []
        _leaves(lambda leaf: dimensions.append(leaf.dim()), tensor)
        if self._in_batch and all(dimensions):
            self._check(tensor, "gather", _shape_of_row, "Pad the other dimensions with pad_across_processes first.")
            return self._gather_rows(tensor)
        self._check(tensor, "gather", _shape, "Use gather_for_metrics, or pad_across_processes first.")
        replica_leaders = self._replica_leaders
        everything = _operations().gather(tensor)
        ranks = self._layout.world_size
        if len(replica_leaders) == ranks:
            return everything
        return _leaves(
            lambda found: torch.cat([found.chunk(ranks)[rank] for rank in replica_leaders]),
            everything,
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The results for the current batches, without repeated samples, padding and dummies.

        Args:
            input_data: a tensor or nested tensors, whose first dimensions may differ between ranks; or a list of
                objects.
            use_gather_object: send tensors as objects; shapes may then differ.

        Returns:
            Tensors concatenated in the order of the replicas, or the concatenated list. A loader of :meth:`prepare`
            repeats samples to fill the last batch; these are removed.

        Raises:
            ConfigError: dtypes, or dimensions other than the first, differ between ranks.
        """
        if not self.use_distributed:
            return input_data if use_gather_object or _has_objects(input_data) else self.gather(input_data)
        self.join_group()
        remedy = "Pad those dimensions with pad_across_processes, or pass use_gather_object=True."
        objects = self._check(input_data, "gather_for_metrics", _shape_of_row, remedy, use_gather_object)
        if objects:
            everything = _operations().gather_object(input_data if self._counts else [])
        else:
            everything = self._gather_rows(input_data)
        return _without_repeated(everything, objects)

    def _gather_rows(self, data: Any) -> Any:
        """Concatenate along the first dimension; ranks may have different numbers of rows."""
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
            tensor: a tensor or nested tensors, with equal shapes on all ranks.
            reduction: the operation; ``"none"`` is a sum too, as in accelerate.
            scale: 1; accelerate applies other values on XLA devices only.

        Raises:
            ConfigError: another reduction or scale, or shapes that differ between ranks.
        """
        if reduction not in ("sum", "mean", "max", "none"):
            raise ConfigError(f"reduce: reduction={reduction!r} must be 'sum', 'mean', 'max' or 'none'.")
        if scale != 1.0:
            raise ConfigError(f"reduce: scale={scale} has an effect on XLA only. Multiply the result yourself.")
        if not self.use_distributed:
            return _leaves(torch.clone, tensor)
        self.join_group()
        self._check(tensor, "reduce", _shape, "Make them equal with pad_across_processes.")
        replica_leaders = self._replica_leaders
        if reduction == "max":  # accelerate before 1.14 knows no maximum, and adds without a word
            return _leaves(_largest, tensor)
        if len(replica_leaders) == self._layout.world_size:
            return _operations().reduce(tensor, reduction)
        if self.process_index not in replica_leaders:
            tensor = _leaves(torch.zeros_like, tensor)
        total = _operations().reduce(tensor, "sum")
        return _leaves(lambda part: part / len(replica_leaders), total) if reduction == "mean" else total

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along ``dim`` to the largest size that it has on any rank.

        Args:
            tensor: a tensor or nested tensors, with equal numbers of dimensions on all ranks.
            dim: the dimension; tensors without it are returned unchanged.
            pad_index: value of the padding.
            pad_first: pad at the beginning.

        Raises:
            ConfigError: the numbers of dimensions differ between ranks.
        """
        if not self.use_distributed:
            return tensor
        self.join_group()
        self._check(tensor, "pad_across_processes", _dimensions, "Give them equal numbers of dimensions.")
        return _operations().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Set a flag that :meth:`check_trigger` reads on all ranks."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank called :meth:`set_trigger` since the last True; resets the flag. Collective."""
        if self.use_distributed:
            self.join_group()
        triggered = bool(distributed.agree(torch.tensor([int(self._triggered)]))[0])
        if triggered:
            self._triggered = False
        return triggered

    def _check(
        self,
        data: Any,
        operation: str,
        describe: Callable[[torch.Tensor], str],
        remedy: str,
        as_objects: bool | None = None,
    ) -> bool:
        """Compare the data of all ranks with one small all-reduce. Returns whether any rank needs to send objects.

        Raises:
            ConfigError: the descriptions of the tensors differ.
            TypeError: objects are not allowed (``as_objects`` is None) and ``data`` contains anything but tensors.
        """
        objects = False if as_objects is None else as_objects or _has_objects(data)
        problems: list[str] = []
        if not objects:
            _leaves(lambda tensor: problems.append(describe(tensor)), data)
        digest = int.from_bytes(blake2b(repr(problems).encode(), digest_size=7).digest(), "big")
        highest, lowest, anybody = distributed.agree(torch.tensor([digest, -digest, int(objects)]))
        if anybody:
            return True
        if highest != -lowest:
            descriptions = distributed.gather_objects(", ".join(problems) or "nothing")
            first = {what: rank for rank, what in reversed(list(enumerate(descriptions)))}  # that has each
            problems = [f"rank {rank}: {what}" for what, rank in reversed(first.items())]
            differing = listed(problems, 8, "; ")
            raise ConfigError(f"accelerator.{operation}: the tensors differ between ranks. {differing}. {remedy}")
        return False


def _without_repeated(gathered: Any, objects: bool) -> Any:
    """``gathered`` without the samples that a loader of accelerate repeated to fill the last batch."""
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
    """Apply ``function`` to every tensor in nested lists, tuples and dicts; TypeError for other leaves."""
    return _operations().recursively_apply(function, data, error_on_other_type=True)


def _has_objects(data: Any) -> bool:
    try:
        _leaves(lambda tensor: tensor, data)
    except TypeError:
        return True
    return False


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    largest = tensor.clone()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


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
