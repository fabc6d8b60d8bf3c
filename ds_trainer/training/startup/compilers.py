"""Tries the compilers that a training will need, before it begins: on every rank, with one decision for all.

Kernels are compiled at their first call, deep in the first step, where one rank that fails lets all others wait. What
this package or DeepSpeed compiles unasked has an equal without compiler, which all ranks then use. What the user asked
for is refused.
"""

from __future__ import annotations

import socket
from collections import Counter

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.data.columns import base_model
from ds_trainer.engine.muon_compilation import run_muon_uncompiled
from ds_trainer.parallel.kernel_trial import kernel_problem, set_kernel_problem, suits
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.linear_cross_entropy import tile_sizes
from ds_trainer.training.model.chunked_loss.linear_head import head_problem, output_embedding
from ds_trainer.training.model.preparation import compiles_head
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_REMEDY = "Triton needs a C compiler and Python's headers on every machine, inductor on CPUs a C++ compiler"


def check_compilers(args: TrainingArguments, model: nn.Module, config: CompiledConfig, layout: ParallelLayout) -> None:
    """Compile something with each compiler that this training needs, and agree on what works. Collective.

    Raises:
        ConfigError: on all ranks: a compiler that the arguments ask for does not work on one of them.
    """
    device = args.device
    uses_tiles = suits(device) and _uses_tiles(args, model, config)
    liger = bool(args.use_liger_kernel)
    # What the user asked for that inductor compiles, and how to do without.
    by_inductor = {}
    if args.torch_compile and args.torch_compile_backend == "inductor":
        by_inductor["torch_compile=True"] = "set it to False"
    if config.uses_deepspeed_compiler:
        by_inductor["the DeepSpeed configuration's 'compile'"] = "remove it"
    if getattr(getattr(base_model(model), "config", None), "_attn_implementation", None) == "flex_attention":
        by_inductor["attn_implementation='flex_attention'"] = "load the model with 'sdpa'"
    muon = config.get("optimizer.type") == "Muon"
    if not (uses_tiles or liger or by_inductor or muon):
        return
    texts: list[str | None] = [None, None]
    if uses_tiles or liger:
        texts[0] = _kernels(args, model, config, layout, device)
    if by_inductor or muon:
        texts[1] = inductor_problem(device)
    failed = distributed.agree(torch.tensor([int(one is not None) for one in texts]))
    if uses_tiles:
        set_kernel_problem(device, "not on every rank" if failed[0] else None)
    if not any(failed):
        return
    reports = distributed.gather_objects((socket.gethostname(), texts))
    kernels, inductor = (_where([(host, one[place]) for host, one in reports]) for place in (0, 1))
    refused = []
    if failed[1]:
        for name, way in by_inductor.items():
            refused.append(f"{name}: inductor cannot compile {inductor}. {_REMEDY}: install them, or {way}.")
    if failed[0] and liger:
        refused.append(f"use_liger_kernel=True: Triton cannot compile {kernels}. {_REMEDY}, or set it to False.")
    if refused:
        raise ConfigError(refused)
    warnings = []
    if failed[0]:
        warnings.append(f"The loss in tiles is computed without Triton's kernels: Triton cannot compile {kernels}.")
    if failed[1]:
        run_muon_uncompiled()
        warnings.append(f"Muon's kernels run uncompiled: inductor cannot compile {inductor}.")
    if distributed.rank() == 0:
        for warning in warnings:
            logger.warning("%s All ranks use torch's operators: the same numbers, slower. %s.", warning, _REMEDY)


def inductor_problem(device: torch.device) -> str | None:
    """Compile a small function; why that fails, or None."""

    def work(x: torch.Tensor) -> torch.Tensor:
        return (2 * x + 1).sum()

    try:
        torch.compile(work, backend="inductor")(torch.ones(64, device=device))
    except Exception as error:  # of torch, Triton, a compiler, a disk: the caller says it
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
    return None


def _kernels(
    args: TrainingArguments, model: nn.Module, config: CompiledConfig, layout: ParallelLayout, device: torch.device
) -> str | None:
    head = output_embedding(model)
    rows = int(getattr(head, "out_features", 0)) // layout.tp
    _, width = tile_sizes(args.loss_chunk_tokens or None, device)
    widths = {min(rows, width), rows % width} - {0} or {width}
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes[config.precision.compute]
    return kernel_problem(device, sorted(widths), dtype, bool(args.label_smoothing_factor))


def _uses_tiles(args: TrainingArguments, model: nn.Module, config: CompiledConfig) -> bool:
    asked = args.loss_chunk_tokens != 0 or bool(args.z_loss_factor)
    return asked and not compiles_head(args, config) and head_problem(output_embedding(model)) is None


def _where(problems: list[tuple[str, str | None]]) -> str:
    """``on rank 1 (node2): no compiler; nor on 3 other ranks``."""
    failed = [(rank, host, text) for rank, (host, text) in enumerate(problems) if text is not None]
    if not failed:
        return ""
    rank, host, text = failed[0]
    more = len(failed) - 1
    hosts = Counter(host for _, host, _ in failed)
    others = f"; nor on {more} other rank{'s' if more > 1 else ''}, of {len(hosts)} hosts in all" if more else ""
    return f"on rank {rank} ({host}): {text.rstrip('.')}{others}"
