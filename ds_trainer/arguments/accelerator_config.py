"""``accelerator_config``: the settings of accelerate's loaders, with what each of them means on a DeepSpeed engine.

The source of the names and defaults is ``AcceleratorConfig`` of transformers 5.
"""

from __future__ import annotations

import copy
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ds_trainer.arguments.checks.type_checks import located
from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.utils.errors import ConfigError, Problems, did_you_mean
from ds_trainer.utils.files import parse_json, read_user_file, shortened


@dataclass
class AcceleratorConfig:
    """The value of ``accelerator_config`` once the arguments are complete; fields that were not given have defaults."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as a copy."""
        return copy.deepcopy(vars(self))


EFFECTS = {
    "split_batches": "True: the batch sizes per device are those of all replicas together, and each takes its part.",
    "dispatch_batches": "Every rank reads its own part of the data, which gives the same batches.",
    "even_batches": "Uneven batches are exact: no sample is used twice or left out.",
    "use_seedable_sampler": "The order of samples always follows from seed and epoch.",
    "non_blocking": "Copies overlap with compute if memory is pinned (`dataloader_pin_memory`).",
    "gradient_accumulation_kwargs": "`num_steps` is another name of `gradient_accumulation_steps`. `sync_each_batch`, "
    "`adjust_scheduler` and `sync_with_dataloader` have no effect: the ZeRO stage decides when gradients are reduced.",
    "use_configured_state": "No effect: an `accelerate` state that the script created is used in any case, and none is "
    "needed, because the engine is DeepSpeed's own.",
}
"""What each field does in the Trainer's own loaders and engine."""
_ACCUMULATION = {"num_steps": int, "sync_each_batch": bool, "adjust_scheduler": bool, "sync_with_dataloader": bool}


def accelerator_config_of(value: Any) -> AcceleratorConfig:
    """The settings in ``value``.

    Args:
        value: None, an object or class with the fields as attributes, a mapping, its JSON text, or the path of a JSON
            or YAML file.

    Raises:
        ConfigError: the file or text cannot be read, or a name or value is wrong; one sentence for each.
    """
    if isinstance(value, AcceleratorConfig):
        values, source = vars(value), "accelerator_config"
    else:
        values, source = _values(value)
    problems = Problems(_key_problems(source, values, typing.get_type_hints(AcceleratorConfig)))
    if not problems:
        source = f"{source}: gradient_accumulation_kwargs"
        accumulation = values.get("gradient_accumulation_kwargs") or {}
        problems.extend(_key_problems(source, accumulation, _ACCUMULATION))
        if not problems and accumulation.get("num_steps", 1) < 1:
            problems.add(f"{source}: num_steps={accumulation['num_steps']} must be a positive integer.")
    problems.raise_if_any()
    return AcceleratorConfig(**copy.deepcopy(values))


def accelerator_config_problems(args: Any) -> Iterator[str]:
    """One sentence for each problem of ``args.accelerator_config``, also next to other arguments."""
    try:
        config = accelerator_config_of(args.accelerator_config)
    except ConfigError as error:
        yield from error.problems
        return
    steps = (config.gradient_accumulation_kwargs or {}).get("num_steps", 1)
    if steps != 1 and args.gradient_accumulation_steps not in (1, steps):
        yield (
            f"accelerator_config: num_steps={steps} in gradient_accumulation_kwargs contradicts "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}; keep only the second."
        )
    if config.split_batches and args.auto_find_batch_size:
        yield (
            "accelerator_config: split_batches=True fixes the batch of all replicas, which auto_find_batch_size=True "
            "would make smaller. Leave split_batches out: the search keeps the global batch."
        )


