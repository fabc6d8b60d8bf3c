"""Properties of this process: its rank, its device, whether it logs and saves, and ``main_process_first``.

Ranks come from the environment (:mod:`ds_trainer.utils.ranks`), so that they are known before a process group exists.
Only the properties that need torch import it.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.enums import NamedValue
from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.utils.devices import device_of, device_type_of_job
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_user_file
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.ranks import RankInfo, for_user_code, resolve_ranks

if TYPE_CHECKING:
    import torch


logger = get_logger(__name__)

# "detail" is a more verbose "debug"; for Python's logging they are the same.
_LEVELS = {"detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class ParallelMode(NamedValue):
    """How processes and devices relate. Here every GPU has its own process, so only two of these occur."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


class ProcessInfo:
    """Properties of :class:`TrainingArguments` that follow from the environment and a few of its fields.

    Every property that depends on a rank raises :class:`ConfigError` if the launcher's variables contradict each other.
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
        """Rank of this process on its node."""
        return resolve_ranks(os.environ).local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return for_user_code(resolve_ranks(os.environ).world_size)

    @property
    def parallel_mode(self) -> ParallelMode:
        """``DISTRIBUTED`` with several processes, else ``NOT_PARALLEL``."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_log(self) -> bool:
        """Whether this process logs: the main process of each node, or of node 0 only without ``log_on_each_node``."""
        return _is_main(resolve_ranks(os.environ), local=self.log_on_each_node)

    @property
    def should_save(self) -> bool:
        """Whether this process writes files that exist once: the main process, or with ``save_on_each_node`` the main
        process of each node.
        """
        return _is_main(resolve_ranks(os.environ), local=self.save_on_each_node)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """What scripts ask about DeepSpeed before there is a Trainer: ``zero_stage``."""
        return DeepSpeedPlugin(self)

    @property
    def distributed_state(self) -> DistributedState:
        """What libraries ask about the processes before there is a Trainer, as of accelerate's ``PartialState``."""
        return DistributedState(self)

    # -- devices --------------------------------------------------------------------------------------------------

    bf16: bool
    fp16: bool

    @property
    def mixed_precision(self) -> str:
        """``"bf16"``, ``"fp16"`` or ``"no"``, as ``bf16`` and ``fp16`` say."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    @property
    def device_type(self) -> str:
        """``"cuda"`` if torch sees a GPU and ``use_cpu`` is off, else ``"cpu"``. Imports torch."""
        return "cpu" if self.use_cpu else device_type_of_job()

    @property
    def device(self) -> torch.device:
        """The device of this process: ``cpu``, or its GPU (:mod:`ds_trainer.utils.devices`). Imports torch.

        Raises:
            ConfigError: this process sees GPUs, but fewer than the ranks on its node.
        """
        return device_of(resolve_ranks(os.environ), self.device_type)

    @property
    def n_gpu(self) -> int:
        """Number of GPUs of this process: 1, or 0 on the CPU. Imports torch."""
        return 1 if self.device_type == "cuda" else 0

    @property
    def place_model_on_device(self) -> bool:
        """False: the engine moves the model to the device. Subclasses may override it."""
        return False

    # -- derived values -------------------------------------------------------------------------------------------

    @property
    def train_batch_size(self) -> int:
        """Samples in one forward pass of this process, which has at most one device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in one forward pass of this process in evaluation."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """``ddp_timeout`` (seconds) as a timedelta: how long a collective may take before the job ends."""
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Level of this package's loggers on this process, as a number of Python's :mod:`logging`.

        ``log_level`` if :attr:`should_log`, else ``log_level_replica``. ``passive`` returns the current level.
        """
        name = str(self.log_level if self.should_log else self.log_level_replica)
        return get_logger().getEffectiveLevel() if name == "passive" else _LEVELS[name]

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Number of linear warmup steps in ``num_training_steps``."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # -- main process first ---------------------------------------------------------------------------------------

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the main process while all other processes wait, then on the others at the same time.

        Use it for work whose result the others then find in a cache, such as ``datasets``' ``map``. All ranks must
        enter it. It starts the process group if there is none. If the block raises on the main process, the others
        are released nevertheless. With one process it does nothing.

        Args:
            local: the main process of every node goes first. Otherwise only that of node 0, which is right for a
                shared file system.
            desc: description of the work for the debug log.

        Raises:
            ConfigError: the size of the process group differs from the environment's.
        """
        info = resolve_ranks(os.environ)
        group_size = _existing_group_size()
        if group_size not in (None, info.world_size):
            raise ConfigError(
                f"The process group has {group_size} ranks, but the environment says {info.world_size} "
                f"({info.launcher}). Start the processes with `deepspeed`, `torchrun` or `srun`, or set RANK, "
                "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each of them."
            )
        if info.world_size == 1:
            yield
            return
        if group_size is None:
            # Start the process group that the engine uses later.
            from ds_trainer.utils.torch_group import start_torch_group

            start_torch_group(info, self.device_type, self.ddp_timeout_delta)
            atexit.register(_leave_group)
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
    """Number of ranks of the process group; None without one. Without torch imported there is none."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # else the engine has destroyed it
        dist.destroy_process_group()


