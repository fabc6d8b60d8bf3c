"""The gradient self-test with a run's settings, once per installation: :mod:`ds_trainer.engine.self_test`."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.enums import When
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.engine.weights import HALF_TYPES
from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.monitor.doctor.library_changes import warn_of_changes
from ds_trainer.monitor.doctor.versions import versions
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import user_cache, write_json
from ds_trainer.utils.logging import CHECK, get_logger

if TYPE_CHECKING:
    from ds_trainer.engine.self_test import GradientReport

logger = get_logger(__name__)

ENVIRONMENT = "DS_TRAINER_SELF_TEST"
"""Environment variable, ``always`` or ``never``: what ``self_test=auto`` means."""

# The values of the run's configuration that decide how gradients are reduced.
_DECISIVE = (
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "data_types.grad_accum_dtype",
    "communication_data_type",
    "torch_autocast.lower_precision_safe_modules",
    "prescale_gradients",
    "gradient_predivide_factor",
)
REMEDY = (
    "Do not train with it: install another version of DeepSpeed (0.17.6 to 0.19.3 are known to be wrong with ZeRO-2), "
    "choose another zero_stage, or report it."
)


def self_test_config(args: TrainingArguments, compiled: CompiledConfig, layout: ParallelLayout) -> CompiledConfig:
    """The configuration of the self-test: the run's ZeRO stage, precision and gradient reduction, for a tiny model.

    Offload and compression are left out, because they round.
    """
    from ds_trainer.engine.self_test import ACCUMULATION, MICRO_BATCH, PARTITION, WIDTH

    chosen: dict[str, Any] = {"zero_allow_untested_optimizer": True, **compiled.select(_DECISIVE)}  # plain SGD
    if layout.tp > 1:
        chosen["tensor_parallel"] = {"partition_config": PARTITION}
    stage = compiled.zero_stage
    small = {"reduce_bucket_size": 2 * WIDTH * WIDTH}  # elements: a layer and a half
    if stage == 3:
        small |= {"stage3_prefetch_bucket_size": WIDTH * WIDTH, "stage3_param_persistence_threshold": 2 * WIDTH}
    else:
        small |= {"allgather_bucket_size": 2 * WIDTH * WIDTH}
    if stage > 0:
        chosen["zero_optimization"] = {**chosen.get("zero_optimization", {}), **small}
    if args.fp16:
        chosen["fp16"] = {"loss_scale": 128}  # dynamic loss scaling skips the first steps
    test_args = TrainingArguments(
        "self_test",
        zero_stage=stage,
        tensor_parallel_size=layout.tp,
        expert_parallel_size=layout.ep,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=0.0,
        deepspeed=chosen,
        use_cpu=args.use_cpu,
        bf16=args.bf16,
        fp16=args.fp16,
        torch_autocast=args.torch_autocast,
    )
    return compile_config(test_args, layout, device=args.device_type, client_optimizer="the self-test")


def run_self_test(args: TrainingArguments, compiled: CompiledConfig, layout: ParallelLayout) -> GradientReport:
    """Test the gradients of a run with ``args`` and its ``compiled`` configuration. Collective."""
    from ds_trainer.engine.self_test import check_gradient

    layout = _tested_layout(layout)
    return check_gradient(self_test_config(args, compiled, layout), layout, args.device)


def finding_of(report: GradientReport, seconds: float) -> Finding:
    """The report as a finding."""
    name = f"gradient, {report.title}"
    ranks = f"{report.ranks} rank{'s' if report.ranks > 1 else ''}"
    if report.good:
        error = f"error {report.error:.1e}, tolerance {report.tolerance:g}"
        return Finding(Level.OK, name, f"equal to plain PyTorch on {ranks} ({error}; {seconds:.1f} s)")
    message = f"wrong on {ranks}: " + "; ".join(report.wrong[:3])
    if len(report.wrong) > 3:
        message += f"; and {len(report.wrong) - 3} more"
    return Finding(Level.FAIL, name, message, REMEDY)


# -- once per installation -------------------------------------------------------------------------------------------


def stamp_directory(environment: Mapping[str, str] | None = None) -> Path:
    """The directory that records passed tests: ``$XDG_CACHE_HOME/ds_trainer/self_test``."""
    return user_cache(environment) / "self_test"


def stamp_name(config: CompiledConfig, device: torch.device, experts: int = 1) -> str:
    """File name of the record: equal for equal installation, device, ZeRO stage, precision and gradient reduction."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    several = min(distributed.world_size(), 2)
    divided = ["experts"] if experts > 1 else []
    key = json.dumps([versions(), name, several, *divided, config.to_dict()], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:32] + ".json"


