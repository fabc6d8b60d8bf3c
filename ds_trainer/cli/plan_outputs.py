"""What ``ds-trainer plan`` makes of a plan: the DeepSpeed configuration, the command that starts it, cost, figure."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.arguments.compat.renamed_arguments import OLDER_NAMES, name_as_given
from ds_trainer.arguments.parallelism_config import PARALLEL_SIZES
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.cli.plan_request import PlanRequest
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.monitor.report.charts import stacked_file
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.model_shape import ModelShape, of_text
from ds_trainer.planner.plan import Plan
from ds_trainer.planner.plan_report import as_json
from ds_trainer.planner.remedies import cheapest_changes, describe_change
from ds_trainer.planner.search import SearchResult
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import write_text_atomic

_SCRIPT = "train.py"
_HOSTFILE = "hosts"
# What a plan leaves at its default, which a recipe may have set.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys((*PARALLEL_SIZES, "expert_parallel_size"), 1),
    **dict.fromkeys(("offload_optimizer", "offload_param"), "none"),
    **dict.fromkeys(("bf16", "fp16"), False),
    **dict.fromkeys(("nvme_path", "activation_checkpointing_kwargs"), None),
}
_OLDER = {new: old for old, new in OLDER_NAMES}  # if a recipe has the one, it cannot have the other


def launch_command(request: PlanRequest, plan: Plan) -> str:
    """The command that starts the plan with the recipe, or with a script of the user."""
    nodes = [f"--nodes {plan.cluster.nodes}"] if plan.cluster.nodes > 1 else []
    hostfile = [f"--hostfile {_HOSTFILE}"] if plan.cluster.nodes > 1 else []
    target = _SCRIPT if request.recipe is None else request.recipe.path
    parts = ["ds-trainer launch", *nodes, f"--nproc-per-node {plan.cluster.devices_per_node}", *hostfile]
    flags = shlex.join(_flags(request, plan))
    return " ".join([*parts, shlex.quote(target), *([flags] if flags else [])])


def training_arguments(request: PlanRequest, plan: Plan) -> TrainingArguments:
    """The arguments of the run that :func:`launch_command` starts."""
    if request.recipe is not None:
        return load_recipe(request.recipe.path, _flags(request, plan)).training_arguments()
    return TrainingArguments("runs/plan", **plan.candidate.arguments())


def compiled_config(request: PlanRequest, plan: Plan) -> CompiledConfig:
    """The DeepSpeed configuration of the plan, for GPUs.

    Raises:
        ConfigError: the recipe's other arguments contradict the plan.
    """
    return compiled_for(request, training_arguments(request, plan), plan.cluster)[0]


def compiled_for(
    request: PlanRequest, args: TrainingArguments, cluster: Cluster
) -> tuple[CompiledConfig, ParallelLayout]:
    """The DeepSpeed configuration of ``args`` for GPUs, and the layout.

    Raises:
        ConfigError: they cannot work on these devices.
    """
    layout = ParallelLayout.of(args, cluster.world_size)
    shape = ModelShape.from_config(request.config, request.model.name, with_layers=False)
    shape = replace(shape, transformer=of_text(request.model.transformer))
    return compile_config(args, layout, shape, "cuda", cluster=cluster), layout


def contradictions(request: PlanRequest, plan: Plan) -> list[str]:
    """Why the plan cannot be started with the recipe's other arguments; empty if it can."""
    try:
        compiled_config(request, plan)
    except ConfigError as error:
        return list(error.problems)
    return []


def write_config(request: PlanRequest, plan: Plan, path: Path) -> None:
    """Write :func:`compiled_config` to a file."""
    write_text_atomic(path, compiled_config(request, plan).to_json() + "\n")


def cost(plan: Plan, tokens: int, price: float | None) -> dict[str, float]:
    """Hours, device hours and the price of a training on ``tokens`` tokens."""
    hours = tokens / plan.tokens_per_second / 3600
    costs = {"tokens": tokens, "hours": hours, "device_hours": hours * plan.cluster.world_size}
    if price is not None:
        costs["cost"] = costs["device_hours"] * price
    return costs


def cost_line(costs: dict[str, float], price: float | None) -> str:
    """:func:`cost` in one line."""
    end = f", {costs['cost']:,.0f} at {price:g} an hour" if "cost" in costs else ""
    return f"{costs['tokens']:,} tokens: {costs['hours']:,.1f} hours, {costs['device_hours']:,.0f} device hours{end}"


