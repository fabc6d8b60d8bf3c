"""A run is killed at any request of a push: what is on the Hub is whole, and the next run pushes what is missing."""

from __future__ import annotations

import json
import os
import random
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_weights

from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.training.hub import uploads
from tests.support.hub_server import HubServer
from tests.support.pool import RankFailure, pool
from tests.training.hub.support import NAME
from tests.training.hub.test_ranks import train

SAVED = ["checkpoint-2", "checkpoint-4"]


def pushing(url: str, folder: str, strategy: str) -> dict[str, torch.Tensor]:
    values = {"hub_strategy": strategy, "hub_always_push": True, "auto_resume": True, "zero_stage": 1}
    return train(url, folder, **values)


def check_whole(hub: HubServer) -> None:
    """What is on the Hub is complete: each checkpoint has the files of its manifest, the weights are readable."""
    files = hub.files(NAME) if NAME in hub.repositories else {}
    if "model.safetensors" in files:
        load_weights(files["model.safetensors"])
    folders = {path.partition("/")[0] for path in files if "/" in path}
    for folder in folders:
        manifest = json.loads(files[f"{folder}/manifest.json"])
        found = {name: files.get(f"{folder}/{name}", b"") for name in manifest["files"]}
        assert {name: [len(data), f"{zlib.crc32(data):08x}"] for name, data in found.items()} == manifest["files"]
        last = [commit.message for commit in hub.commits if any(path.startswith(folder) for path in commit.added)][-1]
        assert f"step {manifest['step']}," in last or last.startswith("End of training")


@pytest.fixture(scope="module")
def requests_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> int:
    with HubServer() as hub:
        pool(1).run(pushing, hub.url, str(tmp_path_factory.mktemp("whole")), "all_checkpoints")
        return len(hub.requests)


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints", "every_save"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_during_a_push(
    seed: int, ranks: int, strategy: str, requests_of_a_run: int, tmp_path: Path
) -> None:
    """At a random request, which the Hub has answered or not: kill -9 of the process that pushes."""
    chance = random.Random(f"{seed} {ranks} {strategy}")
    at, unanswered, seen = chance.randrange(6, requests_of_a_run - 2), chance.random() < 0.5, 0
    workers = pool(ranks)
    process = workers._workers[0].pid
    assert process is not None

    def cut(request: str) -> bool:
        nonlocal seen
        seen += 1
        if seen < at:
            return False
        os.kill(process, signal.SIGKILL)
        return unanswered

    with HubServer() as hub:
        hub.cut = cut
        killed = False
        try:
            workers.run(pushing, hub.url, str(tmp_path), strategy, timeout=90)
        except RankFailure:
            killed = True
        hub.cut = lambda request: False
        assert killed or seen < at  # every_save has fewer requests
        check_whole(hub)
        local = {path.name for path in list_checkpoints(tmp_path / "run")}
        before = hub.commits[:]
        weights, *_ = pool(ranks).run(pushing, hub.url, str(tmp_path), strategy)
        assert hub.commits[: len(before)] == before
        check_whole(hub)
        assert local <= set(SAVED) == {path.name for path in list_checkpoints(tmp_path / "run")}
        pushed = load_weights(hub.files(NAME)["model.safetensors"])
        assert all(torch.equal(pushed[name], tensor) for name, tensor in weights.items())
        folders = {path.partition("/")[0] for path in hub.files(NAME) if "/" in path}
        assert folders == {"checkpoint": {"last-checkpoint"}, "all_checkpoints": set(SAVED)}.get(strategy, set())
        if strategy == "checkpoint":
            assert json.loads(hub.files(NAME)["last-checkpoint/manifest.json"])["step"] == 4
        assert not list((tmp_path / "run").glob(f".{uploads.FOLDER}*"))


def pushing_file_by_file(url: str, folder: str) -> None:
    """As :func:`pushing`, with a commit for each file."""
    from huggingface_hub import HfApi

    whole = HfApi.create_commit

    def split(self: HfApi, repo_id: str, operations: list[Any], **more: Any) -> Any:
        infos = [whole(self, repo_id, operations=[one], **more) for one in operations]
        return infos[0]

    HfApi.create_commit = split  # type: ignore[method-assign, assignment]
    pushing(url, folder, "all_checkpoints")


@pytest.mark.extended
def test_control_a_push_that_is_not_atomic_is_noticed(tmp_path: Path) -> None:
    """Killed once the first file of a checkpoint is on the Hub."""
    workers = pool(1)
    process = workers._workers[0].pid
    assert process is not None

    def cut(request: str) -> bool:
        if NAME not in hub.repositories or not any("checkpoint-2/" in path for path in hub.files(NAME)):
            return False
        os.kill(process, signal.SIGKILL)
        return True

    with HubServer() as hub:
        hub.cut = cut
        with pytest.raises(RankFailure):
            workers.run(pushing_file_by_file, hub.url, str(tmp_path), timeout=90)
        with pytest.raises((AssertionError, KeyError)):
            check_whole(hub)
