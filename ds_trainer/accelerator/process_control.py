"""The identity of this process, and methods that run on some processes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ds_trainer.arguments.process_info import ProcessIdentity
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.accelerate_state import matching_state
from ds_trainer.utils.ranks import for_user_code


class _Replica(NamedTuple):
    """The attributes that accelerate's ``split_between_processes`` reads, with replicas instead of processes."""

    num_processes: int
    process_index: int
    device: torch.device


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Replaces a decorated function on the other processes."""


class ProcessControl(ProcessIdentity):
    """Identity of this process, and control of which processes run what. The process group is started by the first
    method that waits for other ranks.
    """

    _args: TrainingArguments

    def __init__(self, layout: ParallelLayout, args: TrainingArguments, join_ranks: Callable[[], None]) -> None:
        super().__init__(args)
        self._layout = layout
        self._join_ranks = join_ranks
        self._device = args.device

    def join_group(self) -> Any:
        """accelerate's state, after starting the process group; only with several ranks."""
        if not distributed.is_initialized():
            self._join_ranks()
        return matching_state(self._args.device_type)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def num_processes(self) -> int:
        """Number of ranks of the job; ``trainer.layout.dp`` is the number of replicas, which see different samples."""
        return for_user_code(self._layout.world_size)

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the job."""
        return self.process_index == self._layout.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._layout.world_size > 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first rank of every machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks. Collective."""
        if self.use_distributed:
            self.join_group()
            distributed.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A context that rank 0 leaves before the others enter it. Collective."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """A context that the first rank of every machine leaves before the others enter it. Collective."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, here: bool) -> Iterator[None]:
        if not here:
            self.wait_for_everyone()
        try:
            yield
        finally:  # the others wait for this rank, even if it failed
            if here:
                self.wait_for_everyone()

    def on_main_process(self, function: Any = None) -> Any:
        """Decorator: the function runs on rank 0 and returns None elsewhere."""
        return self.on_process(function, 0)

    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorator: the function runs on the first rank of every machine and returns None elsewhere."""
        return self.on_local_process(function, 0)

    def on_last_process(self, function: Any) -> Any:
        """Decorator: the function runs on the last rank and returns None elsewhere."""
        return self.on_process(function, self._layout.world_size - 1)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorator: the function runs on the rank ``process_index`` and returns None elsewhere."""
        return _only(function, self.process_index == process_index)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorator: the function runs on rank ``local_process_index`` of every machine and returns None elsewhere."""
        return _only(function, self.local_process_index == local_process_index)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This replica's consecutive part of a list, tuple, tensor, dict of them, or dataset; equal on its ranks.

        Args:
            inputs: all elements, equal on all ranks.
            apply_padding: repeat the last element so that all replicas get equally many.
        """
        if not self.use_distributed:
            yield inputs
            return
        # accelerate writes the parts into the dict it receives
        whole = dict(inputs) if isinstance(inputs, dict) else inputs
        state = self.join_group()
        replica = _Replica(self._layout.dp, self._layout.coordinates(self.process_index).dp, self.device)
        with type(state).split_between_processes(replica, whole, apply_padding=apply_padding) as part:
            yield part


def _only(function: Any, here: bool) -> Any:
    if function is None:  # used with arguments: @on_process(process_index=1)
        return lambda decorated: _only(decorated, here)
    return function if here else _nothing
