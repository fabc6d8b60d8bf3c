"""Several ranks: all save, only the main process talks to the Hub, and its errors are raised on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_weights

from tests.support.hub_server import READER, TOKEN, HubServer, pointed_at
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.training.hub.support import NAME, AtStep, make_trainer, wait_for


def train(url: str, folder: str, **values: Any) -> dict[str, torch.Tensor]:
    os.environ.pop("HF_TOKEN", None)
    with pointed_at(url):
        trainer = make_trainer(Path(folder), per_device_train_batch_size=1, **values)
        trainer.train()
        weights = whole_weights(trainer)
        trainer.engine.close()
    return weights


def test_sharded_weights_are_pushed_unsharded(hub: HubServer, tmp_path: Path) -> None:
    values = {"zero_stage": 3, "hub_strategy": "checkpoint", "hub_always_push": True}
    weights, others = pool(2).run(_with, train, hub.url, str(tmp_path), values)
    assert hub.messages() == [
        "Training in progress, step 2",
        "Training in progress, step 2, checkpoint",
        "Training in progress, step 4",
        "Training in progress, step 4, checkpoint",
        "End of training",
    ]
    assert hub.requests.count("POST /api/repos/create") == 1
    pushed = load_weights(hub.files(NAME)["model.safetensors"])
    assert set(pushed) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(pushed[name], tensor) and torch.equal(others[name], tensor)
    assert {f"last-checkpoint/rank_{rank:05d}.safetensors" for rank in (0, 1)} <= set(hub.files(NAME))
    assert {f"last-checkpoint/random_state_rank{rank}.pt" for rank in (0, 1)} <= set(hub.files(NAME))
    assert b"- num_devices: 2" in hub.files(NAME)["README.md"]


def _with(function: Any, url: str, folder: str, values: dict[str, Any]) -> Any:
    return function(url, folder, **values)


def passed_over(url: str, folder: str) -> list[str]:
    """While the main process' push is held, no rank waits for it, and all pass over the same saves."""
    saves: list[str] = []
    with pointed_at(url):
        step = AtStep(step5=lambda: _let_go(url, trainer))
        trainer = make_trainer(Path(folder), callbacks=[step], max_steps=6, per_device_train_batch_size=1)
        original = trainer._ds_trainer.publisher.save

        def counted(directory: str | None = None) -> None:
            saves.append(str(trainer.state.global_step))
            original(directory)

        trainer._ds_trainer.publisher.save = counted  # type: ignore[method-assign]
        trainer.train()
        trainer.engine.close()
    return saves


def _let_go(url: str, trainer: Any) -> None:
    import urllib.request

    if trainer.is_world_process_zero():
        urllib.request.urlopen(f"{url}/test/go").read()
        wait_for(lambda: not trainer._ds_trainer.publisher.uploads.busy)


def test_all_ranks_skip_the_same_pushes(hub: HubServer, tmp_path: Path) -> None:
    hub.hold("/commit/")
    first, second = pool(2).run(passed_over, hub.url, str(tmp_path))
    assert first == second == ["2", "6", "6"]  # at 4 the push was held; at the end there is one more
    assert hub.messages() == ["Training in progress, step 2", "Training in progress, step 6", "End of training"]


def refused(url: str, folder: str, token: str) -> list[str]:
    """What each rank raises at construction, and of a push that it waits for; then it trains."""
    messages = []
    with pointed_at(url):
        try:
            make_trainer(Path(folder), hub_token=token)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        trainer = make_trainer(Path(folder), push_to_hub=False, per_device_train_batch_size=1)
        try:
            trainer.push_to_hub(token=token)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        trainer.train()
        messages.append(str(trainer.state.global_step))
        trainer.engine.close()
    return messages


@pytest.mark.parametrize(("token", "status"), [("hf_nobody", "401"), (READER, "403")])
def test_a_rejection_by_the_hub_is_raised_on_all_ranks(hub: HubServer, tmp_path: Path, token: str, status: str) -> None:
    first, second = pool(2).run(refused, hub.url, str(tmp_path), token)
    assert first == second and len(first) == 3 and first[2] == "4"
    assert all(message.startswith("ConfigError: Creating the repository 'run' failed") for message in first[:2])
    assert status in first[0] and token not in str(first)


def failing_push(url: str, folder: str) -> list[Any]:
    from ds_trainer.training.hub import client

    client.WAITS = (0.01,)
    with pointed_at(url):
        trainer = make_trainer(Path(folder), per_device_train_batch_size=1)
        try:
            trainer.push_to_hub()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        after = trainer.push_to_hub("Once more")
        client.WAITS = (1.0, 4.0, 15.0)
    return [message, after is not None]


def test_a_failed_push_fails_on_all_ranks_and_can_be_repeated(hub: HubServer, tmp_path: Path) -> None:
    hub.fail("/commit/", 500, times=2)
    (first, pushed), (second, other) = pool(2).run(failing_push, hub.url, str(tmp_path))
    assert first == second and first.startswith("HubError: Pushing 'End of training' to tester/run failed")
    assert (pushed, other) == (True, False) and hub.messages() == ["Once more"]
    assert TOKEN not in first
