"""Opening the repository: at construction, before any training time is spent; every refusal names a remedy."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_trainer.training.hub import client
from ds_trainer.training.hub.client import HubError, repository_name
from ds_trainer.utils.errors import ConfigError
from tests.support.hub_server import ORGANIZATION, READER, TOKEN, HubServer
from tests.training.hub.support import make_trainer

UNKNOWN_TOKEN = "hf_tokenThatNobodyEverIssued000"


@pytest.mark.parametrize(
    ("requested", "made"),
    [
        (None, "tester/run"),
        ("other", "tester/other"),
        ("tester/owned", "tester/owned"),
        (f"{ORGANIZATION}/shared", f"{ORGANIZATION}/shared"),
    ],
)
def test_the_name_of_the_repository(hub: HubServer, tmp_path: Path, requested: str | None, made: str) -> None:
    trainer = make_trainer(tmp_path, hub_model_id=requested)
    assert trainer.hub_model_id == made and list(hub.repositories) == [made]
    make_trainer(tmp_path, hub_model_id=requested)  # one that exists is used
    assert list(hub.repositories) == [made]


def test_the_repository_name_ignores_a_trailing_slash() -> None:
    assert repository_name(None, "some/run/") == "run"


@pytest.mark.parametrize("private", [True, False, None])
def test_a_private_repository(hub: HubServer, tmp_path: Path, private: bool | None) -> None:
    make_trainer(tmp_path, hub_private_repo=private)
    assert hub.repositories["tester/run"].private is bool(private)
    body = next(body for body in hub.bodies if body.startswith(b"/api/repos/create"))
    assert (b"visibility" in body) is (private is not None)


def test_a_branch_is_made_and_pushed_to(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, hub_revision="experiment/one")
    assert set(hub.repositories["tester/run"].branches) == {"main", "experiment/one"}
    trainer.push_to_hub("First")
    trainer.push_to_hub("Second", revision="two")
    trainer.push_to_hub("Third", revision="main")
    assert [(commit.branch, commit.message) for commit in hub.commits] == [
        ("experiment/one", "First"),
        ("two", "Second"),
        ("main", "Third"),
    ]
    with pytest.raises(ConfigError, match=r"no such repository or branch.*hub_revision"):
        trainer.push_to_hub(revision="refs/pr/9")  # a pull request cannot be made by naming it


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hub_token": UNKNOWN_TOKEN}, r"'run' failed: .*401.*hub_token.*HF_TOKEN.*hf auth login"),
        ({"hub_token": None}, r"401.*hub_token"),
        ({"hub_token": READER}, r"403.*write permission"),
        ({"hub_model_id": "somebody/model"}, r"'somebody/model' failed.*403.*hub_model_id"),
        ({"hub_model_id": "not a name!"}, r"hub_model_id"),
    ],
)
def test_rejections_by_the_hub_are_raised_at_construction(
    hub: HubServer, tmp_path: Path, values: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=pauses.append))
    with pytest.raises(ConfigError, match=message) as caught:
        make_trainer(tmp_path, **values)
    assert pauses == []
    traceback_text = "".join(traceback.format_exception(caught.value))  # with whatever it came from
    assert UNKNOWN_TOKEN not in traceback_text and READER not in traceback_text and "httpx" not in traceback_text
    assert not any("/commit/" in request for request in hub.requests)


def test_the_token_of_the_environment_is_used(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert make_trainer(tmp_path, hub_token=None).hub_model_id == "tester/run"
    trainer = make_trainer(tmp_path, hub_token=None, push_to_hub=False, output_dir=str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="401"):
        trainer.push_to_hub(token=UNKNOWN_TOKEN)
    trainer.init_hf_repo(token=TOKEN, private=True)
    assert trainer.hub_model_id == "tester/b" and hub.repositories["tester/b"].private


def test_a_hub_that_does_not_answer(hub: HubServer, tmp_path: Path) -> None:
    hub.fail("/api/repos/create", 500, times=99)
    with pytest.raises(HubError, match=r"Creating the repository 'run' failed.*500"):
        make_trainer(tmp_path)
    assert sum("/api/repos/create" in request for request in hub.requests) == 3


def test_no_connection(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://somebody:secretOfProxy@127.0.0.1:9")
    with pytest.raises(HubError, match="failed") as caught:
        make_trainer(tmp_path)
    assert "secretOfProxy" not in str(caught.value)


def test_offline(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*push_to_hub=False"):
        make_trainer(tmp_path)


def test_without_the_package(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        make_trainer(tmp_path)
    trainer = make_trainer(tmp_path, push_to_hub=False)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        trainer.create_model_card()


def test_without_push_to_hub_no_request_is_sent(hub: HubServer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, push_to_hub=False, max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.engine.close()
    assert hub.requests == []
