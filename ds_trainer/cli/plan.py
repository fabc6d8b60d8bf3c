"""``ds-trainer plan``: what fits on a cluster, how fast it is, and which layout to take. Starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_trainer.cli import dry_run, plan_fixed, plan_outputs, plan_request
from ds_trainer.cli.plan_fixed import given_options
from ds_trainer.cli.plan_outputs import compiled_for
from ds_trainer.cli.plan_request import PlanRequest
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import MemoryEstimator
from ds_trainer.planner.plan import MARGIN, Plan
from ds_trainer.planner.plan_report import report
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import Goal, SearchResult, fits, in_one_pass, nearest_batches, search
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task import TRL_TASKS
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import DONE, NOTHING_FITS
from ds_trainer.utils.files import new_output
from ds_trainer.utils.units import counted

HELP = "show which layouts of a model fit on a cluster, and how fast they are"
DESCRIPTION = """Estimate memory and time of every layout of a model on a cluster, and print the fastest that fit.
Reads the model's configuration only; needs no GPU. Exit code 3: nothing fits."""


def configure(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
    """Add the arguments of the subcommand."""
    count, tokens, positive = plan_request.count, plan_request.tokens, plan_request.positive
    parser.add_argument("model", metavar="MODEL", help="config.json, directory or Hub name of a model, or a recipe")
    machines = parser.add_argument_group("machines")
    add = machines.add_argument
    add("--device", metavar="NAME", help=f"default: {plan_request.DEVICE}")
    add("--nodes", type=count, metavar="N", help="machines; default: 1")
    add("--devices-per-node", type=count, metavar="N", help=f"default: {plan_request.DEVICES_PER_NODE}")
    add("--this-machine", action="store_true", help="the GPUs and the host memory of this machine")
    add(
        "--host-memory",
        type=positive,
        metavar="GB",
        help="memory of a machine; default: usual ones",
    )
    add("--network", type=positive, metavar="GB/S", help="network of each device; default: usual ones")
    add("--nvme", type=positive, metavar="GB", help="local disks of a machine for offload; default: unknown")
    add(
        "--nvme-bandwidth", type=plan_request.bandwidths, metavar="R/W", help="GB/s of these disks; default: usual ones"
    )
    add("--device-file", type=Path, metavar="YAML", help="more devices")
    add("--margin", type=plan_request.share, default=MARGIN, help="share of memory left free; default: %(default)s")
    training = parser.add_argument_group("training; a recipe has its own values")
    add = training.add_argument
    add("--seq-len", type=tokens, metavar="N", help="tokens of a sequence, such as 32768, 32K or 1M")
    add("--global-batch", type=count, metavar="N", help="sequences of an optimizer step")
    add("--precision", choices=("bf16", "fp16", "fp32"), help="default: bf16 if the device has it")
    add("--lora-rank", type=plan_request.rank, metavar="R", help="train adapters on all linear layers")
    plan_fixed.add_options(parser, count, plan_request.stage)
    add = parser.add_argument_group("questions and output").add_argument
    add("--solve", choices=QUANTITIES, help="the largest (devices: the smallest) value that fits")
    add("--as-written", action="store_true", help="only the plan that a recipe describes, without a search")
    add("--tokens", type=plan_request.many_tokens, metavar="N", help="of the whole training (15B), for hours and cost")
    add("--price", type=positive, metavar="X", help="price of a device for an hour; needs --tokens")
    add("--top", type=count, default=5, metavar="N", help="plans to show; default: 5")
    add("--config", metavar="FILE", help="write the DeepSpeed configuration of the best plan (-: print only that)")
    add("--probe", action="store_true", help="run two layers on this machine's GPU or CPU, and correct the estimates")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the memory of the best plan")
    add("--json", action="store_true", help="print everything as JSON")
    add("--dry-run", type=count, metavar="N", help="run the start-up of rank 0 of N ranks, without GPUs")


def run(options: argparse.Namespace, args: Sequence[str]) -> int:
    """Print the plans; returns the exit code.

    Raises:
        ConfigError: the model, the device or an argument is unknown.
    """
    for name in ("config", "plot"):
        if getattr(options, name) not in (None, "-"):
            setattr(options, name, new_output(getattr(options, name), f"--{name}"))
    if options.as_written:
        # Options that ask for something else are an error.
        others = given_options(options)
        asked = ("seq_len", "global_batch", "precision", "solve", "dry_run")
        others += [f"--{name.replace('_', '-')}" for name in asked if getattr(options, name) is not None]
        if others:
            raise ConfigError(
                f"--as-written takes all values from the recipe, so {', '.join(others)} cannot be given with it. "
                "Values of the recipe can be replaced, as in --arguments.zero_stage=2."
            )
    if options.dry_run is not None:
        dry_run.set_cluster(options)
        if dry_run.is_recipe(options.model):
            return dry_run.rehearse_recipe(options, args)
    if options.price is not None and options.tokens is None:
        raise ConfigError("--price needs --tokens, the number of tokens of the training.")
    request = plan_request.read_request(options, args)
    if options.solve is not None:
        return _solve(options, request)
    result = _as_written(request) if options.as_written else search(request.model, request.cluster, request.goal)
    _refuse_impossible(request, result)
    best = result.best
    if options.dry_run is not None and best is not None:
        return dry_run.rehearse_candidate(options, request.config, best.candidate)
    if best is not None and options.config == "-":
        print(plan_outputs.compiled_config(request, best).to_json())
        return DONE
    if options.json:
        costs = {"tokens": options.tokens, "price": options.price} if options.tokens else {}
        print(json.dumps(plan_outputs.result_as_json(request, result, options.top, costs), indent=2))
    else:
        print("\n".join(_text(options, request, result)))
    if best is not None and options.config is not None:
        plan_outputs.write_config(request, best, options.config)
    if options.plot is not None and (shown := best or next(iter(result.rejected), None)) is not None:
        plan_outputs.draw(shown, options.plot)
    return DONE if best is not None else NOTHING_FITS


def _text(options: argparse.Namespace, request: PlanRequest, result: SearchResult) -> Iterator[str]:
    cluster, goal = request.cluster, request.goal
    yield from _heading(request)
    batch = "" if goal.global_batch is None else f", global batch {goal.global_batch}"
    counts = f"{result.tried:,} ways to run, {len(result.fitting):,} fit"
    yield (
        f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device}, {counted(goal.length, 'token')} a "
        f"sequence{batch}: {'the recipe as it is' if request.as_written else counts}"
    )
    yield from request.notes
    yield ""
    yield from report(result, options.top)
    if result.best is None:
        return
    yield ""
    cautious = result.cautious
    if cautious is not None and cautious is not result.best:
        yield "Start the cautious plan with"
        yield f"  {plan_outputs.launch_command(request, cautious)}"
    yield "Start it with" if request.as_written else "Start the first plan with"
    yield f"  {plan_outputs.launch_command(request, result.best)}"
    for problem in plan_outputs.contradictions(request, result.best):
        yield f"But {problem}"
    if options.tokens:
        yield plan_outputs.cost_line(plan_outputs.cost(result.best, options.tokens, options.price), options.price)


