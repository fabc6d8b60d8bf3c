"""Secrets that contain each other, and values that only look like ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_trainer.utils import secrets
from ds_trainer.utils.secrets import is_secret, redacted, register_secret, register_secrets_of, without_secrets


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    before = set(secrets._known)
    secrets._known.clear()
    yield
    secrets._known.clear()
    secrets._known.update(before)


def test_nested_secrets_are_masked_completely() -> None:
    for value in ("pass", "password-2024", "word-2024"):
        register_secret(value)
    assert redacted("it was password-2024, not pass") == "it was <SECRET>, not <SECRET>"


def test_a_secret_in_an_address_is_hidden_too() -> None:
    register_secret("a/b c+d")
    assert redacted("https://host/?key=a%2Fb%20c%2Bd") == "https://host/?key=<SECRET>"


def test_a_short_value_is_no_secret() -> None:
    register_secret("abc")
    register_secret(None)
    register_secret("abcd")
    assert redacted("abc abcd") == "abc <SECRET>"


def test_secrets_at_any_depth_are_known() -> None:
    register_secrets_of({"comet": [{"api_key": "deep-secret"}], "name": "shown", "hub_token": None})
    assert redacted("deep-secret shown") == "<SECRET> shown"


def test_secrets_at_any_depth_are_masked() -> None:
    value = {"a": [{"HUB_TOKEN": "x"}, ({"password": 7},)], "text": '{"api_key": "y", "b": 1}', "plain": "z"}
    assert without_secrets(value) == {
        "a": [{"HUB_TOKEN": "<HUB_TOKEN>"}, [{"password": "<PASSWORD>"}]],
        "text": '{"api_key": "<SECRET>", "b": 1}',
        "plain": "z",
    }
    assert is_secret("WANDB_API_KEY") and is_secret("api_keys") and not is_secret("sort_keys")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer <SECRET>"),
        ("basic dXNlcjpwYXNz", "basic <SECRET>"),
        ("bearer of news", "bearer of news"),
        ("http://user:word@host/path", "http://<SECRET>@host/path"),
        ("http://host:80/path@x", "http://host:80/path@x"),
        ("hf_" + "a1" * 8, "<SECRET>"),
        ("hf_short", "hf_short"),
    ],
)
def test_values_that_look_like_credentials_are_masked(text: str, shown: str) -> None:
    assert redacted(text) == shown
