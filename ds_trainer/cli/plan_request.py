"""What ``ds-trainer plan`` is asked for: model, cluster and goal, from options and from a recipe."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.arguments.compat.renamed_arguments import name_as_given
from ds_trainer.cli.plan_fixed import fixed_values, not_covered, refuse_contradictions
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.calibration import read_calibration, read_probe, record_probe
from ds_trainer.planner.cluster import Cluster, read_devices
from ds_trainer.planner.planned_model import IMBALANCE, PlannedModel, bitsandbytes_bytes
from ds_trainer.planner.search import Goal, unsharded_stage
from ds_trainer.recipes.recipe import Recipe, load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json
from ds_trainer.utils.host_memory import total_host_memory

DEVICE, DEVICES_PER_NODE = "H100-80GB", 8
"""Without options."""

NO_EXPERTS_MEASURED = (
    "No mixture of experts has been measured yet (calibrate_planner=True). Experts are taken to be equally busy; where "
    f"ranks divide them, one is taken to get {IMBALANCE:g} times the mean: expect less speed than estimated, and more "
    "memory."
)

_DEFAULT_LENGTH, _LONGEST_DEFAULT = 4096, 8192


@dataclass(frozen=True)
class PlanRequest:
    """The question.

    Args:
        model: what is trained.
        config: its configuration.
        cluster: the devices.
        goal: batch, length and what is fixed.
        recipe: the recipe that was given, with overrides.
        overrides: the overrides.
        notes: what a reader must know: values that are from the recipe, lengths that the model was not made for,
            corrections by earlier runs.
        as_written: the recipe is taken as it is.
    """

    model: PlannedModel
    config: Mapping[str, Any]
    cluster: Cluster
    goal: Goal
    recipe: Recipe | None = None
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    as_written: bool = False


def read_request(options: argparse.Namespace, overrides: Sequence[str]) -> PlanRequest:
    """The question of a command line.

    Raises:
        ConfigError: the model, the recipe or the device is unknown, options contradict each other, or the file of
            calibrations is damaged.
    """
    recipe = load_recipe(options.model, overrides) if Path(options.model).suffix in (".yaml", ".yml") else None
    if recipe is None and overrides:
        raise ConfigError(f"plan takes no {overrides[0]}. See ds-trainer plan --help.")
    notes: list[str] = []
    cluster = _cluster(options, notes)
    fixed = dict(fixed_values(options, recipe))
    refuse_contradictions(options, cluster, fixed)
    if recipe is not None:
        notes += not_covered(recipe)
        if recipe.arguments.get(name_as_given("use_cpu", recipe.arguments) or ""):
            notes.append(f"{recipe.path} is a recipe for CPUs ({recipe.where('arguments.use_cpu')}): the command turns "
                         "that off.")  # fmt: skip
    config, name = _config_of_recipe(recipe) if recipe is not None else read_config(options.model)
    rank = options.lora_rank
    if recipe is not None and rank is None:
        rank = _adapters(recipe, notes)
    model = PlannedModel.from_config(config, name, rank or 0)
    if recipe is not None and recipe.model.freeze and not rank:
        model = _partly_frozen(config, name, recipe)
    if recipe is not None and recipe.model.quantization is not None:
        model = model.quantized(bitsandbytes_bytes(recipe.model.quantization))
        fixed = {"tp": 1, "stage": unsharded_stage(cluster.world_size), **fixed}
    length, batch, precision = options.seq_len, options.global_batch, options.precision
    evaluation = None if recipe is None else _evaluation(recipe)
    if recipe is not None:
        taken = []
        if length is None:
            length = recipe.tokens_per_sample
            taken.append(f"{length:,} tokens (data.{'max_length' if recipe.fine_tunes else 'sequence_length'})")
        if batch is None and options.micro_batch is None:
            plan = _batch(recipe, cluster)
            batch = plan.global_batch_size
            taken.append(f"a global batch of {plan.describe()}")
        if precision is None:
            precision = _precision(recipe)
            taken += [precision] if precision else []
        if evaluation is not None:
            taken.append(f"batches of evaluation of {evaluation} per device")
        if taken:
            notes.insert(0, f"From {recipe.path}: {', '.join(taken)}.")
    model = _probed(model, config, "fp32" if precision == "fp32" else "bf16", options.probe, notes)
    length = length or min(model.max_length or _DEFAULT_LENGTH, _LONGEST_DEFAULT)
    goal = Goal(length, batch, precision, options.margin, tuple(fixed.items()), evaluation)
    if note := beyond_positions(model, length):
        notes.append(note)
    calibration = read_calibration(cluster.device, model.family)
    if calibration is not None:
        model, cluster, goal = calibration.applied(model, cluster, goal)
        notes.append(f"For {model.family} on {cluster.device} the plans are {calibration.describe()}.")
    if model.stack.experts > 1 and model.busiest_expert is None:
        notes.append(NO_EXPERTS_MEASURED)
    return PlanRequest(
        model=model,
        config=config,
        cluster=cluster,
        goal=goal,
        recipe=recipe,
        overrides=tuple(overrides),
        notes=tuple(notes),
        as_written=options.as_written,
    )


def _partly_frozen(config: Mapping[str, Any], name: str, recipe: Recipe) -> PlannedModel:
    """The model without gradients of what the recipe freezes."""
    from ds_trainer.planner.meta_model import meta_model
    from ds_trainer.recipes.frozen_parts import freeze

    module = meta_model(config, name)
    freeze(module, recipe.model.freeze, recipe.where("model.freeze"))
    return PlannedModel.from_module(module, name)


def _probed(
    model: PlannedModel, config: Mapping[str, Any], number_format: str, measures: bool, notes: list[str]
) -> PlannedModel:
    """The model with what its layers took, measured now or by an earlier ``--probe``."""
    if measures:
        from ds_trainer.planner.activations.device_probe import describe, probe_device

        probe = probe_device(model, config, number_format=number_format)
        record_probe(model, probe)
        notes.append(describe(model, probe))
        return replace(model, probe=probe)
    earlier = read_probe(model, number_format)
    if earlier is not None:
        notes.append(f"The plans are corrected by an earlier --probe of these layers on {earlier.device}.")
    return replace(model, probe=earlier)


def beyond_positions(model: PlannedModel, length: int) -> str:
    """A note if sequences are longer than those that the model was made for; else empty."""
    if model.max_length is None or length <= model.max_length:
        return ""
    return (
        f"Note: {length:,} tokens are more than the {model.max_length:,} positions of the model "
        "(max_position_embeddings), which needs another RoPE scaling for them, or cannot have them."
    )


def read_config(name: str) -> tuple[dict[str, Any], str]:
    """The configuration of a model, and its name for reports.

    Raises:
        ConfigError: it cannot be read.
    """
    path = Path(name)
    if path.suffix != ".json":
        from ds_trainer.training.loading.model_files import model_directory

        path = model_directory(name, weights=False) / "config.json"
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ConfigError(f"{path} is no configuration of a model: it has no model_type.")
    label = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return config, label


def count(text: str) -> int:
    """A positive integer."""
    return _number(text, int, "a positive integer", 1, math.inf)


def tokens(text: str) -> int:
    """A number of tokens such as 32768, 32K (of 1,024) or 1M (of 1,024 x 1,024)."""
    return _with_unit(text, {"K": 1024, "M": 1024**2}, "a number of tokens such as 32768, 32K or 1M")


def many_tokens(text: str) -> int:
    """A number of tokens such as 300M, 15B or 2T: powers of 1,000."""
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    return _with_unit(text, units, "a number of tokens such as 500M, 15B or 2T")


def rank(text: str) -> int:
    """A number that is not negative."""
    return _number(text, int, "0 or a positive integer", 0, math.inf)


def positive(text: str) -> float:
    """A positive number."""
    return _number(text, float, "a positive number", math.ulp(0.0), math.inf)


def bandwidths(text: str) -> tuple[float, float]:
    """GB/s of reading and writing, such as 25/12, or one number for both."""
    first, _, second = text.partition("/")
    return positive(first), positive(second or first)


def share(text: str) -> float:
    """From 0 to less than 1."""
    return _number(text, float, "a number from 0 to less than 1, such as 0.06", 0, 1 - 1e-9)


def stage(text: str) -> int:
    """A ZeRO stage."""
    return _number(text, int, "0, 1, 2 or 3", 0, 3)


def _number(text: str, kind: Any, wanted: str, least: float, most: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most and value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def _with_unit(text: str, units: Mapping[str, int], wanted: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)([{''.join(units)}]?)", text.replace(",", "").replace("_", "").upper())
    value = 0 if match is None else int(float(match[1]) * units.get(match[2], 1))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def _cluster(options: argparse.Namespace, notes: list[str]) -> Cluster:
    more = {} if options.device_file is None else read_devices(options.device_file)
    nodes = options.nodes or 1
    if options.this_machine:
        given = [name for name in ("device", "devices_per_node") if getattr(options, name) is not None]
        if given:
            option = given[0].replace("_", "-")
            raise ConfigError(f"--this-machine and --{option} both describe the devices. Leave one out.")
        cluster = Cluster.of_this_machine(nodes, more)
    else:
        cluster = Cluster.of(options.device or DEVICE, nodes, options.devices_per_node or DEVICES_PER_NODE, more)
    if options.host_memory is not None:
        cluster = replace(cluster, host_memory=options.host_memory)
    elif cluster.host_memory is None:
        usual = total_host_memory() / 1e9 if cluster.is_cpu else cluster.board.host_memory
        cluster = replace(cluster, host_memory=usual)
        notes.append(f"Host memory of a machine: {usual:,.0f} GB are assumed (--host-memory).")
    if options.network is not None:
        cluster = replace(cluster, board=replace(cluster.board, network=options.network))
    if options.nvme is not None:
        cluster = replace(cluster, nvme=options.nvme)
    if options.nvme_bandwidth is not None:
        read, write = (rate / cluster.devices_per_node for rate in options.nvme_bandwidth)
        cluster = replace(cluster, board=replace(cluster.board, nvme_read=read, nvme_write=write))
    return cluster


def _config_of_recipe(recipe: Recipe) -> tuple[dict[str, Any], str]:
    if recipe.model.path is None:
        return dict(recipe.model.architecture or {}), Path(recipe.path).stem
    config, name = read_config(str(recipe.model.path))
    return {**config, **_class_of_task(recipe.task.name, str(config["model_type"]))}, name


def _class_of_task(task: str, family: str) -> dict[str, list[str]]:
    """The class that a task trains, where it is not the one of the files: with another head, or with none."""
    if task not in ("reward", "classification", "embedding"):
        return {}
    from transformers.models.auto import modeling_auto as auto

    table = auto.MODEL_MAPPING_NAMES if task == "embedding" else auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    name = table.get(family)
    return {"architectures": [name if isinstance(name, str) else name[0]]} if name else {}


def _adapters(recipe: Recipe, notes: list[str]) -> int:
    """The rank of the recipe's adapters."""
    peft = recipe.model.peft
    if peft is None:
        return 0
    if str(peft["peft_type"]).upper() != "LORA":
        raise ConfigError(
            f"{recipe.where('model.peft')}: adapters of type {peft['peft_type']} are unknown to plan. Pass --lora-rank."
        )
    rank = int(peft.get("r", 8))
    notes.append(f"From {recipe.path}: LoRA of rank {rank}, counted on all linear layers of attention and MLP.")
    return rank


def _batch(recipe: Recipe, cluster: Cluster) -> BatchPlan:
    """The recipe's own batch on the devices of the cluster."""
    args = recipe.training_arguments()
    layout = ParallelLayout.of(args, cluster.world_size)
    return BatchPlan(layout, args.per_device_train_batch_size, args.gradient_accumulation_steps)


def _evaluation(recipe: Recipe) -> int | None:
    """The recipe's batch of evaluation; None if it has no data for one."""
    if not recipe.data.has_eval:
        return None
    return recipe.training_arguments().per_device_eval_batch_size


def _precision(recipe: Recipe) -> str | None:
    given = recipe.arguments
    if given.get("bf16") or given.get("fp16"):
        return "bf16" if given.get("bf16") else "fp16"
    return "fp32" if given.get("bf16") is False and not given.get("fp16") else None