def _heading(request: PlanRequest) -> Iterator[str]:
    model = request.model
    trained = "all trained" if not model.lora_rank else f"{model.trainable / 1e6:,.0f} M trained"
    number = f"{model.total / 1e9:.2f} B" if model.total >= 1e8 else f"{model.total / 1e6:.2f} M"
    yield f"{model.name}: {number} parameters, {trained}; {counted(model.stack.layers, 'layer')}"
    _, family = model.activations("sdpa", "bf16")
    if family != model.family:
        yield f"Activations of {model.family} are estimated with those of {family}."


def _refuse_impossible(request: PlanRequest, result: SearchResult) -> None:
    """Raise ConfigError if there is no way to run at all, whatever the memory."""
    if result.tried:
        return
    goal, ranks = request.goal, request.cluster.world_size
    if goal.global_batch is not None:
        near = nearest_batches(request.model, request.cluster, goal)
        if near:
            raise ConfigError(
                f"--global-batch {goal.global_batch} cannot be divided among {counted(ranks, 'device')} in any layout "
                f"that the other values allow. Use {' or '.join(map(str, near))}."
            )
    reasons = "; ".join(result.conflicts[:3]) or "the values exclude each other"
    raise ConfigError(f"No layout of {request.model.name} on {counted(ranks, 'device')} is possible: {reasons}.")


