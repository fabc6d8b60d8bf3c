"""The schema: DeepSpeed's own, complete, up to date; it refuses what DeepSpeed refuses."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_trainer.config.config_builder import flatten
from ds_trainer.config.schema import Field, Schema, load_schema
from ds_trainer.config.user_config import read_user_config
from tests.config.support import compiled, leaves, nested

SCHEMA = load_schema()


def problems(mapping: dict[str, Any]) -> list[str]:
    return SCHEMA.problems(read_user_config(mapping)[0])


def test_every_key_that_deepspeed_reads_is_known() -> None:
    """Names of sections and scalars are constants of runtime/config.py and what it imports."""
    import deepspeed
    from deepspeed.runtime import config, constants

    source = Path(config.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source))
    names |= set(re.findall(r"param_dict\[([A-Z_]+)\]", source)) | set(
        re.findall(r"([A-Z_]+) in param_dict(?!\[)", source)
    )
    keys = {getattr(config, name, getattr(constants, name, None)) for name in names}
    keys |= set(re.findall(r"param_dict\.get\(\s*['\"](\w+)['\"]", source))
    assert len(keys) > 25
    assert {key for key in keys if key and SCHEMA.field(key) is None} == set(), deepspeed.__version__


RIGHT = {
    "bool": st.booleans(),
    "int": st.integers(1, 4),
    "float": st.floats(0.1, 0.9),
    "str": st.sampled_from(["a", "b"]),
    "list": st.just([]),
    "dict": st.just({}),
    "any": st.none(),
}
WRONG: dict[str, list[Any]] = {
    "bool": ["maybe", 3, [1]],
    "int": ["many", 1.5, [1], {}],
    "float": ["much", [1.0], {}],
    "str": [[1], {}],
    "list": [3, {}],
    "dict": [3, []],
}
# Sections that DeepSpeed describes by a pydantic model, with that model's place.
MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
}
MODELLED = [(p, f) for p, f in leaves(SCHEMA.root) if p.split(".")[0] in MODELS and f.replaced_by is None]


def read_with_deepspeed(mapping: dict[str, Any]) -> Any:
    """DeepSpeed's model of the section; raises what that raises."""
    ((section, values),) = mapping.items()
    module, name = MODELS[section]
    return getattr(__import__(module, fromlist=[name]), name)(**values)


