"""``ds-trainer plan``: what fits on a cluster, how fast it is, and which layout to take. Starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.cli import dry_run
from ds_trainer.planner.cluster import Cluster, read_devices
from ds_trainer.planner.plan_report import as_json, report
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import MARGIN, Goal, SearchResult, search
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE, NOTHING_FITS
from ds_trainer.utils.files import read_json

HELP = "show which layouts of a model fit on a cluster, and how fast they are"
DESCRIPTION = """Estimate memory and time of every layout of a model on a cluster, and print the fastest that fit.
Reads the model's configuration only; needs no GPU. Exit code 3: nothing fits."""

_FIXED = {
    "zero-stage": ("stage", int, "ZeRO stage"),
    "micro-batch": ("micro_batch", int, "sequences of a device in a micro-batch"),
    "tensor-parallel-size": ("tp", int, "tensor-parallel ranks"),
    "context-parallel-size": ("cp", int, "context-parallel ranks"),
    "sequence-parallel-size": ("sp", int, "sequence-parallel ranks"),
}
_SOLVE = ("seq-len", "params", "devices", "micro-batch")


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("model", metavar="MODEL", help="config.json, directory or Hub name of a model, or a recipe")
    parser.add_argument("--device", default="H100-80GB", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="machines; default: 1")
    parser.add_argument("--devices-per-node", type=_count, default=8, metavar="N", help="default: 8")
    parser.add_argument("--seq-len", type=_tokens, metavar="N", help="tokens of a sequence, such as 32768, 32K or 1M")
    parser.add_argument("--global-batch", type=_count, metavar="N", help="sequences of an optimizer step")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: bf16 if the device has it")
    parser.add_argument("--lora-rank", type=int, default=0, metavar="R", help="train adapters on all linear layers")
    for name, (_, kind, text) in _FIXED.items():
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"only plans with these {text}")
    parser.add_argument("--offload", choices=("none", "optimizer", "all"), help="only plans with this offload")
    parser.add_argument("--activation-checkpointing", choices=("on", "off"), help="only plans with or without it")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="memory of a machine; default: no limit")
    parser.add_argument("--network", type=float, metavar="GB/S", help="network of each device; default: usual ones")
    parser.add_argument("--device-file", type=Path, metavar="YAML", help="more devices")
    parser.add_argument("--margin", type=float, default=MARGIN, help="share of memory left free; default: %(default)s")
    parser.add_argument("--tokens", type=_tokens, metavar="N", help="tokens of the whole training, for hours and cost")
    parser.add_argument("--price", type=float, metavar="X", help="price of a device for an hour")
    parser.add_argument("--solve", choices=_SOLVE, help="the largest (devices: the smallest) value that fits")
    parser.add_argument("--top", type=_count, default=5, metavar="N", help="plans to show; default: 5")
    parser.add_argument("--json", action="store_true", help="print plans as JSON")
    parser.add_argument(
        "--dry-run", type=_count, metavar="N", help="run the start-up of rank 0 of N ranks, without GPUs"
    )


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Print the plans; returns the exit code.

    Raises:
        ConfigError: the model, the device or an argument is unknown.
    """
    if options.dry_run is not None:
        dry_run.set_cluster(options)
        if dry_run.is_recipe(options.model):
            return dry_run.rehearse_recipe(options, args)
    if args:
        raise ConfigError(f"plan takes no {args[0]}. See ds-trainer plan --help.")
    model = _model(options.model, options.lora_rank)
    more = {} if options.device_file is None else read_devices(options.device_file)
    cluster = Cluster.of(options.device, options.nodes, options.devices_per_node, more)
    cluster = replace(cluster, host_memory=options.host_memory)
    if options.network is not None:
        cluster = replace(cluster, board=replace(cluster.board, network=options.network))
    length = options.seq_len or min(model.max_length or 4096, 8192)
    goal = Goal(length, options.global_batch, options.precision, options.margin, tuple(_fixed(options)))
    if options.solve is not None:
        return _solve(options.solve, model, cluster, goal)
    result = search(model, cluster, goal)
    if options.dry_run is not None and result.best is not None:
        return dry_run.rehearse_candidate(options, _config(options.model)[0], result.best.candidate)
    if options.json:
        plans = [as_json(plan) for plan in result.fitting[: options.top]]
        print(json.dumps({"model": _about(model), "plans": plans, "conflicts": list(result.conflicts)}, indent=2))
    else:
        print("\n".join([*_heading(model, cluster, goal, result), *report(result, options.top)]))
        if result.best is not None and options.tokens:
            hours = options.tokens / result.best.tokens_per_second / 3600
            device_hours = hours * cluster.world_size
            cost = f", {device_hours * options.price:,.0f} at {options.price}" if options.price else ""
            print(f"{options.tokens:,} tokens: {hours:,.1f} hours, {device_hours:,.0f} device hours{cost}")
    return DONE if result.fitting else NOTHING_FITS


def _heading(model: PlannedModel, cluster: Cluster, goal: Goal, result: SearchResult) -> Iterator[str]:
    about = _about(model)
    trained = "all trained" if not model.lora_rank else f"{about['trainable'] / 1e6:,.0f} M trained"
    yield f"{model.name}: {about['parameters'] / 1e9:.2f} B parameters, {trained}; {model.stack.layers} layers"
    batch = "" if goal.global_batch is None else f", global batch {goal.global_batch}"
    yield (
        f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device}, {goal.length:,} tokens a sequence{batch}: "
        f"{result.tried:,} ways to run, {len(result.fitting)} fit"
    )
    _, family = model.activations("sdpa", "bf16")
    if family != model.family:
        yield f"Activations of {model.family} are estimated with those of {family}."
    yield ""


def _about(model: PlannedModel) -> dict[str, Any]:
    from ds_trainer.planner.parameters.groups import total_by_kind

    return {
        "name": model.name,
        "parameters": model.total,
        "trainable": model.trainable,
        "by_kind": total_by_kind(model.parameters),
        "layers": model.stack.layers,
    }


def _fixed(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    for argument, (name, _, _) in _FIXED.items():
        value = getattr(options, argument.replace("-", "_"))
        if value is not None:
            yield name, value
    if options.offload is not None:
        yield "offload_optimizer", options.offload != "none"
        yield "offload_param", options.offload == "all"
    if options.activation_checkpointing is not None:
        yield "checkpointing", options.activation_checkpointing == "on"


def _model(name: str, lora_rank: int) -> PlannedModel:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        from ds_trainer.recipes.recipe import load_recipe

        recipe = load_recipe(path, [])
        if recipe.model.path is None:
            return PlannedModel.from_config(recipe.model.architecture or {}, path.stem, lora_rank)
        name = str(recipe.model.path)
    return PlannedModel.from_config(*_config(name), lora_rank)


def _config(name: str) -> tuple[dict[str, Any], str]:
    """The configuration of a model, and its name for reports."""
    path = Path(name)
    if path.suffix != ".json":
        from ds_trainer.training.loading.model_files import model_directory

        path = model_directory(name, weights=False) / "config.json"
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    label = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return config, label


def _solve(quantity: str, model: PlannedModel, cluster: Cluster, goal: Goal) -> int:
    """Print the largest (devices: smallest) value with which something fits."""
    if quantity == "devices":
        found = _smallest_cluster(model, cluster, goal)
    elif quantity == "micro-batch":
        free = replace(goal, global_batch=None)
        fitting = search(model, cluster, free).fitting
        best = max(fitting, key=lambda plan: (plan.candidate.micro_batch, plan.tokens_per_second), default=None)
        found = None if best is None else (best.candidate.micro_batch, "sequences", search_result(best))
    elif quantity == "seq-len":
        found = _longest(model, cluster, goal)
    else:
        found = _deepest(model, cluster, goal)
    if found is None:
        print(f"{quantity}: nothing fits.")
        return NOTHING_FITS
    value, unit, result = found
    print(f"{quantity}: {value:,} {unit}\n")
    print("\n".join(report(result, 3)))
    return DONE


def search_result(plan: Any) -> SearchResult:
    """A result with one plan."""
    return SearchResult((plan,), ())


def _smallest_cluster(model: PlannedModel, cluster: Cluster, goal: Goal) -> tuple[int, str, SearchResult] | None:
    sizes = [(1, number) for number in (1, 2, 4) if number < cluster.devices_per_node]
    sizes += [(1 << power, cluster.devices_per_node) for power in range(11)]
    for nodes, devices in sizes:
        result = search(model, replace(cluster, nodes=nodes, devices_per_node=devices), goal)
        if result.fitting:
            return nodes * devices, f"devices ({nodes} x {devices} {cluster.device})", result
    return None


def _longest(model: PlannedModel, cluster: Cluster, goal: Goal) -> tuple[int, str, SearchResult] | None:
    def fits(thousands: int) -> SearchResult | None:
        result = search(model, cluster, replace(goal, length=thousands * 1024))
        return result if result.fitting else None

    step = 4  # in 1024 tokens: a multiple of the chunks of most layouts
    best = fits(step)
    if best is None:
        return None
    low, high = step, 2 * step
    while (found := fits(high)) is not None:
        best, low, high = found, high, 2 * high
    while high - low > max(step, low // 16 // step * step):
        middle = (low + high) // 2 // step * step
        found = fits(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return low * 1024, "tokens a sequence", best


def _deepest(model: PlannedModel, cluster: Cluster, goal: Goal) -> tuple[int, str, SearchResult] | None:
    def fits(layers: int) -> tuple[PlannedModel, SearchResult] | None:
        deeper = model.with_layers(layers)
        result = search(deeper, cluster, goal)
        return (deeper, result) if result.fitting else None

    best = fits(1)
    if best is None:
        return None
    low, high = 1, 2
    while (found := fits(high)) is not None and high < 4096:
        best, low, high = found, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        found = fits(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best[0].total, f"parameters ({low} layers of this width)", best[1]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _tokens(text: str) -> int:
    units = {"K": 1024, "M": 1024**2, "G": 1024**3, "B": 10**9, "T": 10**12}
    unit = units.get(text[-1:].upper())
    return _count(text) if unit is None else int(float(text[:-1]) * unit)
