"""A file against the run, for every key: neither side silently wins (docs/how-to/configuration.md).

Two walks, of what the compiler writes in many modes and of the schema. A new key is in them without a new example.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.schema import Field, load_schema
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled, leaves, machine, nested, said

SCHEMA = load_schema()
PRECISIONS: list[dict[str, Any]] = [{}, {"bf16": True}, {"fp16": True, "device": "cuda"}, {"torch_autocast": "bf16"}]
STEPS = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}}
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": "/nvme"}
MODES: list[dict[str, Any]] = [
    {},
    *({"optim": optim} for optim in ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "muon")),
    *({"optim": optim, "device": "cuda"} for optim in ("lion_32bit", "lamb")),
    {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5},
    {"optim": "adafactor"},
    {"optim_args": "amsgrad=True"},
    {"client_optimizer": "an object", "offload_optimizer": "cpu"},
    {"offload_optimizer": "cpu"},
    {"offload_param": "cpu", "offload_optimizer": "none"},
    NVME,
    {"grad_accum_dtype": "fp32", "communication_data_type": "fp32"},
    {"tensor_parallel_size": 2, "world": 4},
    {"gradient_accumulation_steps": 64, "per_device_train_batch_size": 2, "world": 64},
    {"deepspeed": {"dataloader_drop_last": "auto", "tensor_parallel": {"autotp_size": "auto"}}},
    {"deepspeed": STEPS, "max_steps": 10, "warmup_steps": 3},
    {"deepspeed": STEPS, "total_steps": 10},
]


def compiles(arguments: dict[str, Any]) -> CompiledConfig | None:
    try:
        return compiled(environment=machine(), **arguments)
    except ConfigError:
        return None


def another(path: str, value: Any) -> Any:
    """A value of the same kind, which the schema accepts."""
    field = SCHEMA.field(path) or Field("any")
    if path == "optimizer.type":
        return "NAdam"
    if path == "scheduler.type":
        return "WarmupCosineLR"
    if isinstance(value, bool):
        return not value
    if field.choices:
        same = ("fp32", "float32", "float") if "32" in str(value) else ("bf16", "bfloat16")
        return next(choice for choice in field.choices if choice != value and str(choice).split(".")[-1] not in same)
    if isinstance(value, list):
        return [*value[:-1], 0.5] if value else ["torch.nn.Linear"]
    return value / 2 or 0.5 if isinstance(value, float) else value + 2 if isinstance(value, int) else f"{value}2"


def with_file(arguments: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``arguments`` with a file that has ``value`` at ``path``, beside what it has."""
    file = {
        key: dict(below) if isinstance(below, dict) else below for key, below in arguments.get("deepspeed", {}).items()
    }
    *parents, name = path.split(".")
    section = file
    for parent in parents:
        section[parent] = dict(section.get(parent, {}))
        section = section[parent]
    section[name] = value
    return {**arguments, "environment": machine(), "deepspeed": file}


@pytest.mark.extended
def test_neither_side_silently_wins() -> None:
    """Every value that the compiler writes in any mode, as the file has it too, or has another one."""
    walked: dict[str, set[str]] = {}
    seen = set()
    # The arguments of every mode that can run.
    stages = ({}, *({"zero_stage": stage} for stage in range(4)))
    combined = [{**precision, **mode, **stage} for precision, mode, stage in product(PRECISIONS, MODES, stages)]
    for arguments in [arguments for arguments in combined if compiles(arguments) is not None]:
        config = compiled(environment=machine(), **arguments)
        for path in config.paths():
            value, origin = config.get(path), config.origin(path)
            case = (path, repr(value), str(origin), arguments.get("device"))
            if case in seen:
                continue
            seen.add(case)
            same = with_file(arguments, path, value)
            assert compiled(**same).to_dict() == config.to_dict(), (path, arguments)

            wanted = another(path, value)
            other = with_file(arguments, path, wanted)
            found = compiles({key: value for key, value in other.items() if key != "environment"})
            bound = origin.kind == "argument" or origin.source == "default"
            walked.setdefault(path, set()).add("bound" if bound else "refused" if found is None else "free")
            if found is not None:
                assert found.get(path) == wanted, (path, arguments)
                assert not bound or (path == "optimizer.type" and "optim" not in arguments), (path, arguments)
            elif bound:
                described = origin.detail.partition("=")[0]
                assert any(
                    path in text and described in text and f"deepspeed.{path}" in text for text in said(**other)
                ), (path, said(**other))
    bound = {path for path, kinds in walked.items() if kinds == {"bound"}}
    assert {"bf16.enabled", "gradient_clipping", "optimizer.params.betas", "tensor_parallel.autotp_size"} < bound
    assert {"optimizer.params.lr", "zero_optimization.offload_param.nvme_path", "torch_autocast.dtype"} < bound
    assert "refused" in walked["scheduler.params.total_num_steps"] and "free" in walked["zero_optimization.stage"]
    assert len(walked) > 40


# Keys that are compared with the run and then left out, with the value of a run of 2 ranks.
COMPARED = {
    "train_batch_size": 16,
    "tensor_parallel.autotp_size": 1,
    "tensor_parallel.tp.tp_size": 1,
    "sequence_parallel_size": 1,
}


def a_value(path: str, field: Field) -> Any:
    """A value that is not the default, if there is one."""
    if path in COMPARED:
        return COMPARED[path]
    if field.choices:
        return next((choice for choice in field.choices if choice != field.default), field.choices[0])
    low = field.minimum if field.minimum is not None else field.above if field.above is not None else 0
    number = low + 2 if field.below is None and field.maximum is None else low + 0.25
    return {"bool": field.default is not True, "int": int(low) + 2, "float": number, "list": [], "dict": {}}.get(
        field.kind, "text"
    )


LEAVES = [(path, field) for path, field in leaves(SCHEMA.root) if not (field.refused or field.replaced_by)]


@pytest.mark.parametrize(("path", "field"), LEAVES, ids=[path for path, _ in LEAVES])
def test_every_key_reaches_deepspeed_or_is_named(path: str, field: Field) -> None:
    value = a_value(path, field)
    for device in ("cpu", "cuda"):
        arguments = {"world": 2, "device": device, "environment": machine(), "deepspeed": nested(path, value)}
        config = compiles({key: value for key, value in arguments.items() if key != "environment"})
        if config is None:
            assert any(path.rpartition(".")[0] in text and path.split(".")[-1] in text for text in said(**arguments))
        elif path in COMPARED and path not in config:
            different = nested(path, value + 1)
            assert any(
                path in text and f"{value + 1}" in text for text in said(**{**arguments, "deepspeed": different})
            )
        else:
            assert config.get(path) == value
            assert str(config.origin(path)).endswith(f"deepspeed.{path}") or config.origin(path).kind != "user"
