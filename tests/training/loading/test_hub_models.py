"""Models by their hub name: what is downloaded, by whom, and what is said where that cannot be."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ds_trainer
from ds_trainer import ConfigError
from ds_trainer.engine.loading.placement import materialize
from ds_trainer.training.loading.model_files import model_directory
from tests.support.hub_server import HubServer, Repository, pointed_at
from tests.support.saved_models import saved

NAME = "me/llama"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    with HubServer() as server, pointed_at(server.url):
        yield server


def stored(hub: HubServer, directory: Path, **more: bytes) -> None:
    """Put a model into the repository ``me/llama``."""
    repository = hub.repositories[NAME] = Repository(private=False)
    for path in directory.iterdir():
        repository.branches["main"][path.name] = path.read_bytes()
    repository.branches["main"].update({name.replace("_DOT_", "."): data for name, data in more.items()})


def downloads(hub: HubServer) -> set[str]:
    return {r.rpartition("/")[2] for r in hub.requests if "/resolve/" in r and r.startswith("GET")}


def test_only_the_needed_files_of_a_hub_model_are_downloaded(hub: HubServer, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = saved("llama", tmp_path / "model", max_shard_size="20KB")
    stored(hub, Path(directory), pytorch_model_DOT_bin=b"x" * 10, model_DOT_gguf=b"y" * 10)
    cache = str(tmp_path / "cache")
    model = ds_trainer.from_pretrained(NAME, cache_dir=cache)
    assert model.name_or_path == NAME
    weights = {path.name for path in Path(directory).glob("*.safetensors")}
    assert len(weights) > 2 and downloads(hub) == weights | {p.name for p in Path(directory).glob("*.json")}
    materialize(model, torch.device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    before = len(hub.requests)
    ds_trainer.from_pretrained(NAME, cache_dir=cache, local_files_only=True)
    assert len(hub.requests) == before


def test_bin_files_are_downloaded_if_there_are_no_others(hub: HubServer, tmp_path: Path) -> None:
    directory = Path(saved("llama", tmp_path / "model"))
    (directory / "model.safetensors").unlink()
    stored(hub, directory, pytorch_model_DOT_bin=b"x" * 10)
    found = model_directory(NAME, cache_dir=str(tmp_path / "cache"))
    assert (found / "pytorch_model.bin").read_bytes() == b"x" * 10


def test_one_process_downloads_and_the_others_use_its_files(hub: HubServer, tmp_path: Path) -> None:
    stored(hub, Path(saved("llama", tmp_path / "model")))
    arrived, release = hub.hold("GET /api/models/me/llama/revision")
    found: list[Path] = []

    def ask() -> None:
        found.append(model_directory(NAME, cache_dir=str(tmp_path / "cache")))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    threads[0].start()
    assert arrived.wait(30)
    for thread in threads[1:]:  # they come while the first one is at it
        thread.start()
    release.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found)) == 1
    assert sum(r.startswith("GET /api/models/me/llama/revision") for r in hub.requests) <= 1


def test_models_that_cannot_be_downloaded_are_reported(hub: HubServer, tmp_path: Path) -> None:
    cache = str(tmp_path)
    with pytest.raises(ConfigError, match=r"the Hub has no repository of that name"):
        model_directory("me/gone", cache_dir=cache)
    stored(hub, Path(saved("llama", tmp_path / "model")))
    with pytest.raises(ConfigError, match=r"has no revision 'v9'"):
        model_directory(NAME, revision="v9", cache_dir=cache)
    hub.fail("GET /api/models/me/llama", 403, times=9)
    with pytest.raises(ConfigError, match=r"this token has no access to the Hub repository.*hf auth login"):
        model_directory(NAME, cache_dir=cache)
    with pytest.raises(ConfigError, match=r"not a valid Hub repository name such as"):
        model_directory("me/na me", cache_dir=cache)


def test_offline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"access to the Hub is disabled.*HF_HUB_OFFLINE.*`hf download me/llama`"):
        model_directory(NAME, cache_dir=str(tmp_path), local_files_only=True)


def test_a_clock_that_was_set_back_does_not_hide_a_new_revision(hub: HubServer, tmp_path: Path) -> None:
    """The record of an earlier download may be younger than the present: it is not of a process that ran beside."""
    directory, cache = saved("llama", tmp_path / "model"), tmp_path / "cache"
    stored(hub, Path(directory))
    model_directory(NAME, cache_dir=str(cache))
    (record,) = (cache / ".locks" / "ds_trainer").glob("*.json")
    os.utime(record, (time.time() + 3600,) * 2)
    before = len(hub.requests)
    model_directory(NAME, cache_dir=str(cache))
    assert len(hub.requests) > before
