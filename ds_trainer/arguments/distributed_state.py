"""What scripts and libraries ask of ``args.distributed_state``: the processes of the job and their kind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.ranks import resolve_ranks
from ds_trainer.utils.reported_ranks import for_user_code

if TYPE_CHECKING:
    import torch

    from ds_trainer.arguments.process_info import ProcessInfo


class DistributedState:
    """Counterpart of accelerate's ``PartialState``, known before a process group exists.

    Its type is DEEPSPEED, also for one rank: a model that a library loads by name gets no ``device_map``, since the
    engine places it. Methods (``wait_for_everyone``, ``split_between_processes`` ...) are those of accelerate's state.

    Args:
        arguments: the arguments of the run.
    """

    def __init__(self, arguments: ProcessInfo) -> None:
        self._arguments = arguments

    @property
    def distributed_type(self) -> Any:
        """accelerate's ``DistributedType.DEEPSPEED``."""
        from accelerate.utils import DistributedType

        return DistributedType.DEEPSPEED

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._arguments.device

    @property
    def num_processes(self) -> int:
        """Number of ranks of the job."""
        return for_user_code(resolve_ranks(os.environ).world_size)

    @property
    def process_index(self) -> int:
        """Global rank."""
        return self._arguments.process_index

    @property
    def local_process_index(self) -> int:
        """Rank on this machine."""
        return self._arguments.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return resolve_ranks(os.environ).world_size > 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle, before there are arguments
            raise AttributeError(name)
        from ds_trainer.utils.accelerate_state import matching_state

        return getattr(matching_state(self._arguments.device_type), name)

    def __repr__(self) -> str:
        return f"DistributedState(rank {self.process_index} of {self.num_processes}, DeepSpeed)"
