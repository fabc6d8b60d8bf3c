"""What the options of ``ds-trainer plan`` and a recipe fix of a plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ds_trainer.arguments.enums import OptimizerNames
from ds_trainer.config.user_config import read_user_config
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.candidate import FEATURES, state_bytes
from ds_trainer.planner.cluster import Cluster
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.units import counted, whole_number

SIZES = {
    "zero-stage": ("stage", "ZeRO stage"),
    "micro-batch": ("micro_batch", "sequences of a replica in a micro-batch"),
    "tensor-parallel-size": ("tp", "tensor-parallel ranks"),
    "context-parallel-size": ("cp", "context-parallel ranks"),
    "sequence-parallel-size": ("sp", "sequence-parallel ranks"),
    "expert-parallel-size": ("ep", "ranks that divide the experts"),
}
"""Options that fix a value of a candidate: its name, and help."""


def fixed_values(options: argparse.Namespace, recipe: Recipe | None) -> Iterator[tuple[str, object]]:
    """Values of :class:`~ds_trainer.planner.candidate.Candidate` that options fix, and the optimizer of a recipe."""
    for argument, (name, _) in SIZES.items():
        value = getattr(options, argument.replace("-", "_"))
        if value is not None:
            yield name, value
    if options.offload is not None:
        yield "offload_optimizer", options.offload != "none"
        yield "offload_param", options.offload == "all"
    if options.offload_to is not None:
        yield "optimizer_on_nvme", options.offload_to == "nvme"
        if options.offload_to == "cpu" or options.offload == "all":
            yield "param_on_nvme", options.offload_to == "nvme"
    layers = options.activation_checkpointing
    if layers is not None:
        yield "checkpointing", layers > 0
        yield "every_n_layers", max(1, layers)
    for name in FEATURES:
        value = getattr(options, name)
        if value is not None:
            yield name, value == "on"
    if recipe is not None and recipe.arguments.get("deepspeed") is not None:  # a plan does not change this file
        # Ranks of hpZ in a DeepSpeed configuration; 1 without it.
        config = _deepspeed(recipe)
        zero = config.get("zero_optimization")
        yield "hpz", int((zero if isinstance(zero, dict) else {}).get("zero_hpz_partition_size") or 1)
    optimizer = options.optim or _optimizer(recipe)
    if optimizer is not None:
        yield "state_bytes", state_bytes(optimizer)


def given_options(options: argparse.Namespace) -> list[str]:
    """Those of :func:`add_options` that were given."""
    names = [*SIZES, "offload", "offload-to", "activation-checkpointing", "optim"]
    names += [name.replace("_", "-") for name in FEATURES]
    return [f"--{name}" for name in names if getattr(options, name.replace("-", "_")) is not None]


def refuse_contradictions(options: argparse.Namespace, cluster: Cluster, fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError if options exclude each other."""
    if options.solve != "devices":
        ParallelLayout(cluster.world_size, *(fixed.get(axis, 1) for axis in ("tp", "cp", "sp", "ep")))
        if fixed.get("tp", 1) > cluster.devices_per_node:
            raise ConfigError(
                f"--tensor-parallel-size {fixed['tp']} is more than the {counted(cluster.devices_per_node, 'device')} "
                "of a machine. Tensor parallelism over the network is too slow: use --context-parallel-size or "
                "--sequence-parallel-size for the rest."
            )
    zero = fixed.get("stage")
    if zero is not None and options.offload == "all" and zero != 3:
        raise ConfigError(f"--offload all needs --zero-stage 3, but it is {zero}.")
    if zero == 0 and options.offload == "optimizer":
        raise ConfigError("--offload optimizer needs --zero-stage 1 or higher, but it is 0.")
    hpz, shards = fixed.get("hpz", 1), cluster.world_size // fixed.get("tp", 1)
    if hpz > 1 and (zero not in (None, 3) or (options.solve != "devices" and shards % hpz)):
        raise ConfigError(
            f"zero_hpz_partition_size={hpz} in the recipe's DeepSpeed configuration needs --zero-stage 3 and must "
            f"divide the {counted(shards, 'device')} that share the weights. Use those of a machine, or remove it."
        )
    if options.offload_to == "nvme" and (options.offload == "none" or zero not in (None, 3)):
        given = "--offload none" if options.offload == "none" else f"--zero-stage {zero}"
        raise ConfigError(f"--offload-to nvme needs --zero-stage 3 and something that is offloaded, but not {given}.")
    if fixed.get("offload_activations") and fixed.get("checkpointing") is False:
        raise ConfigError("--offload-activations on needs --activation-checkpointing on: it moves inputs of layers.")
    precision = options.precision or ("bf16" if cluster.peaks.bf16 else "fp16")
    if not cluster.peaks.peak("tf32" if precision == "fp32" and cluster.peaks.tf32 else precision):
        raise ConfigError(f"--precision {precision}: {cluster.device} has no fast units for it. Choose another one.")
    if zero == 0 and (precision == "fp16" or (precision == "bf16" and fixed.get("tp", 1) > 1)):
        what = "fp16" if precision == "fp16" else "bf16 and tensor parallelism"
        raise ConfigError(f"--zero-stage 0 does not work with {what} in DeepSpeed. Use --zero-stage 1.")


