"""Set-up of this process: seeds, log levels, kernels, process group."""

from __future__ import annotations

import logging
import os

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.process_group import start_process_group
from ds_trainer.utils.accelerate_state import attach_accelerate
from ds_trainer.utils.failures import watch_peers
from ds_trainer.utils.logging import set_log_level
from ds_trainer.utils.seeds import set_seed


def configure_process(args: TrainingArguments) -> None:
    """Set seeds, the level of this package's loggers, TensorFloat-32 and deterministic kernels as asked.

    Relative paths become absolute: a script may change its working directory later.
    """
    for name in ("output_dir", "nvme_path"):
        if getattr(args, name) is not None:
            setattr(args, name, os.path.abspath(os.path.expanduser(getattr(args, name))))
    set_seed(args.seed)
    name = str(args.log_level if args.should_log else args.log_level_replica)
    level = args.get_process_log_level()
    set_log_level(level, name != "passive" and (args.should_log or level < logging.WARNING))
    if args.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = args.tf32
        torch.backends.cudnn.allow_tf32 = args.tf32
    if args.full_determinism:
        # Read by cuBLAS and NCCL when they start; torch refuses kernels that cannot be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def create_accelerator_state(args: TrainingArguments, mixed_precision: str) -> None:
    """Create accelerate's ``AcceleratorState``, as the constructor of transformers' Trainer does.

    For scripts and libraries that run unchanged, which may use it before the training. A state that the script has
    created is kept.

    Args:
        args: the training arguments.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``, to be seen in the state.
    """
    from accelerate import Accelerator
    from accelerate.state import is_initialized

    if not is_initialized():
        Accelerator(cpu=args.device_type == "cpu", mixed_precision=mixed_precision)


def join_ranks(args: TrainingArguments) -> None:
    """Start the process group, for our own collectives and for accelerate's. Collective at the first call."""
    device_type = args.device.type
    start_process_group(device_type, args.ddp_timeout_delta)
    attach_accelerate(device_type)  # for the functions of accelerate that scripts call
    watch_peers()
