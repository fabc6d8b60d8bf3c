"""Where this process stands: its rank, its device, whether it speaks and writes, and "main process first".

Ranks come from the environment (:mod:`ds_trainer.utils.ranks`), so that all this is known before a process group
exists and without importing torch, wherever the answer does not need it.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from ds_trainer.arguments.enums import NamedValue
from ds_trainer.utils.devices import device_of
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.ranks import RankInfo, resolve_ranks

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

# "detail" is "debug" with more of it; both are the same to Python's logging.
_LEVELS = {"detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class ParallelMode(NamedValue):
    """How processes and devices relate. Here a GPU always has a process of its own: only two of these occur."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


class Places:
    """Properties of :class:`TrainingArguments` that follow from the environment and a few of its fields.

    Everything that asks for a rank raises :class:`ConfigError` when the launcher's variables contradict each other.
    """

    if TYPE_CHECKING:
        per_device_train_batch_size: int
        per_device_eval_batch_size: int
        warmup_steps: float
        log_level: str
        log_level_replica: str
        log_on_each_node: bool
        save_on_each_node: bool
        use_cpu: bool
        ddp_timeout: int

    # -- ranks ----------------------------------------------------------------------------------------------------

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return resolve_ranks(os.environ).rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return resolve_ranks(os.environ).local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return resolve_ranks(os.environ).world_size

    @property
    def parallel_mode(self) -> ParallelMode:
        """``DISTRIBUTED`` in a world of several processes, else ``NOT_PARALLEL``."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_log(self) -> bool:
        """Whether this process speaks: the main one of its machine, or of all if not ``log_on_each_node``."""
        return _is_main(resolve_ranks(os.environ), local=self.log_on_each_node)

    @property
    def should_save(self) -> bool:
        """Whether this process writes files that exist once: the main one, or with ``save_on_each_node`` that of
        its machine."""
        return _is_main(resolve_ranks(os.environ), local=self.save_on_each_node)

    # -- devices --------------------------------------------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """``"cuda"`` when a GPU is to be used, else ``"cpu"``. Imports torch."""
        import torch

        return "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"

    @property
    def device(self) -> torch.device:
        """The device of this process: ``cpu``, or its GPU (:mod:`ds_trainer.utils.devices`). Imports torch.

        Raises:
            ConfigError: this process sees GPUs, but fewer than there are ranks on its machine.
        """
        return device_of(resolve_ranks(os.environ), self.device_type)

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: 1, or 0 on the CPU. Imports torch."""
        return 1 if self.device_type == "cuda" else 0

    @property
    def place_model_on_device(self) -> bool:
        """False: the engine places the model. For subclasses to override."""
        return False

    # -- derived values -------------------------------------------------------------------------------------------

    @property
    def train_batch_size(self) -> int:
        """Samples of this process in one forward pass: those of a device, as a process has no more than one."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of this process in one forward pass of evaluation."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """``ddp_timeout`` (seconds) as a timedelta: how long a collective may take before the job is ended."""
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Level, as Python's :mod:`logging` counts them, for this package's loggers on this process.

        ``log_level`` where :attr:`should_log`, else ``log_level_replica``; ``passive`` gives the level that is set.
        """
        name = str(self.log_level if self.should_log else self.log_level_replica)
        return get_logger().getEffectiveLevel() if name == "passive" else _LEVELS[name]

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of linear warm-up out of ``num_training_steps``."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # -- together -------------------------------------------------------------------------------------------------

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the main process while all others wait; then on the others, at the same time.

        For work whose result the others then find in a cache, such as ``datasets``' ``map``. All ranks must enter it.
        When there is no process group yet, this starts it. If the block raises on the main process, the others are
        released nevertheless. In a world of one it does nothing.

        Args:
            local: the main process of every machine goes first; else only that of the first machine, which is right
                for a file system that the machines share.
            desc: what is done, for the debug log.

        Raises:
            ConfigError: the process group's size is not that of the environment.
        """
        info = resolve_ranks(os.environ)
        group_size = _existing_group_size()
        if group_size not in (None, info.world_size):
            raise ConfigError(
                f"There is a process group of {group_size} ranks, but the environment says {info.world_size} "
                f"({info.launcher}). Start the processes with `deepspeed`, `torchrun` or `srun`, or set RANK, "
                "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each of them."
            )
        if info.world_size == 1:
            yield
            return
        if group_size is None:
            _start_group(info, self.device_type, self.ddp_timeout_delta)
        from ds_trainer.utils.distributed import barrier

        is_main = _is_main(info, local=local)
        try:
            if not is_main:
                logger.debug("rank %d waits for the main process: %s", info.rank, desc)
                barrier()
            yield
        finally:
            if is_main:
                logger.debug("rank %d releases the others: %s", info.rank, desc)
                barrier()


def _is_main(info: RankInfo, *, local: bool) -> bool:
    return (info.local_rank if local else info.rank) == 0


def _existing_group_size() -> int | None:
    """Number of ranks of the process group; None without one. Does not import torch: unimported, it has none."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _start_group(info: RankInfo, device_type: str, timeout: timedelta) -> None:
    """Join the process group that the engine would start later; it takes over the one it finds."""
    from ds_trainer.utils.torch_group import start_torch_group

    start_torch_group(info, device_type, timeout)
    atexit.register(_leave_group)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # else the engine has ended it
        dist.destroy_process_group()
