"""State and control: what is saved comes back, also from and to transformers."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import TrainerControl as TransformersControl
from transformers.trainer_callback import TrainerState as TransformersState

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import ExportableState, TrainerControl, TrainerState, export_states, restore_states
from ds_trainer.utils.errors import ConfigError

from .conftest import LogRecords


class Counter(TrainerCallback, ExportableState):
    """A callback with a constructor argument and something that changes."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self.seen = 0

    def state(self) -> dict[str, Any]:
        return {"args": {"limit": self.limit}, "attributes": {"seen": self.seen}}


FULL = TrainerState(
    epoch=1.5,
    global_step=30,
    max_steps=60,
    logging_steps=5,
    eval_steps=10,
    save_steps=20,
    train_batch_size=4,
    num_train_epochs=3,
    num_input_tokens_seen=12345,
    total_flos=1.5e15,
    log_history=[{"loss": 2.5, "step": 5}, {"eval_loss": 2.0, "step": 10}],
    best_metric=2.0,
    best_global_step=10,
    best_model_checkpoint="out/checkpoint-10",
    is_local_process_zero=False,
    is_world_process_zero=False,
    is_hyper_param_search=True,
    trial_name="trial",
    trial_params={"lr": 0.1},
    stateful_callbacks={"Counter": {"args": {"limit": 3}, "attributes": {"seen": 7}}},
)


def test_two_states_share_no_history() -> None:
    TrainerState().log_history.append({"loss": 1.0})
    assert TrainerState().log_history == []


def test_the_state_survives_a_round_trip(tmp_path: Path) -> None:
    for state in (FULL, TrainerState()):
        state.save_to_json(tmp_path / "trainer_state.json")
        assert TrainerState.load_from_json(tmp_path / "trainer_state.json") == state
    assert [entry.name for entry in tmp_path.iterdir()] == ["trainer_state.json"]


def test_every_field_of_the_example_differs_from_its_default() -> None:
    # otherwise the test above could not see a field that is not saved
    for item in dataclasses.fields(TrainerState):
        assert getattr(FULL, item.name) != getattr(TrainerState(), item.name), item.name


def test_state_files_are_compatible_with_transformers(tmp_path: Path) -> None:
    path = str(tmp_path / "trainer_state.json")
    FULL.save_to_json(path)
    reference = TransformersState.load_from_json(path)
    assert dataclasses.asdict(reference) == dataclasses.asdict(FULL)
    reference.save_to_json(path)
    assert TrainerState.load_from_json(path) == FULL


def test_values_logged_by_users_are_saved_as_numbers(tmp_path: Path) -> None:
    import numpy
    import torch

    state = TrainerState(log_history=[{"loss": torch.tensor(0.5), "norm": numpy.float32(0.25), "nan": math.nan}])
    state.best_metric = numpy.float64(2.0)
    state.save_to_json(tmp_path / "s.json")
    loaded = TrainerState.load_from_json(tmp_path / "s.json")
    assert loaded.log_history[0]["loss"] == 0.5 and loaded.log_history[0]["norm"] == 0.25
    assert math.isnan(loaded.log_history[0]["nan"])
    assert loaded.best_metric == 2.0


def test_fields_missing_in_an_older_file_get_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"global_step": 7, "log_history": null, "stateful_callbacks": null}')
    assert TrainerState.load_from_json(path) == TrainerState(global_step=7)