def add_options(parser: argparse.ArgumentParser, count: Any, stage: Any) -> None:
    """The options.

    Args:
        parser: gets them.
        count: type of a positive integer.
        stage: type of a ZeRO stage.
    """
    add = parser.add_argument_group("only plans with").add_argument
    for name, (short, text) in SIZES.items():
        add(f"--{name}", type=stage if short == "stage" else count, metavar="N", help=text)
    add("--offload", choices=("none", "optimizer", "all"), help="what is in host memory or on NVMe")
    add("--offload-to", choices=("cpu", "nvme"), help="where that is; default: cpu, or nvme if it is needed")
    add("--activation-checkpointing", type=_layers, metavar="on|off|N", help="of all layers, none, or 1 in N")
    add("--chunked-loss", choices=("on", "off"), help="logits of some tokens at a time")
    add("--tiled-mlp", choices=("on", "off"), help="MLPs on tiles of tokens")
    add("--offload-activations", choices=("on", "off"), help="inputs of checkpointed layers in host memory")
    add("--optim", type=_optimizer_name, metavar="NAME", help="optimizer; default: that of the recipe, or AdamW")


def _layers(text: str) -> int:
    """One in how many layers is checkpointed; 0 for none."""
    number = {"off": 0, "on": 1}.get(text) if text in ("off", "on") else whole_number(text) or None
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not on, off or a positive integer")
    return number


def _optimizer_name(text: str) -> str:
    names = [str(name) for name in OptimizerNames]
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is no optimizer of TrainingArguments.{did_you_mean(text, names)}")
    return text


def _optimizer(recipe: Recipe | None) -> str | None:
    """The optimizer that a recipe names."""
    if recipe is None:
        return None
    block = _deepspeed(recipe).get("optimizer")
    named = block.get("type") if isinstance(block, dict) else None
    name = recipe.arguments.get("optim") or named
    return None if name is None else str(name)


def not_covered(recipe: Recipe) -> list[str]:
    """What a recipe asks for and the estimates do not know, one sentence each."""
    config = _deepspeed(recipe)
    zero = config.get("zero_optimization")
    asked = {**recipe.arguments, **config, **(zero if isinstance(zero, dict) else {})}
    optimizer = asked.get("offload_optimizer")
    if isinstance(optimizer, dict):
        asked["super_offload"] = optimizer.get("super_offload")
    texts = [text for names, text in _NOT_COVERED if any(_is_on(asked.get(name)) for name in names)]
    if recipe.distillation is not None:
        texts.append("the teacher: its weights, and a forward pass of it in each step")
    if recipe.model.quantization is not None:
        texts.append("the time in which weights of the base are made of their 4 or 8 bits")
    if recipe.task.name == "dpo":
        texts.append("the reference model" + ("" if recipe.model.peft else ", which is a second copy of the weights"))
    return [f"{recipe.path}: the estimates do not cover {text}." for text in texts]


_NOT_COVERED = (
    (("zero_quantized_weights", "zero_quantized_gradients"), "quantized communication (ZeRO++), which is faster"),
    (
        ("zenflow",),
        "ZenFlow: the optimizer step overlaps with the next ones, and selected gradients stay on the device",
    ),
    (("super_offload",), "SuperOffload, which splits the optimizer between device and host"),
    (("compile",), "DeepSpeed's compiler, which decides what is kept"),
)


def _is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(value.get(name, True) for name in ("enabled", "deepcompile"))
    return value not in (None, False, 0, 1) or value is True


def _deepspeed(recipe: Recipe) -> dict[str, Any]:
    """The DeepSpeed configuration that a recipe has; empty without one."""
    given = recipe.arguments.get("deepspeed")
    return {} if given is None else dict(read_user_config(given)[0].plain())
