"""Values of other engines that have no effect here, and what scripts ask the arguments about DeepSpeed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import ConfigError, TrainingArguments


@pytest.mark.parametrize(
    "values",
    [
        {"ddp_find_unused_parameters": False},
        {"ddp_find_unused_parameters": True},
        {"ddp_broadcast_buffers": False},
        {"ddp_static_graph": False},
    ],
)
def test_harmless_options_of_ddp_are_accepted(values: dict[str, Any]) -> None:
    args = TrainingArguments("o", use_cpu=True, **values)
    assert {name: getattr(args, name) for name in values} == values


@pytest.mark.parametrize("values", [{"ddp_broadcast_buffers": True}, {"ddp_static_graph": True}])
def test_options_that_would_change_a_training_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="makes no sense under a DeepSpeed engine"):
        TrainingArguments("o", use_cpu=True, **values)


@dataclass
class OfLibrary(TrainingArguments):
    """Arguments of another package, with a field for a mapping."""

    _VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + ["model_init_kwargs_of_library"]  # noqa: RUF005

    model_init_kwargs_of_library: dict[str, Any] | str | None = None


def test_fields_of_a_subclass_may_hold_the_json_text_of_a_mapping() -> None:
    def made(value: Any) -> Any:
        return OfLibrary("o", use_cpu=True, model_init_kwargs_of_library=value).model_init_kwargs_of_library

    assert made('{"dtype": "float32"}') == {"dtype": "float32"}
    assert made({"a": 1}) == {"a": 1} and made("plain") == "plain" and made(None) is None
    with pytest.raises(ConfigError, match=r"model_init_kwargs_of_library='\{nonsense' is not valid JSON"):
        made("{nonsense")


def test_the_zero_stage_is_known_before_there_is_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(**values: Any) -> int:
        return TrainingArguments("o", use_cpu=True, **values).deepspeed_plugin.zero_stage

    config = {"zero_optimization": {"stage": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert [stage(zero_stage=3), stage(deepspeed=config), stage(deepspeed=str(path)), stage()] == [3, 2, 2, 0]
    assert stage(deepspeed={"zero_optimization": {"stage": "auto"}}) == 0
    launched = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert stage() == 1


def test_processes_are_known_before_there_is_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL asks for the type before it loads a model by name: a device map would take it from the engine."""
    state = TrainingArguments("o", use_cpu=True).distributed_state
    assert state.distributed_type == "DEEPSPEED" and state.device.type == "cpu" and not state.use_distributed
    assert (state.num_processes, state.process_index, state.is_main_process) == (1, 0, True)
    assert state.split_between_processes is not None  # of accelerate's state
    launched = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    ranks = (state.num_processes, state.process_index, state.local_process_index)
    assert ranks == (4, 3, 1) and not state.is_local_main_process and state.use_distributed