def _solve(options: argparse.Namespace, request: PlanRequest) -> int:
    """Print the largest (devices: smallest) value with which something fits."""
    solution = solve(options.solve, request.model, request.cluster, request.goal)
    if solution is None:
        if options.json:
            print(json.dumps({"quantity": options.solve, "value": None}))
        else:
            print(f"{options.solve}: nothing fits, whatever it is. Without --solve, the reasons are shown.")
        return NOTHING_FITS
    note = plan_request.beyond_positions(solution.model, solution.goal.length)
    solved = replace(
        request, model=solution.model, cluster=solution.cluster, goal=solution.goal, notes=(note,) if note else ()
    )
    result = solution.result
    if options.json:
        answer = {"quantity": options.solve, "value": solution.value, "unit": solution.unit}
        print(json.dumps({**answer, **plan_outputs.result_as_json(solved, result, options.top, {})}, indent=2))
        return DONE
    print(f"{options.solve}: {solution.value:,} {solution.unit}")
    print("\n".join([*solved.notes, "", *report(result, min(3, options.top))]))
    return DONE


_PAIRS = ("dpo", "reward", "embedding")  # two sequences of a sample are in one batch
_CHECKPOINTING = {"activation_checkpointing", "gradient_checkpointing"}


def _as_written(request: PlanRequest) -> SearchResult:
    """The one plan that the recipe describes on the devices of ``request``.

    Raises:
        ConfigError: there is no recipe, or it cannot work on these devices.
    """
    from ds_trainer.training.planning.candidates import candidate_of_arguments  # imports torch, which takes seconds

    recipe, model, cluster = request.recipe, request.model, request.cluster
    if recipe is None:
        raise ConfigError("--as-written needs a recipe (a .yaml file), not a model.")
    args = recipe.training_arguments()
    config, layout = compiled_for(request, args, cluster)
    rows = model.rows if recipe.task.is_next_token else 0
    run = candidate_of_arguments(args, config, layout, request.goal.length, recipe.data.has_eval, rows)
    if recipe.task.name in _PAIRS:
        run = _with_pairs(recipe, run)
    estimator = MemoryEstimator(model, cluster)
    plan = in_one_pass(Plan(model, run, cluster, estimator.estimate(run), request.goal.margin), estimator)
    fitting, rejected = ((plan,), ()) if plan.fits else ((), (plan,))
    return SearchResult(fitting, rejected, tried=1)


