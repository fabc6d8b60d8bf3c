"""The schema: DeepSpeed's own, complete, up to date; it refuses what DeepSpeed refuses."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config import schema as schema_module
from ds_trainer.config.schema import SNAPSHOT, Field, Schema, load_schema
from ds_trainer.config.user_config import read_user_config
from tests.config.support import leaves, nested

SCHEMA = load_schema()


def problems(mapping: dict[str, Any]) -> list[str]:
    return SCHEMA.problems(read_user_config(mapping)[0])


def test_the_snapshot_is_that_of_the_installed_deepspeed() -> None:
    from ds_trainer.config.schema_build import build_schema

    snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert snapshot["deepspeed"] == importlib.metadata.version("deepspeed")
    assert snapshot == json.loads(json.dumps(build_schema()))


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


def read_with_deepspeed(mapping: dict[str, Any]) -> None:
    """Raises what DeepSpeed's model of the section raises."""
    ((section, values),) = mapping.items()
    module, name = MODELS[section]
    getattr(__import__(module, fromlist=[name]), name)(**values)


# Two keys may exclude each other in DeepSpeed's own validators; the rules know about those.
TOGETHER = {"zero_optimization.compute_grad_norm", "zero_optimization.offload_optimizer.ratio"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(data=st.data())
def test_what_is_accepted_deepspeed_reads(data: st.DataObject) -> None:
    path, field = data.draw(st.sampled_from(MODELLED))
    if path in TOGETHER or path.startswith("zero_optimization.zenflow."):
        return
    value = data.draw(st.sampled_from(field.choices) if field.choices else RIGHT[field.kind])
    mapping = nested(path, value)
    assert problems(mapping) == [] or value is None
    if value is not None:
        read_with_deepspeed(mapping)


@pytest.mark.parametrize(("path", "field"), MODELLED, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_types_are_refused_by_both(path: str, field: Field) -> None:
    for value in WRONG.get(field.kind, []):
        if field.choices or path.startswith("zero_optimization.leaf_module"):
            continue  # (leaf modules: DeepSpeed turns anything into text)
        (problem,) = problems(nested(path, value))
        assert path in problem
        with pytest.raises(Exception):  # noqa: B017  # pydantic's, or an assertion
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


def test_stricter_than_deepspeed_on_purpose() -> None:
    """Pydantic turns text and numbers into one another; who writes "2", or 1 for true, has mistaken something."""
    for path, value in (
        ("zero_optimization.stage", "2"),
        ("bf16.enabled", 1),
        ("bf16.enabled", "true"),
        ("fp16.initial_scale_power", True),
    ):
        assert len(problems(nested(path, value))) == 1
        read_with_deepspeed(nested(path, value))


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


def test_another_version_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def build() -> dict[str, Any]:
        built.append(1)
        description = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
        description["root"]["fields"]["brand_new_key"] = {"kind": "bool", "default": False}
        return dict(description)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ds_trainer.config.schema_build.build_schema", build)
    monkeypatch.setattr(schema_module.importlib.metadata, "version", lambda package: "0.99.0")
    for _ in range(2):
        load_schema.cache_clear()
        newer = load_schema()
        assert newer.problems(Located({"brand_new_key": Located(True, "x")}, "x")) == []
    assert built == [1]
    assert [path.name for path in (tmp_path / "ds_trainer").iterdir()] == ["deepspeed-0.99.0-2.json"]
    monkeypatch.undo()
    load_schema.cache_clear()
    assert isinstance(load_schema(), Schema)


def test_reading_the_schema_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ds_trainer.config.schema import load_schema; load_schema();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
