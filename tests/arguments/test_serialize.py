"""Arguments as plain data: everything that JSON can hold, no secrets, and the result of transformers' to_dict."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.arguments.enums import DebugOption, IntervalStrategy
from ds_trainer.arguments.serialize import Serializable, plain
from ds_trainer.arguments.training_arguments import TrainingArguments


@dataclass
class Inner:
    path: Path
    strategy: IntervalStrategy


class WithToDict:
    def to_dict(self) -> dict[str, Any]:
        return {"kind": DebugOption.UNDERFLOW_OVERFLOW}


class WithToJson:
    def to_json(self) -> dict[str, Any]:
        return {"tp_size": 2}


@dataclass(repr=False)
class Args(Serializable):
    value: Any = None
    hub_token: str | None = None
    derived: int = field(default=3, init=False)
    train_batch_size: int = 5  # type: ignore[assignment]
    eval_batch_size: int = 6  # type: ignore[assignment]


def torch_dtype() -> Any:
    import torch

    return torch.bfloat16


CASES: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (1.5, 1.5),
    (IntervalStrategy.EPOCH, "epoch"),
    ([DebugOption.UNDERFLOW_OVERFLOW, "x"], ["underflow_overflow", "x"]),
    ((1, 2), [1, 2]),
    pytest.param({"b", "a"}, ["a", "b"], id="set"),
    (Path("a") / "b", "a/b"),
    (torch_dtype(), "bfloat16"),
    (
        {"dtype": torch_dtype(), "deep": {"dtype": [torch_dtype()]}},
        {"dtype": "bfloat16", "deep": {"dtype": ["bfloat16"]}},
    ),
    ({1: IntervalStrategy.NO, IntervalStrategy.NO: Path("x")}, {"1": "no", "no": "x"}),
    (Inner(Path("p"), IntervalStrategy.STEPS), {"path": "p", "strategy": "steps"}),
    (WithToDict(), {"kind": "underflow_overflow"}),
    (WithToJson(), {"tp_size": 2}),
    (WithToDict, str(WithToDict)),
    (1 + 2j, "(1+2j)"),
]


@pytest.mark.parametrize(("value", "expected"), CASES, ids=lambda part: str(part)[:30])
def test_values_become_plain(value: Any, expected: Any) -> None:
    args = Args(value=value)
    found = args.to_dict()["value"]
    assert found == expected and type(found) is type(expected)
    assert json.loads(args.to_json_string()) == args.to_dict()


def test_the_value_itself_is_not_changed() -> None:
    value = {"dtype": torch_dtype()}
    Args(value=value).to_dict()
    assert value == {"dtype": torch_dtype()}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda deep: st.lists(deep) | st.dictionaries(st.text(), deep),
    )
)
def test_plain_values_do_not_change(value: Any) -> None:
    assert plain(value) == value
    assert plain(plain(value)) == plain(value)


def test_secrets_are_not_shown() -> None:
    for token in ("hf_secret", None):  # not even whether there is one
        args = Args(hub_token=token)
        assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
        for text in (args.to_json_string(), str(args), repr(args), str(args.to_sanitized_dict())):
            assert "<HUB_TOKEN>" in text and "hf_secret" not in text


def test_derived_fields_are_left_out() -> None:
    assert "derived" not in Args().to_dict()


def test_sanitized_has_four_types_and_the_batch_sizes() -> None:
    found = Args(value=[1]).to_sanitized_dict()
    assert found == {"value": "[1]", "hub_token": "<HUB_TOKEN>", "train_batch_size": 5, "eval_batch_size": 6}
    assert Args().to_sanitized_dict()["value"] == "None"
    assert {type(value) for value in TrainingArguments().to_sanitized_dict().values()} <= {bool, int, float, str}


def test_text_has_one_field_a_line_in_order() -> None:
    assert str(Args(value=Path("x"))) == (
        "Args(\neval_batch_size=6,\nhub_token=<HUB_TOKEN>,\ntrain_batch_size=5,\nvalue=x,\n)"
    )


def test_real_arguments_print_like_those_of_transformers() -> None:
    import transformers

    given = {"use_cpu": True, "eval_strategy": "steps", "label_names": ["a"]}
    given |= {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}, "output_dir": "here"}
    ours, of_transformers = TrainingArguments(**given), transformers.TrainingArguments(**given)
    found, expected = ours.to_dict(), of_transformers.to_dict()
    del found["accelerator_config"]["use_configured_state"]  # transformers removes it from the object
    found.pop("disable_tqdm"), expected.pop("disable_tqdm")  # it follows each library's own log level
    assert {name: found[name] for name in expected} == expected
    sanitized, reference = ours.to_sanitized_dict(), of_transformers.to_sanitized_dict()
    assert set(reference) <= set(sanitized)
    assert sanitized["train_batch_size"] == reference["train_batch_size"] == 8
    assert set(found) | {"disable_tqdm"} == {item.name for item in fields(ours)}


def test_from_json_and_back() -> None:
    args = TrainingArguments(eval_strategy="epoch", lr_scheduler_kwargs={"num_cycles": 2}, zero_stage=2)
    values = json.loads(args.to_json_string())
    del values["hub_token"]
    assert TrainingArguments(**values).to_dict() == args.to_dict()
