"""``parallelism="auto"``: the fastest way to run that fits, with the global batch of the arguments.

The planner (:mod:`ds_trainer.planner.search`) evaluates all ways to run on the devices of the job. The fastest one that
fits and that the Trainer can run is taken. Nothing depends on the rank, so all ranks choose the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from ds_trainer.arguments.accelerator_config import accelerator_config
from ds_trainer.arguments.overrides import PLANNED
from ds_trainer.arguments.parallelism_config import PARALLEL_SIZES
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.calibration import read_calibration
from ds_trainer.planner.candidate import FEATURES, SEARCHED_FEATURES, Candidate, state_bytes
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.remedies import cheapest_changes, describe_change
from ds_trainer.planner.search import Goal, SearchResult, search
from ds_trainer.training.job_devices import JobDevices
from ds_trainer.training.model.gradient_checkpointing import gradient_checkpointing_problems, takes_every_n_layers
from ds_trainer.training.planning.candidates import (
    SequenceLength,
    attention_of,
    every_n_layers,
    main_input_name,
    optimizer_name,
    sequence_length,
)
from ds_trainer.training.planning.run_estimator import RunEstimator
from ds_trainer.training.startup.configuration import TrainerInputs, compile_run, configure
from ds_trainer.training.startup.constructor_checks import replica_problems
from ds_trainer.utils.errors import ConfigError

_ATTEMPTS = 32
"""Plans that are configured until one can run. Those of a layout that cannot are skipped."""

_FIELDS = {
    "stage": "zero_stage",
    "offload_optimizer": "offload_optimizer",
    "offload_param": "offload_param",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "sp": "sequence_parallel_size",
    "ep": "expert_parallel_size",
    "checkpointing": "activation_checkpointing",
    "optimizer_on_nvme": "offload_optimizer",
    "param_on_nvme": "offload_param",
    "every_n_layers": "activation_checkpointing_kwargs",
    "hpz": "deepspeed",
}
_FIELDS |= {name: next(iter(FEATURES[name])) for name in SEARCHED_FEATURES}
_MICRO_BATCH = "per_device_train_batch_size"
_BATCH = (_MICRO_BATCH, "gradient_accumulation_steps")


def planned_arguments(inputs: TrainerInputs, trainer: type, estimator: RunEstimator) -> TrainingArguments:
    """A copy of the arguments with the chosen values, and ``parallelism=None``.

    Args:
        inputs: what the Trainer was given.
        trainer: its class.
        estimator: reads the model.

    Raises:
        ConfigError: the model cannot be planned, nothing fits, or the Trainer cannot run what fits.
    """
    args, model = inputs.args, estimator.read(inputs.model)
    devices = JobDevices.of_job(args, args.world_size)
    if devices is None:
        raise ConfigError(
            f"{_where(args)} needs to know the GPUs of the job, but this machine has none. Name them: ds-trainer plan "
            "RECIPE --dry-run N --device H100-80GB."
        )
    length = sequence_length(args, inputs.train_dataset, main_input_name(inputs.model), model.max_length)
    config = None if args.deepspeed is None else compile_run(inputs, ParallelLayout.of(args, args.world_size))
    precision = ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32") if config is None else config.precision.dtype
    fixed = {**_of_file(config), **_fixed(inputs, devices)}
    optimizer = optimizer_name(inputs) or (config and config.optimizer_type) or str(args.optim)
    known = {"attention": attention_of(inputs.model), "state_bytes": state_bytes(optimizer)}
    # Sequences of a step, with the arguments as they are and every rank a replica.
    replicas = 1 if accelerator_config(args).split_batches else args.world_size
    goal = Goal(
        length.tokens,
        (args.per_device_train_batch_size * args.gradient_accumulation_steps * replicas),
        precision,
        fixed=tuple({**fixed, **known}.items()),
    )
    cluster = devices.cluster
    if args.nvme_path is not None:  # its free space may differ between machines
        cluster = replace(cluster, nvme=math.inf)
    if cluster.nodes == 1:  # other machines may have other corrections, and all ranks must choose alike
        calibration = read_calibration(cluster.device, model.family)
        if calibration is not None:
            model, cluster, goal = calibration.applied(model, cluster, goal)
    result = None
    if args.given(_MICRO_BATCH) and not accelerator_config(args).split_batches:
        with_given = (*goal.fixed, ("micro_batch", args.per_device_train_batch_size))
        result = search(model, cluster, replace(goal, fixed=with_given))
    if result is None or result.best is None:  # then the global batch is what counts
        result = search(model, cluster, goal)
    if result.best is None:
        raise ConfigError(_nothing_fits(args, result, model, devices, goal, length))
    return _first_that_runs(inputs, trainer, result, {_FIELDS[name] for name in fixed if not name.endswith("_on_nvme")})


def _first_that_runs(
    inputs: TrainerInputs, trainer: type, result: SearchResult, fixed: Collection[str]
) -> TrainingArguments:
    refused: set[Candidate] = set()
    first: ConfigError | None = None
    for plan in result.fitting:
        way = replace(plan.candidate, micro_batch=1, accumulation=1)
        if way in refused:
            continue
        args = _changed(inputs.args, plan.candidate, fixed)
        try:
            configured = configure(replace(inputs, args=args))
            problems = [*configured.unsharded, *replica_problems(trainer, configured.layout)]
            if problems and inputs.train_dataset is not None:
                raise ConfigError(problems)
        except ConfigError as error:
            first = first or error
            refused.add(way)
            if len(refused) == _ATTEMPTS:
                break
            continue
        return args
    assert first is not None  # something fits
    raise ConfigError(
        [f"{_where(inputs.args)}: of what fits, the Trainer can run nothing. The first plan has:", *first.problems]
    )


def _changed(given: TrainingArguments, candidate: Candidate, fixed: Collection[str]) -> TrainingArguments:
    """A copy of ``given`` with the values of ``candidate``, except the fields that are fixed."""
    values = {
        **dict.fromkeys(("offload_optimizer", "offload_param"), "none"),
        **dict.fromkeys((*PARALLEL_SIZES, "expert_parallel_size"), 1),
    }
    values.update(
        {name: value for name, value in candidate.arguments().items() if name in (*_FIELDS.values(), *_BATCH)}
    )
    values = {
        name: value
        for name, value in values.items()
        if name == "gradient_accumulation_steps" or (name not in fixed and value != getattr(given, name))
    }
    if "activation_checkpointing" in values:
        values["gradient_checkpointing"] = values["activation_checkpointing"]  # its other name
    if "activation_checkpointing_kwargs" in values:
        values["gradient_checkpointing_kwargs"] = values["activation_checkpointing_kwargs"]
    if not candidate.uses_nvme and given.nvme_path is not None:
        values["nvme_path"] = None
    if accelerator_config(given).split_batches:
        values["per_device_train_batch_size"] = candidate.micro_batch * candidate.replicas
    args = copy.copy(given)
    args.change(**values, parallelism=None)
    for older in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        values.pop(older, None)
    origins = {**given.origins, **dict.fromkeys(values, PLANNED)}
    args.origins = {name: origin for name, origin in origins.items() if name != "parallelism"}
    return args


def _is_given(args: TrainingArguments, name: str) -> bool:
    if name in PARALLEL_SIZES:
        return args.given(name) or getattr(args, name) > 1  # or in parallelism_config
    if name == "activation_checkpointing":
        return args.long_context or args.given(name) or args.given("gradient_checkpointing")
    if name == "activation_checkpointing_kwargs" and args.given("gradient_checkpointing_kwargs"):
        return True
    return args.given(name) and getattr(args, name) is not None


def _of_file(config: CompiledConfig | None) -> dict[str, object]:
    """What the user's DeepSpeed configuration fixes."""
    user = {} if config is None else config.user_values()
    values: dict[str, object] = {} if config is None else {"hpz": config.hpz_partition_size}
    if config is not None and "zero_optimization.stage" in user:
        values["stage"] = config.zero_stage
    for name in ("optimizer", "param"):
        if config is not None and f"zero_optimization.offload_{name}.device" in user:
            values[f"offload_{name}"] = config.offload(name) is not None
            values[f"{name}_on_nvme"] = config.offload(name) == "nvme"
    return values