def _with_pairs(recipe: Recipe, run: Candidate) -> Candidate:
    """The run with the sequences that the library of the task puts into a batch."""
    evaluated = None if run.eval_micro_batch is None else 2 * run.eval_micro_batch
    run = replace(run, micro_batch=2 * run.micro_batch, eval_micro_batch=evaluated)
    if recipe.task.name in TRL_TASKS and not _CHECKPOINTING & recipe.arguments.keys():
        return replace(run, checkpointing=True)  # TRL's default
    cached = recipe.task.options.get("mini_batch_size")
    if cached is None or 2 * cached >= run.micro_batch:
        return run
    parts = -(-run.micro_batch // (2 * cached))  # a part at a time: the backward pass, and a forward pass before it
    return replace(run, micro_batch=2 * cached, accumulation=run.accumulation * parts, checkpointing=True)


# ``ds-trainer plan --solve``: the largest value with which something fits, or the smallest number of devices.


QUANTITIES = ("seq-len", "params", "devices", "micro-batch")

_CHUNKS = (4096, 256)  # tokens: multiples of what most layouts divide a sequence into
_MOST_LAYERS, _MOST_TOKENS, _MOST_SEQUENCES = 2**14, 2**26, 2**16


@dataclass(frozen=True)
class Solution:
    """An answer.

    Args:
        value: the number.
        unit: what is counted, with remarks.
        model: with which it was found.
        cluster: with which it was found.
        goal: with which it was found.
    """

    value: int
    unit: str
    model: PlannedModel
    cluster: Cluster
    goal: Goal

    @property
    def result(self) -> SearchResult:
        """Everything that fits then."""
        return search(self.model, self.cluster, self.goal)


def solve(quantity: str, model: PlannedModel, cluster: Cluster, goal: Goal) -> Solution | None:
    """The answer; None if nothing fits at all.

    Args:
        quantity: one of :data:`QUANTITIES`.
        model: what is trained; for ``params``, layers are added to it.
        cluster: the devices; for ``devices``, one of them and the size of a machine.
        goal: batch, length and what is fixed.
    """
    names = ("optimizer_on_nvme", "param_on_nvme")
    if cluster.nvme is None and not {name for name, _ in goal.fixed} & set(names):
        goal = replace(
            goal, fixed=(*goal.fixed, *((name, False) for name in names))
        )  # disks of unknown size are no limit
    if quantity == "devices":
        return _devices(model, cluster, goal)
    if quantity == "seq-len":
        for step in _CHUNKS:
            largest = _largest(lambda n: fits(model, cluster, replace(goal, length=n * step)), _MOST_TOKENS // step)  # noqa: B023
            if largest:
                length = largest * step
                unit = f"tokens a sequence (in steps of {step:,})"
                return Solution(length, unit, model, cluster, replace(goal, length=length))
        return None
    if quantity == "micro-batch":

        def with_micro_batch(number: int) -> Goal:
            return replace(goal, global_batch=None, fixed=(*goal.fixed, ("micro_batch", number)))

        largest = _largest(lambda n: fits(model, cluster, with_micro_batch(n)), _MOST_SEQUENCES)
        return Solution(largest, "sequences", model, cluster, with_micro_batch(largest)) if largest else None
    largest = _largest(lambda n: fits(model.with_layers(n), cluster, goal), _MOST_LAYERS)
    deepest = model.with_layers(max(1, largest))
    unit = f"parameters ({counted(largest, 'layer')} of this width)"
    return Solution(deepest.total, unit, deepest, cluster, goal) if largest else None


def _largest(is_possible: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that is possible, if all smaller ones are; 0 if 1 is not."""
    low, high = 0, 1
    while high <= most and is_possible(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if middle <= most and is_possible(middle):
            low = middle
        else:
            high = middle
    return low


def _devices(model: PlannedModel, cluster: Cluster, goal: Goal) -> Solution | None:
    for nodes, devices in _sizes(cluster.devices_per_node):
        smaller = replace(cluster, nodes=nodes, devices_per_node=devices)
        if fits(model, smaller, goal):
            unit = f"devices ({nodes} x {devices} {cluster.device})"
            return Solution(nodes * devices, unit, model, smaller, goal)
    return None


def _sizes(devices_per_node: int) -> Iterator[tuple[int, int]]:
    """Machines and devices of each: powers of 2 and what is in the middle of them."""
    yield from ((1, number) for number in (1, 2, 4) if number < devices_per_node)
    for power in range(11):
        yield 1 << power, devices_per_node
        if power:
            yield 3 << (power - 1), devices_per_node