# Two keys may exclude each other in DeepSpeed's own validators; the rules know about those.
TOGETHER = {"zero_optimization.compute_grad_norm", "zero_optimization.offload_optimizer.ratio"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(data=st.data())
def test_accepted_values_are_read_by_deepspeed(data: st.DataObject) -> None:
    path, field = data.draw(st.sampled_from(MODELLED))
    if path in TOGETHER or path.startswith("zero_optimization.zenflow."):
        return
    value = data.draw(st.sampled_from(field.choices) if field.choices else RIGHT[field.kind])
    mapping = nested(path, value)
    assert problems(mapping) == [] or value is None
    if value is not None:
        read_with_deepspeed(mapping)


# With choices, another word is wrong; of leaf modules DeepSpeed turns anything into text.
TYPED = [(p, f) for p, f in MODELLED if (f.kind in WRONG or f.choices) and "leaf_module" not in p]


@pytest.mark.parametrize(("path", "field"), TYPED, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_types_are_refused_by_both(path: str, field: Field) -> None:
    for value in ["no such choice"] if field.choices else WRONG[field.kind]:
        (problem,) = problems(nested(path, value))
        assert path in problem
        with pytest.raises((ValueError, TypeError, AssertionError)):  # pydantic's is a ValueError
            read_with_deepspeed(nested(path, value))


LIMITED = [(p, f) for p, f in MODELLED if (f.minimum, f.maximum, f.above, f.below) != (None, None, None, None)]


@pytest.mark.parametrize(("path", "field"), LIMITED, ids=lambda value: value if isinstance(value, str) else "")
def test_values_out_of_range_are_refused_by_both(path: str, field: Field) -> None:
    outside = [
        value
        for value in (
            None if field.minimum is None else field.minimum - 1,
            None if field.maximum is None else field.maximum + 1,
            field.above,
            field.below,
        )
        if value is not None
    ]
    for value in outside:
        value = int(value) if field.kind == "int" else float(value)
        (problem,) = problems(nested(path, value))
        assert "must be" in problem
        mapping = nested(path, value)
        mapping[path.split(".")[0]].update({"enabled": True} if path.startswith("fp16.") else {})
        with pytest.raises(ValueError):
            read_with_deepspeed(mapping)


WRITTEN = [
    "true",
    "Yes",
    "ON",
    "1",
    "f",
    "maybe",
    0,
    1,
    2,
    "2",
    " 2 ",
    "3.0",
    "-1",
    "5e8",
    "0x2",
    "0.5",
    "1e-3",
    ".5",
    "2.5",
]
# int("3.0") fails in DeepSpeed's validators of these two, which get the number 3.
NO_DECIMALS = {"fp16.loss_scale_window", "fp16.min_loss_scale"}
NUMBERS = [
    (path, field)
    for path, field in TYPED
    if field.kind in ("bool", "int", "float") and path not in TOGETHER | NO_DECIMALS and ".zenflow." not in path
]


@pytest.mark.parametrize(("path", "field"), NUMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_values_are_converted_as_deepspeed_converts_them(path: str, field: Field) -> None:
    """A text or number that pydantic takes for another type has the same value here; any other is refused."""
    for value in WRITTEN:
        root = read_user_config(nested(path, value))[0]
        ours = None if SCHEMA.problems(root) else flatten(root, SCHEMA)[path].value
        try:
            theirs: Any = read_with_deepspeed(nested(path, value)).model_dump(by_alias=True)
            for name in path.split(".")[1:]:
                theirs = theirs[name]
        except ValueError:
            theirs = None
        assert (ours, type(ours)) == (theirs, type(theirs)) or (ours == theirs and field.kind != "bool"), value


def test_large_numbers_may_be_written_as_floats() -> None:
    assert problems({"zero_optimization": {"reduce_bucket_size": 5e8}}) == []


def test_names_and_aliases() -> None:
    for name in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        assert SCHEMA.canonical(f"zero_optimization.{name}") == "zero_optimization.stage3_prefetch_bucket_size"
        assert SCHEMA.field(f"zero_optimization.{name}") is not None
    assert SCHEMA.field("zero_optimization.nothing") is None
    assert SCHEMA.field("optimizer.params.anything") is not None
    assert SCHEMA.canonical("optimizer.params.lr") == "optimizer.params.lr"


def test_auto_is_accepted_anywhere() -> None:
    for path, field in leaves(SCHEMA.root):
        if field.replaced_by is None:
            assert problems(nested(path, "auto")) == [], path


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[Schema]:
    """The schema in an environment with a version of DeepSpeed that it does not describe."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda package: "0.99.0")
        load_schema.cache_clear()
        yield load_schema()
    load_schema.cache_clear()


def test_another_version_gets_unknown_keys_with_a_warning(
    another_version: Schema, caplog: pytest.LogCaptureFixture
) -> None:
    written: dict[str, Any] = {"brand_new_key": True, "zero_optimization": {"stage": "two", "newer": 1}}
    (problem,) = another_version.problems(read_user_config(written)[0])
    assert "stage" in problem  # what the description knows is still checked
    written["zero_optimization"]["stage"] = 2
    compiled(deepspeed=written)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "brand_new_key (deepspeed.brand_new_key), zero_optimization.newer (deepspeed." in warning
    assert "DeepSpeed 0.99.0 is installed" in warning and SCHEMA.version in warning


def test_another_version_compiles_with_unknown_keys(another_version: Schema) -> None:
    config = compiled(deepspeed={"brand_new_key": True, "zero_optimization": {"newer": 1}})
    assert config.to_dict()["brand_new_key"] is True
    assert config.to_dict()["zero_optimization"]["newer"] == 1


def test_reading_the_schema_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ds_trainer.config.schema import load_schema; load_schema();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
