"""What must not be shown: tokens, keys and passwords in what is written, printed, logged and raised.

Two ways to know a secret: by the name beside it (:func:`is_secret`), for data that is about to be written; and by its
value (:func:`keep_secret`), for text that others make of it, such as the messages of an HTTP library.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

_ENDINGS = ("_token", "api_key", "password", "secret")
_SHORTEST = 4  # a shorter value would be found in words that have nothing to do with it
_known: set[str] = set()

_NAMED = re.compile(
    r"""(?P<name>["']?[\w.-]*(?:_token|api_key|password|secret)["']?\s*[:=]\s*)"""
    r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,}\]"']+)""",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@'\"]+:[^/\s@'\"]+(?=@)")
_OF_THE_HUB = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def is_secret(name: str) -> bool:
    """Whether something of this name must not be shown: a token, a key, a password."""
    return name.lower().endswith(_ENDINGS)


def masked(name: str) -> str:
    """What is shown instead of the secret ``name``: the same whether it is set or not."""
    return f"<{name.upper()}>"


def without_secrets(value: Any) -> Any:
    """``value`` with every text masked whose name says that it is a secret, at any depth; JSON in a text too."""
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


def keep_secret(value: str | None) -> None:
    """Never show ``value`` in what :func:`redacted` and :func:`hide_in_logs` let through from now on."""
    if value is not None and len(value) >= _SHORTEST:
        _known.update({value, quote(value, safe="")})


def keep_secrets_of(value: Any) -> None:
    """:func:`keep_secret` for every text in ``value`` whose name says that it is one."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if isinstance(entry, str) and is_secret(str(name)):
                keep_secret(entry)
            else:
                keep_secrets_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            keep_secrets_of(entry)


def redacted(text: str) -> str:
    """``text`` without known secrets, credentials in addresses, and what looks like a token of the Hub."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, "<SECRET>")
    text = _BEARER.sub(r"\1 <SECRET>", _IN_ADDRESS.sub("<SECRET>", text))
    return _OF_THE_HUB.sub("<SECRET>", text)


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        clean = redacted(said)
        if clean != said:
            record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:  # a handler's formatter takes this text as it is
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return True


_filter = _Redacting()


def hide_in_logs(*prefixes: str) -> None:
    """Redact what loggers say that exist now and whose names begin with one of these."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in prefixes:
            logger = logging.getLogger(name)
            if _filter not in logger.filters:
                logger.addFilter(_filter)