def draw(plan: Plan, path: Path) -> None:
    """Write the memory of a plan as an SVG: a bar for each moment of a step.

    Raises:
        ConfigError: the file has another ending.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {path}: figures are SVG files. Use {path.with_suffix('.svg')}.")
    memory = plan.memory
    bars = {
        moment.name: {name: size / 1e9 for name, size in (*moment.items.items(), *memory.overhead.items())}
        for moment in memory.moments
    }
    title = f"{plan.model.name}, {plan.cluster.world_size} x {plan.cluster.device}: {plan.candidate.describe()}"
    write_text_atomic(path, stacked_file(title, bars, plan.cluster.board.memory, "GB of a device"))


def result_as_json(request: PlanRequest, result: SearchResult, count: int, costs: dict[str, Any]) -> dict[str, Any]:
    """Everything that a search found, as plain data.

    Args:
        request: the question.
        result: the answer.
        count: plans to list.
        costs: for the cost of each plan: arguments of :func:`cost`, or empty.
    """
    cluster, goal, best = request.cluster, request.goal, result.best
    from ds_trainer.planner.parameters.groups import total_by_kind

    model = request.model
    values: dict[str, Any] = {
        "model": {
            "name": model.name,
            "parameters": model.total,
            "trainable": model.trainable,
            "by_kind": total_by_kind(model.parameters),
            "layers": model.stack.layers,
        },
        "cluster": {
            "device": cluster.device,
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "device_memory_gb": cluster.board.memory,
            "host_memory_gb": cluster.host_memory,
            "nvme_gb": cluster.nvme,
        },
        "goal": {"length": goal.length, "global_batch": goal.global_batch, "margin": goal.margin},
        "notes": list(request.notes),
        "tried": result.tried,
        "fitting": len(result.fitting),
        "plans": [_plan(request, plan, costs) for plan in result.fitting[:count]],
        "cautious": None if result.cautious is None else _plan(request, result.cautious, costs),
        "rejected": [as_json(plan) for plan in result.neighbors()],
        "conflicts": list(result.conflicts),
    }
    if best is not None:
        values["contradictions"] = contradictions(request, best)
        if not values["contradictions"]:
            values["deepspeed_config"] = json.loads(compiled_config(request, best).to_json())  # without secrets
    elif result.rejected:
        nearest = result.rejected[0]
        values["changes"] = [
            {"change": describe_change(nearest, plan), **_plan(request, plan, costs)}
            for plan in cheapest_changes(nearest)
        ]
    return values


def _plan(request: PlanRequest, plan: Plan, costs: dict[str, Any]) -> dict[str, Any]:
    return {
        **as_json(plan),
        "command": launch_command(request, plan),
        **({"training": cost(plan, **costs)} if costs else {}),
    }


def _flags(request: PlanRequest, plan: Plan) -> list[str]:
    """Arguments for a command line: those of the plan, and overrides of the recipe that they do not replace."""
    given = {} if request.recipe is None else request.recipe.arguments
    for_cpus = {"use_cpu": False} if given.get(name_as_given("use_cpu", given) or "") else {}
    if request.as_written and not for_cpus:
        return list(request.overrides)
    wanted = for_cpus if request.as_written else {**plan.candidate.arguments(), **for_cpus}
    if request.recipe is None:
        return [part for name, value in wanted.items() for part in (f"--{name}", _text(value))]
    if not request.as_written:
        wanted |= {name: value for name, value in _DEFAULTS.items() if name in given and name not in wanted}
    if given.get("deepspeed") is not None:  # it has the plan's hpZ, which it fixes, and more
        wanted.pop("deepspeed", None)
    flags = {}
    for name, value in wanted.items():
        known = name_as_given(name, given) or name_as_given(_OLDER.get(name, name), given) or name
        flags[f"--arguments.{known}"] = _text(value)
    kept, is_replaced = [], False
    for part in request.overrides:
        if part.startswith("--"):
            is_replaced = part.partition("=")[0] in flags
        if not is_replaced:
            kept.append(part)
    return [*kept, *(part for flag in flags.items() for part in flag)]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) or value is None else str(value)