def test_unknown_keys_of_a_newer_version_are_reported_and_ignored(tmp_path: Path, log: LogRecords) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"global_step": 7, "zebra": 1, "antelope": 2}))
    assert TrainerState.load_from_json(path) == TrainerState(global_step=7)
    assert len(log.messages) == 1
    assert log.messages[0].startswith("WARNING") and "antelope, zebra" in log.text and str(path) in log.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no trainer state at"),
        ('{"global_step": 7', "is not a trainer state"),
        ("", "is not a trainer state"),
        (b"\xff\xfe\x00", "is not a trainer state"),
        ("[1]", "holds a JSON list"),
        ('{"global_step": "many"}', "global_step is 'many'"),
        ('{"global_step": -1}', "global_step is -1"),
        ('{"max_steps": 2.5}', "max_steps is 2.5"),
        ('{"max_steps": true}', "max_steps is True"),
    ],
)
def test_a_file_without_a_state_is_rejected(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        TrainerState.load_from_json(path)
    assert (
        message in str(refused.value) and str(path) in str(refused.value) and "another checkpoint" in str(refused.value)
    )


def test_steps_are_numbers_fractions_or_none() -> None:
    state = TrainerState()
    state.compute_steps(SimpleNamespace(logging_steps=10.0, eval_steps=0.25, save_steps=None), 301)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (10, 76, 500)
    assert type(state.logging_steps) is int
    state.compute_steps(SimpleNamespace(logging_steps=1, eval_steps=0.0001, save_steps=0), 300)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (1, 1, 0)


@given(st.integers(1, 999), st.integers(1, 100_000))
@example(70, 100)
@example(1, 1)
def test_a_fraction_of_steps_is_rounded_up_without_float_error(thousandths: int, max_steps: int) -> None:
    steps = SimpleNamespace(logging_steps=thousandths / 1000, eval_steps=None, save_steps=None)
    ours, reference = TrainerState(), TransformersState()
    ours.compute_steps(steps, max_steps)
    reference.compute_steps(steps, max_steps)
    assert ours.logging_steps == math.ceil(Fraction(thousandths, 1000) * max_steps)
    assert reference.logging_steps - ours.logging_steps in (0, 1)  # 100 * 0.07 is 7.000000000000001 in binary


def test_the_control_is_reset_by_the_loop() -> None:
    every = TrainerControl(True, True, True, True, True)
    every._new_step()
    assert every == TrainerControl(should_training_stop=True, should_epoch_stop=True)
    every._new_epoch()
    assert every == TrainerControl(should_training_stop=True)
    every._new_training()
    assert every == TrainerControl()


@given(st.lists(st.booleans(), min_size=5, max_size=5))
def test_the_control_is_restored_from_its_state(flags: list[bool]) -> None:
    control = TrainerControl(*flags)
    assert control.state() == TransformersControl(*flags).state()
    assert TrainerControl.from_state(json.loads(json.dumps(control.state()))) == control


def test_callbacks_are_exported_by_class_name() -> None:
    first, second, third = Counter(1), Counter(2), Counter(3)
    first.seen, second.seen = 10, 20
    control = TrainerControl(should_save=True)
    assert export_states([TrainerCallback(), first, control]) == {
        "Counter": {"args": {"limit": 1}, "attributes": {"seen": 10}},
        "TrainerControl": control.state(),
    }
    exported = export_states([first, second, third])
    assert [state["args"]["limit"] for state in exported["Counter"]] == [1, 2, 3]
    assert TrainerState(stateful_callbacks=[first, control]).stateful_callbacks == export_states([first, control])  # type: ignore[arg-type]


def test_a_callback_without_state_cannot_be_listed_as_stateful() -> None:
    with pytest.raises(ConfigError, match="TrainerCallback, which has no state"):
        TrainerState(stateful_callbacks=[TrainerCallback()])  # type: ignore[arg-type]


def test_callback_state_is_restored_in_place() -> None:
    one, two = Counter(1), Counter(2)
    one.seen, two.seen = 10, 20
    states = json.loads(json.dumps(export_states([one, two])))
    restored = [Counter(8), Counter(9)]
    restore_states(restored, states)
    assert [(counter.limit, counter.seen) for counter in restored] == [(8, 10), (9, 20)]
    restore_states(restored, states, include_arguments=True)
    assert [(counter.limit, counter.seen) for counter in restored] == [(1, 10), (2, 20)]
    restore_states(restored, states)  # the states themselves are not used up
    assert len(states["Counter"]) == 2


def test_states_without_a_callback_are_reported(log: LogRecords) -> None:
    counter = Counter()
    restore_states([counter], {"Gone": {"args": {}, "attributes": {}}, "Counter": [Counter().state(), {}]})
    assert len(log.messages) == 1 and log.messages[0].endswith("Gone, Counter")


def test_callbacks_without_a_state_are_reported(log: LogRecords) -> None:
    seen, fresh = Counter(1), Counter(2)
    seen.seen = 10
    first = Counter(3)
    restore_states([TrainerCallback(), first, fresh, EarlyStoppingCallback()], export_states([seen]))
    assert (first.seen, fresh.seen) == (10, 0)
    assert len(log.messages) == 1 and log.messages[0].startswith(
        "WARNING the checkpoint has no state of these callbacks"
    )
    assert log.messages[0].endswith("begin as they are: Counter, EarlyStoppingCallback")


def test_the_control_in_a_file_of_transformers_is_no_callback(log: LogRecords) -> None:
    counter = Counter()
    restore_states([counter], export_states([Counter(), TrainerControl(should_save=True)]))
    assert log.messages == []


def test_the_state_of_a_transformers_callback_is_restored(tmp_path: Path) -> None:
    stopper = EarlyStoppingCallback(early_stopping_patience=5)
    stopper.early_stopping_patience_counter = 4
    TrainerState(stateful_callbacks=export_states([stopper])).save_to_json(tmp_path / "s.json")
    restored = EarlyStoppingCallback(early_stopping_patience=7)
    restore_states([restored], TrainerState.load_from_json(tmp_path / "s.json").stateful_callbacks)
    assert (restored.early_stopping_patience, restored.early_stopping_patience_counter) == (7, 4)


def test_state_must_be_defined_by_the_callback() -> None:
    class Careless(ExportableState):
        pass

    with pytest.raises(NotImplementedError, match="Careless must define state"):
        export_states([Careless()])
