"""Reads ``parallelism_config``: accelerate's ParallelismConfig, or a mapping of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_trainer.utils.errors import did_you_mean

PARALLEL_SIZES = {
    "tensor_parallel_size": "tp_size",
    "context_parallel_size": "cp_size",
    "sequence_parallel_size": "sp_size",
}
"""The arguments that set a parallel size, and accelerate's name of each."""

_SIZES = ("dp_replicate_size", "dp_shard_size", *PARALLEL_SIZES.values())
_OTHER_KEYS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")


def parallel_sizes(config: Any) -> dict[str, int | None]:
    """The sizes in a ``parallelism_config`` by accelerate's names. Empty without one."""
    if config is None:
        return {}
    if isinstance(config, dict):
        return {name: config.get(name) for name in _SIZES}
    return {name: getattr(config, name, None) for name in _SIZES}


def parallelism_config_problems(args: Any) -> Iterator[str]:
    """One sentence for each unknown key, wrong size, or size that contradicts another argument."""
    config = args.parallelism_config
    if config is None:
        return
    if not isinstance(config, dict) and not hasattr(config, "tp_size"):
        yield f"parallelism_config={config!r} is neither accelerate's ParallelismConfig nor a mapping."
        return
    known = {*_SIZES, *_OTHER_KEYS}
    for name in config if isinstance(config, dict) else ():
        if name not in known:
            yield f"parallelism_config: unknown key '{name}'.{did_you_mean(name, known)}"
    sizes = parallel_sizes(config)
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            yield f"parallelism_config: {name}={size!r} must be a positive integer."
    for field, key in PARALLEL_SIZES.items():
        value, other = getattr(args, field), sizes.get(key)
        if other is not None and value not in (1, other):
            yield f"{field}={value} and parallelism_config.{key}={other} contradict each other; keep one."