def _fixed(inputs: TrainerInputs, devices: JobDevices) -> dict[str, object]:
    """What the search must keep: given values, and what this model or these devices cannot have."""
    args, values = inputs.args, {}
    for name, field in _FIELDS.items():
        if name != "hpz" and _is_given(args, field):  # a DeepSpeed configuration: _of_file
            values[name] = _value(args, name, field)
    if args.nvme_path is None:
        values |= {name: False for name in ("optimizer_on_nvme", "param_on_nvme") if name not in values}
    if not takes_every_n_layers(inputs.model):
        values.setdefault("every_n_layers", 1)
    if gradient_checkpointing_problems(inputs.model, None, reentrant=False):
        values.setdefault("checkpointing", False)
    if not devices.is_gpu:  # the memory of the host is that of the ranks
        values.setdefault("offload_optimizer", False)
        values.setdefault("offload_param", False)
    return values


def _value(args: TrainingArguments, name: str, field: str) -> object:
    """What a given argument says about the field ``name`` of a candidate."""
    if name == "every_n_layers":
        return every_n_layers(args)
    value = getattr(args, field)
    if name.endswith("_on_nvme"):
        return str(value) == "nvme"
    if name.startswith("offload_") and name not in FEATURES:
        return str(value) != "none"
    return bool(value) if name in FEATURES else value


def _where(args: TrainingArguments) -> str:
    source = args.where("parallelism")
    return PLANNED if source == "argument" else f"{PLANNED} ({source})"


def _nothing_fits(
    args: TrainingArguments,
    result: SearchResult,
    model: PlannedModel,
    devices: JobDevices,
    goal: Goal,
    length: SequenceLength,
) -> list[str]:
    """Reasons, and what to change."""
    cluster = devices.cluster
    fixed = [
        f"{_FIELDS[name]}={getattr(args, _FIELDS[name])!r}"
        for name, _ in goal.fixed
        if name in _FIELDS and name != "hpz" and _is_given(args, _FIELDS[name])
    ]
    fixed = list(dict.fromkeys(fixed))
    kept = f" with {', '.join(fixed)}" if fixed else ""
    problems = [
        f"{_where(args)}: nothing{kept} fits on {cluster.world_size} x {cluster.device} of "
        f"{cluster.board.memory:.0f} GB with a global batch of {goal.global_batch} sequences of {length.tokens} tokens "
        f"({length.source})."
    ]
    problems += [f"{_sentence(reason)}" for reason in result.conflicts[:5]]
    if result.rejected:
        nearest = result.rejected[0]
        problems.append(f"The nearest is {nearest.candidate.describe()}: it {nearest.problem}.")
        problems += [f"It fits with {text}." for text in _changes(nearest, model)]
    return problems


def _changes(plan: Plan, model: PlannedModel) -> Iterator[str]:
    return (describe_change(plan, other) for other in cheapest_changes(plan))


def _sentence(reason: Any) -> str:
    text = str(reason)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