def mode_of(args: TrainingArguments) -> When:
    """``self_test``; the environment variable :data:`ENVIRONMENT` says what ``auto`` means.

    Raises:
        ConfigError: the variable has an unknown value.
    """
    requested = When(str(args.self_test))
    default = os.environ.get(ENVIRONMENT, "auto")
    if default not in [mode.value for mode in When]:
        raise ConfigError(f"The environment variable {ENVIRONMENT}={default!r} must be auto, always or never.")
    return When(default) if requested == When.AUTO else requested


def self_test_once(args: TrainingArguments, compiled: CompiledConfig, layout: ParallelLayout) -> GradientReport | None:
    """Run the self-test if ``args`` ask for it and there is no record that it passed. Collective.

    Returns:
        The report; None if nothing was run.

    Raises:
        ConfigError: the gradient is wrong.
    """
    mode = mode_of(args)
    changed = args.process_index == 0 and warn_of_changes(stamp_directory().with_name("libraries"), mode.value)
    layout = _tested_layout(layout)
    config = None if mode == When.NEVER else self_test_config(args, compiled, layout)
    wanted = config is not None and (
        mode == When.ALWAYS or changed or not _stamp(config, args.device, layout.ep).is_file()
    )
    if not distributed.agree(torch.tensor([int(wanted)]))[0]:
        return None
    from ds_trainer.engine.self_test import check_gradient

    config = config or self_test_config(args, compiled, layout)
    began = time.monotonic()
    dtype = HALF_TYPES.get(config.precision.compute, torch.float32)
    same = config.zero_stage < 3
    if not same:
        from ds_trainer.engine.zero3.coalesced_collectives import same_as_deepspeed

        same = same_as_deepspeed(args.device, dtype)
    if not same and args.process_index == 0:
        logger.warning(
            "The gathers and reductions of ZeRO-3 that ds_trainer has in place of DeepSpeed's "
            "(ds_trainer/engine/zero3/coalesced_collectives.py) have other results on this installation. This run uses "
            "DeepSpeed's, with more time of the host in each micro-batch. Please report it with the output of "
            "ds-trainer doctor."
        )
    report = check_gradient(config, layout, args.device)
    message = finding_of(report, time.monotonic() - began).message
    if not report.good:
        raise ConfigError(
            f"The engine's gradient is wrong on this installation ({report.title}): {message}. {REMEDY} To train "
            f"anyway, set self_test=never (now {args.self_test}, {args.where('self_test')})."
        )
    if args.process_index == 0:
        logger.info("Self-test: the gradient (%s) is %s.", report.title, message, extra={CHECK: "self-test"})
    if same and args.local_process_index == 0:  # otherwise the next start compares again
        stamp = _stamp(config, args.device, layout.ep)
        record = {"tested": report.title, "ranks": report.ranks, "host": socket.gethostname(), "versions": versions()}
        try:
            write_json(stamp, record)
        except OSError as error:
            logger.warning(
                "The self-test cannot be recorded in %s (%s): the next start repeats it.", stamp.parent, error
            )
    return report


def _tested_layout(layout: ParallelLayout) -> ParallelLayout:
    """Without sequence sharding if there is tensor parallelism; without that if the tiny model has too few features."""
    if layout.tp == 1:
        return layout
    from ds_trainer.engine.self_test import WIDE

    return ParallelLayout(layout.world_size, tp=layout.tp if WIDE % layout.tp == 0 else 1, ep=layout.ep)


def _stamp(config: CompiledConfig, device: torch.device, experts: int) -> Path:
    return stamp_directory() / stamp_name(config, device, experts)
