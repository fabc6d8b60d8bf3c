"""The schema against DeepSpeed's sources: no key is missing that they read, and none is there that they refuse."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.schema import Field, load_schema
from ds_trainer.config.user_config import read_user_config

SCHEMA = load_schema()
REMOVED = {path.rpartition(".")[2] for path in SCHEMA.removed}


def names_in(section: Field) -> Iterator[str]:
    """All keys at and below ``section``."""
    yield from section.aliases
    for name, below in section.fields.items():
        yield name
        if below.kind == "section":
            yield from names_in(below)


def leaves(section: Field, path: str = "") -> Iterator[tuple[str, Field]]:
    for name, field in section.fields.items():
        full = f"{path}.{name}" if path else name
        if field.kind == "section":
            yield from leaves(field, full)
        else:
            yield full, field


def keys_read(module: ModuleType) -> set[str]:
    """Texts by which ``module`` looks into mappings: ``get_scalar_param(_, KEY, _)``, ``_.get(KEY)``, ``_[KEY]`` and
    ``KEY in _``, where KEY is a text or a constant of the module."""

    def text(node: ast.AST) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        found = getattr(module, node.id, None) if isinstance(node, ast.Name) else None
        return found if isinstance(found, str) else None

    keys: set[str | None] = set()
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            keys |= {text(node.args[0])} if called == "get" else set()
            keys |= {text(node.args[1])} if called.startswith("get_scalar_param") else set()
        elif isinstance(node, ast.Subscript):
            keys.add(text(node.slice))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            keys.add(text(node.left))
    return {key for key in keys if key is not None}


# Where DeepSpeed reads the sections that no pydantic model describes, least number of keys found there, and texts that
# are no keys.
SOURCES = [
    ("deepspeed.runtime.config", "", 40, {"max_grad_norm"}),  # of apex's fused optimizers, with a warning
    ("deepspeed.runtime.activation_checkpointing.config", "", 7, set()),
    ("deepspeed.profiling.config", "", 8, set()),
    ("deepspeed.runtime.swap_tensor.aio_config", "", 7, set()),
    ("deepspeed.runtime.model_checkpointing.config", "", 9, set()),
    ("deepspeed.module_inject.auto_ep_config", "expert_parallel", 25, {".", "expert_parallel"}),
    ("deepspeed.runtime.zero.config", "", 3, {"allgather_size"}),  # of a form from before the section was a mapping
    ("deepspeed.runtime.precision_config", "", 3, set()),
    ("deepspeed.monitor.config", "", 1, set()),
    ("deepspeed.comm.config", "", 1, set()),
]


@pytest.mark.parametrize(("name", "section", "least", "no_keys"), SOURCES, ids=[source[0] for source in SOURCES])
def test_no_key_is_missing(name: str, section: str, least: int, no_keys: set[str]) -> None:
    keys = keys_read(importlib.import_module(name))
    assert len(keys) >= least, "the sources are read in another way now; so must this test"
    field = SCHEMA.field(section) if section else SCHEMA.root
    assert field is not None
    assert keys - no_keys - REMOVED - set(names_in(field)) == set()


RIGHT: dict[str, Any] = {"bool": True, "int": 2, "float": 0.5, "str": "text", "list": [], "dict": {}, "any": None}
# Sections that DeepSpeed judges as a whole, or only with others beside them: the rules are about those.
AS_A_WHOLE = ("expert_parallel", "data_efficiency", "autotuning", "optimizer", "scheduler", "train_batch_size")
TOGETHER = {
    "zero_optimization.compute_grad_norm",  # without clipping only
    "zero_optimization.offload_optimizer.ratio",
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "aio.use_gds",  # on GPUs
    "tensor_parallel.dtype",  # a torch.dtype, which no JSON holds
}
ALONE = [
    (path, field)
    for path, field in leaves(SCHEMA.root)
    if field.replaced_by is None and not path.startswith(AS_A_WHOLE) and path not in TOGETHER
]


def read_with_deepspeed(mapping: dict[str, Any]) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, **mapping})


@pytest.mark.parametrize(("path", "field"), ALONE, ids=[path for path, _ in ALONE])
def test_deepspeed_reads_every_key(path: str, field: Field) -> None:
    """Any one key of the schema, with a right value and with its default, in an otherwise empty configuration."""
    right = field.choices[-1] if field.choices else "auto" if field.auto_is_a_value else RIGHT[field.kind]
    for value in (right, field.default):
        if value is None:
            continue
        mapping: dict[str, Any] = {path.rpartition(".")[2]: value}
        for name in reversed(path.split(".")[:-1]):
            mapping = {name: mapping}
        assert SCHEMA.problems(read_user_config(mapping)[0]) == []
        read_with_deepspeed(mapping)


@pytest.mark.parametrize("path", sorted(SCHEMA.removed))
def test_deepspeed_refuses_removed_keys_too(path: str) -> None:
    """Those that it names itself; a few were dropped before it began to."""
    from deepspeed.runtime import config

    if path.removeprefix("zero_optimization.") not in {
        *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *config._REMOVED_ZERO_CONFIG_KEYS,
    }:
        assert SCHEMA.field(path) is None
        return
    name = path.rpartition(".")[2]
    with pytest.raises(Exception, match=r"removed|no longer"):
        read_with_deepspeed({"zero_optimization": {name: True}} if "." in path else {name: {"enabled": True}})


def test_each_alias_is_another_name_of_a_key() -> None:
    count = 0
    for path, section in [("", SCHEMA.root), *((name, field) for name, field in SCHEMA.root.fields.items())]:
        for alias, name in section.aliases.items():
            count += 1
            prefix = f"{path}." if path else ""
            assert name in section.fields and alias not in section.fields
            assert SCHEMA.canonical(prefix + alias) == prefix + name
            value = Located(section.fields[name].default, "here")
            both = Located({alias: value, name: value}, "here")
            (problem,) = SCHEMA.problems(Located({path: both}, "here") if path else both)
            assert f"another name of {prefix}" in problem
    assert count > 0