class DeepSpeedPlugin:
    """Counterpart of accelerate's ``DeepSpeedPlugin`` before the configuration is compiled.

    The compiled one is ``trainer.accelerator.state.deepspeed_plugin``.

    Args:
        args: the training arguments; read at each access.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3: ``zero_stage``, else that of the DeepSpeed file, else the default.

        Raises:
            ConfigError: the DeepSpeed file cannot be read.
        """
        args = self._args
        if args.zero_stage is not None:
            return int(args.zero_stage)
        given = args.deepspeed
        if isinstance(given, str | os.PathLike):
            text = os.fspath(given)
            if not text.lstrip().startswith("{"):
                text = read_user_file(text, f"deepspeed={text!r}", "JSON file")
            root, _ = read_yaml(text, "deepspeed")  # JSON is YAML too
            given = root.plain()
        section = given.get("zero_optimization", {}) if isinstance(given, Mapping) else {}
        stage = section.get("stage", "auto") if isinstance(section, Mapping) else "auto"
        return int(args.world_size > 1 or bool(args.fp16)) if stage == "auto" else int(stage)


class ProcessIdentity:
    """The names that accelerate's states have for the identity of a process.

    Args:
        args: the training arguments; read at each access.
    """

    def __init__(self, args: ProcessInfo) -> None:
        self._args = args

    @property
    def process_index(self) -> int:
        """Global rank."""
        return self._args.process_index

    @property
    def local_process_index(self) -> int:
        """Rank on this machine."""
        return self._args.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0


class DistributedState(ProcessIdentity):
    """Counterpart of accelerate's ``PartialState``, known before a process group exists.

    Its type is DEEPSPEED, also for one rank: a model that a library loads by name gets no ``device_map``, since the
    engine places it. Methods (``wait_for_everyone``, ``split_between_processes`` ...) are those of accelerate's state.
    """

    @property
    def distributed_type(self) -> Any:
        """accelerate's ``DistributedType.DEEPSPEED``."""
        from accelerate.utils import DistributedType

        return DistributedType.DEEPSPEED

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._args.device

    @property
    def num_processes(self) -> int:
        """Number of ranks of the job."""
        return for_user_code(resolve_ranks(os.environ).world_size)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return resolve_ranks(os.environ).world_size > 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle, before there are arguments
            raise AttributeError(name)
        from ds_trainer.utils.accelerate_state import matching_state

        return getattr(matching_state(self._args.device_type), name)

    def __repr__(self) -> str:
        return f"DistributedState(rank {self.process_index} of {self.num_processes}, DeepSpeed)"
