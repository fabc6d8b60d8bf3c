"""Secrets by their names in data, by their values in text, and in logs of other libraries."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ds_trainer.utils import secrets
from ds_trainer.utils.logging import hide_in_logs
from ds_trainer.utils.secrets import is_secret, redacted, register_secret, register_secrets_of, without_secrets

KEY = "sEcr3t/Key+of=theTest"


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize("name", ["hub_token", "comet.api_key", "API_KEY", "password", "client_secret"])
def test_secrets_are_recognized_by_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["pad_token_id", "tokens", "secrets_of_nature", "num_input_tokens_seen"])
def test_other_names_are_not_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"comet": {"api_key": KEY, "project": "p"}}, {"comet": {"api_key": "<API_KEY>", "project": "p"}}),
        ([{"hub_token": KEY}, 3], [{"hub_token": "<HUB_TOKEN>"}, 3]),
        ({"api_key": None, "num_token": 3}, {"api_key": None, "num_token": 3}),
        ('{"comet": {"api_key": "a b", "x": 1}}', '{"comet": {"api_key": "<SECRET>", "x": 1}}'),
        ("{comet: {api_key: abc, x: 1}}", '{comet: {api_key: "<SECRET>", x: 1}}'),
        ("{api_key: 'a b'\n x: 1}", '{api_key: "<SECRET>"\n x: 1}'),
        ("plain text", "plain text"),
    ],
)
def test_data_without_secrets(value: Any, shown: Any) -> None:
    assert without_secrets(value) == shown


def test_known_values_do_not_appear_in_text() -> None:
    assert redacted(f"a {KEY} b") == f"a {KEY} b"  # it was not declared as one
    register_secrets_of({"comet": [{"api_key": KEY}], "name": "visible"})
    register_secret("abc")  # too short: it would be found in any word
    register_secret(None)
    assert redacted(f"a {KEY} visible abc") == "a <SECRET> visible abc"
    assert redacted("https://host/?k=sEcr3t%2FKey%2Bof%3DtheTest") == "https://host/?k=<SECRET>"


def test_a_secret_that_is_called_like_a_key_of_records_hides_values_alone() -> None:
    register_secret("text")
    assert without_secrets({"text": "a text"}) == {"text": "a <SECRET>"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://me:pass@host:8/path", "GET https://<SECRET>@host:8/path"),
        ("Authorization: Bearer abc.def-ghijk", "Authorization: Bearer <SECRET>"),
        ("token hf_abcdefghijklmnopqrst.", "token <SECRET>."),
        ("https://host/a:b@c http://host:80/x hf_hub bearer of news", None),
    ],
)
def test_values_that_look_like_secrets_are_masked(text: str, shown: str | None) -> None:
    assert redacted(text) == (text if shown is None else shown)


def test_logs_of_others_are_redacted(caplog: pytest.LogCaptureFixture) -> None:
    logger, other = logging.getLogger("talkative.deep"), logging.getLogger("bystander")
    register_secret(KEY)
    hide_in_logs("talkative")
    hide_in_logs("talkative")
    assert len(logger.filters) == 1 and not other.filters
    with caplog.at_level(logging.DEBUG):
        logger.debug("sent %s to %d", KEY, 3)
        logger.debug("harmless %s", "words")
        try:
            raise ValueError(f"with {KEY}")
        except ValueError:
            logger.exception("it failed")
        other.debug("sent %s", KEY)
    assert [record.getMessage() for record in caplog.records] == [
        "sent <SECRET> to 3",
        "harmless words",
        "it failed",
        f"sent {KEY}",
    ]
    formatted = logging.Formatter().format(caplog.records[2])
    assert KEY not in formatted and "ValueError: with <SECRET>" in formatted


def test_nested_secrets_are_masked_completely() -> None:
    for value in ("pass", "password-2024", "word-2024", "a/b c+d"):
        register_secret(value)
    assert redacted("it was password-2024, not pass") == "it was <SECRET>, not <SECRET>"
    assert redacted("https://host/?key=a%2Fb%20c%2Bd") == "https://host/?key=<SECRET>"
