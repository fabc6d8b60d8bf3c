"""Redaction of tokens, keys and passwords in everything that is written, printed, logged or raised.

A secret is recognized by its name (:func:`is_secret`) in data that is about to be written, and by its value
(:func:`register_secret`) in text of other libraries, such as the error messages of an HTTP client.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

_ENDINGS = ("_token", "api_key", "password", "secret")
_SHORTEST = 4  # a shorter value would match unrelated text
_known: set[str] = set()

_NAMED = re.compile(
    r"""(?P<name>["']?[\w.-]*(?:_token|api_key|password|secret)["']?\s*[:=]\s*)"""
    r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,}\]"']+)""",
    re.IGNORECASE,
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@'\"]+:[^/\s@'\"]+(?=@)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def is_secret(name: str) -> bool:
    """Whether ``name`` is that of a token, a key or a password."""
    return name.lower().endswith(_ENDINGS)


def masked(name: str) -> str:
    """The placeholder for the secret ``name``; the same whether it is set or not."""
    return f"<{name.upper()}>"


def without_secrets(value: Any) -> Any:
    """``value`` with every string masked whose name is that of a secret, at any depth, including JSON in a string."""
    if isinstance(value, Mapping):
        return {
            name: masked(str(name)) if isinstance(entry, str) and is_secret(str(name)) else without_secrets(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(entry) for entry in value]
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        return _NAMED.sub(lambda found: f'{found["name"]}"<SECRET>"', value)
    return value


def register_secret(value: str | None) -> None:
    """Have :func:`redacted` and :func:`hide_in_logs` redact ``value`` from now on."""
    if value is not None and len(value) >= _SHORTEST:
        _known.update({value, quote(value, safe="")})


def register_secrets_of(value: Any) -> None:
    """:func:`register_secret` for every string in ``value`` whose name is that of a secret."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if isinstance(entry, str) and is_secret(str(name)):
                register_secret(entry)
            else:
                register_secrets_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            register_secrets_of(entry)


def redacted(text: str) -> str:
    """``text`` without registered secrets, credentials in URLs, and anything that looks like a Hub token."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, "<SECRET>")
    text = _BEARER.sub(r"\1 <SECRET>", _URL_CREDENTIALS.sub("<SECRET>", text))
    return _HUB_TOKEN.sub("<SECRET>", text)


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        clean = redacted(message)
        if clean != message:
            record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:  # formatters use this text unchanged
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return True


_filter = _Redacting()


def hide_in_logs(*prefixes: str) -> None:
    """Redact the messages of existing loggers whose names begin with one of ``prefixes``."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in prefixes:
            logger = logging.getLogger(name)
            if _filter not in logger.filters:
                logger.addFilter(_filter)
