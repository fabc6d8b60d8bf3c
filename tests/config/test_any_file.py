"""Any file that DeepSpeed's schema lets through compiles, or is refused in words: never another exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_trainer.config.schema import Field, load_schema
from ds_trainer.utils.errors import ConfigError
from tests.config.support import compiled, leaves, machine

NUMBERS = {"int": st.integers(0, 9), "float": st.floats(0, 2)}
KINDS = {
    **NUMBERS,
    "bool": st.booleans(),
    "str": st.sampled_from(["", "a", "AdamW", "sgd", "Muon", "lion", "WarmupLR", "WarmupDecayLR"]),
    "list": st.lists(st.integers(0, 2), max_size=2),
    "dict": st.just({}),
    "any": st.none() | st.integers(0, 3) | st.just("x"),
}


LEAVES = leaves(load_schema().root)
PARAMETERS = [(f"optimizer.params.{name}", Field("any")) for name in ("lr", "betas", "eps", "torch_adam", "foo")]
SCHEDULE = [(f"scheduler.params.{name}", Field("any")) for name in ("warmup_num_steps", "total_num_steps")]


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A few keys, with values of their kind, of any kind, or "auto"."""
    root: dict[str, Any] = {}
    for path, field in draw(st.lists(st.sampled_from(LEAVES + PARAMETERS * 4 + SCHEDULE * 4), max_size=7)):
        right = st.sampled_from(field.choices) if field.choices else KINDS.get(field.kind, st.none())
        value = draw(right | st.just("auto") | st.one_of(*KINDS.values()))
        *parents, name = path.split(".")
        section = root
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return root


@pytest.mark.extended
@settings(max_examples=600, deadline=None)
@given(
    file=files(),
    device=st.sampled_from(["cpu", "cuda"]),
    world=st.sampled_from([1, 2, 8]),
    arguments=st.fixed_dictionaries(
        {},
        optional={
            "zero_stage": st.sampled_from([0, 1, 2, 3]),
            "bf16": st.just(True),
            "offload_optimizer": st.sampled_from(["cpu", "nvme"]),
            "optim": st.sampled_from(["sgd", "muon", "lion_32bit"]),
            "tensor_parallel_size": st.sampled_from([1, 2]),
        },
    ),
)
@example({"comet": {"api_key": "x"}}, "cpu", 1, {})
@example({"zero_optimization": {"zenflow": {"steps_per_epoch": "auto"}}}, "cpu", 1, {})
def test_any_file(file: dict[str, Any], device: str, world: int, arguments: dict[str, Any]) -> None:
    world *= arguments.get("tensor_parallel_size", 1)
    try:
        config = compiled(world, device, environment=machine(), deepspeed=file, **arguments)
    except ConfigError as error:
        assert error.problems and all(problem.endswith((".", "?")) for problem in error.problems), error.problems
        return
    recompiled = compiled(world, device, environment=machine(), deepspeed=json.dumps(config.to_dict()), **arguments)
    assert recompiled.to_dict() == config.to_dict()
    if isinstance(config.get("comet.api_key"), str):
        with pytest.raises(ConfigError, match="mask for a secret"):
            compiled(world, device, environment=machine(), deepspeed=config.to_json(), **arguments)
    else:
        assert config.to_json() == json.dumps(config.to_dict(), indent=2)