def complete_accelerator_config(args: Any) -> None:
    """Make the value an :class:`AcceleratorConfig`, and apply ``num_steps``; it is 1 afterwards, as in transformers."""
    config = accelerator_config_of(args.accelerator_config)
    accumulation = config.gradient_accumulation_kwargs or {}
    if accumulation.get("num_steps", 1) != 1:
        args.gradient_accumulation_steps = accumulation["num_steps"]
        args.origins.setdefault("gradient_accumulation_steps", args.where("accelerator_config"))
        accumulation["num_steps"] = 1
    args.accelerator_config = config


def accelerator_config(args: Any) -> AcceleratorConfig:
    """The settings in force, also where a script assigned a mapping after the arguments were made.

    Raises:
        ConfigError: what was assigned is wrong; one sentence for each problem.
    """
    config = args.accelerator_config
    return config if isinstance(config, AcceleratorConfig) else accelerator_config_of(config)


def replica_batch_size(args: Any, name: str, replicas: int) -> int:
    """Samples of one replica in a forward pass: the argument ``name``, or its part with ``split_batches``.

    Args:
        args: checked arguments.
        name: ``per_device_train_batch_size`` or ``per_device_eval_batch_size``.
        replicas: number of data-parallel replicas.

    Raises:
        ConfigError: the batch cannot be divided by ``replicas``.
    """
    size: int = getattr(args, name)
    if not accelerator_config(args).split_batches:
        return size
    if size % replicas:
        raise ConfigError(
            f"{name}={size} cannot be divided by {replicas} data-parallel replicas, as split_batches=True of "
            f"accelerator_config requests. Set {name} to a multiple of {replicas}, or split_batches=False."
        )
    return size // replicas


def split_problems(args: Any, replicas: int) -> list[str]:
    """One sentence for each batch size in use that ``split_batches`` cannot divide by ``replicas``."""
    problems = Problems()
    evaluates = args.do_eval or args.given("per_device_eval_batch_size")
    for name in ("per_device_train_batch_size", *(["per_device_eval_batch_size"] if evaluates else [])):
        with problems.collecting():
            replica_batch_size(args, name, replicas)
    return list(problems)


def _values(value: Any) -> tuple[dict[str, Any], str]:
    """The settings in ``value`` by name, and how an error names it."""
    source = "accelerator_config"
    if value is None:
        return {}, source
    if isinstance(value, Mapping):
        return dict(value), source
    if isinstance(value, str | os.PathLike):
        return _of_text(os.fspath(value))
    if type(value).__module__ == "builtins" and not isinstance(value, type):
        raise ConfigError(
            f"accelerator_config={value!r} is neither an object with the fields of accelerate's AcceleratorConfig as "
            "attributes, nor a mapping, JSON text, or the path of a JSON or YAML file."
        )
    names = [item.name for item in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", ()))
    public = [name for name in dict.fromkeys((*names, *EFFECTS)) if not name.startswith("_") and hasattr(value, name)]
    return {name: getattr(value, name) for name in public if not callable(getattr(value, name))}, source


def _of_text(text: str) -> tuple[dict[str, Any], str]:
    source = f"accelerator_config={text!r}"
    if text.lstrip().startswith("{"):
        try:
            return dict(parse_json(text)), "accelerator_config"
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{shortened(source)} is not valid JSON ({error}); write it like '{{\"split_batches\": false}}'."
            ) from None
    root, problems = read_yaml(read_user_file(text, source, "JSON or YAML file"), text)  # JSON is YAML too
    if problems:
        raise ConfigError(problems)
    if not isinstance(root.value, dict):
        raise ConfigError(f"{source}: the file must be a mapping of {', '.join(EFFECTS)}.")
    return root.plain(), source


def _key_problems(source: str, values: dict[str, Any], hints: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each value of another type than its hint, and for each unknown name."""
    for name, hint in hints.items():
        try:
            if name in values:
                read_as(located(values[name], hint), hint)
        except WrongType as error:
            yield f"{source}: {name}={values[name]!r}: {error}."
    for name in values:
        if name not in hints:
            yield f"{source}: unknown key '{name}'.{did_you_mean(name, hints)} Known keys: {', '.join(hints)}."
