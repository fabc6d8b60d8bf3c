"""How this package talks to the Hub: huggingface_hub's client, patience, and errors that name a remedy.

huggingface_hub 2.4 repeats preparing an upload, the upload itself and listing by itself (5 times, up to 8 s apart); it
does not repeat making repositories, branches and commits. Here every call is repeated as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.secrets import hide_in_logs, keep_secret, redacted

logger = get_logger(__name__)

WAITS = (1.0, 4.0, 15.0)
"""Seconds before a call that failed for a passing reason is repeated."""

_TALKING = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")
_CONNECTIONS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_PASSING = (408, 425, 429)
_MAX_TEXT = 400
_TOKEN = (
    "Make a token with write permission (huggingface.co/settings/tokens), and pass it as hub_token, in the environment "
    "variable HF_TOKEN, or by `hf auth login`"
)

R = TypeVar("R")


class HubError(RuntimeError):
    """The Hub could not be reached, or answered with an error of its own, again and again."""


def hub_api(token: str | None) -> Any:
    """A client of the Hub that uses ``token``, or the one of the environment. Its logs show no token from now on.

    Raises:
        ConfigError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError(
            "Pushing to the Hub needs the package huggingface_hub: pip install huggingface_hub (it comes with "
            "transformers too), or set push_to_hub=False."
        ) from None
    api = HfApi(token=token, library_name="ds_trainer")
    keep_secret(token)
    keep_secret(huggingface_hub.get_token())
    hide_in_logs(*_TALKING)
    return api


def patiently(call: Callable[[], R], doing: str) -> R:
    """``call()``, repeated where it fails for a passing reason: no connection, 5xx, too many requests.

    Args:
        call: talks to the Hub; may be called several times.
        doing: ends the sentence "... failed", for messages.

    Raises:
        ConfigError: the Hub refused; the text names what to change.
        HubError: it kept failing.
    """
    for wait in (*WAITS, None):
        try:
            return call()
        except Exception as error:
            if not _is_of_hub(error):
                raise
            failure = explained(error, doing)
            if wait is None or not isinstance(failure, HubError):
                raise failure from None  # the library's own text may hold addresses with credentials
            logger.info("%s Trying again in %g s.", failure, wait)
        time.sleep(wait)
    raise AssertionError("the last round returns or raises")


def explained(error: BaseException, doing: str) -> ConfigError | HubError:
    """What ``error``, raised by huggingface_hub while ``doing`` something, means: in words, without secrets."""
    status = _status(error)
    said = " ".join(redacted(str(error)).split())[:_MAX_TEXT]
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ConfigError(
            f"{doing} failed: HF_HUB_OFFLINE is set in the environment. Unset it, or set push_to_hub=False."
        )
    if type(error).__name__ == "HFValidationError":
        return ConfigError(f"{doing} failed: {said} Set hub_model_id to a name such as 'me/my-model'.")
    if status == 401:
        return ConfigError(
            f"{doing} failed: the Hub knows no such token, or got none (401). {_TOKEN}; or set push_to_hub=False."
        )
    if status == 403:
        return ConfigError(
            f"{doing} failed: the token may not do that (403). {_TOKEN}; or name a repository of your own in "
            "hub_model_id."
        )
    if status == 404:
        return ConfigError(
            f"{doing} failed: the Hub has no such repository or branch, or the token may not see it (404). Check "
            "hub_model_id and hub_revision."
        )
    if status is None or status >= 500 or status in _PASSING:
        return HubError(
            f"{doing} failed ({said or type(error).__name__}). Try again when the Hub (HF_ENDPOINT) can be reached, or "
            "set push_to_hub=False."
        )
    return ConfigError(f"{doing} failed: the Hub refused it ({said}).")


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _status(error: BaseException) -> int | None:
    for part in _chain(error):
        status = getattr(getattr(part, "response", None), "status_code", None)
        if status is not None:
            return int(status)
    return None


def _is_of_hub(error: BaseException) -> bool:
    """Whether this is the Hub's or the network's doing: not a defect here, a full disk or an interrupt."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HFValidationError | OfflineModeIsEnabled):
        return True
    return any(
        _status(part) is not None or type(part).__module__.split(".")[0] in _CONNECTIONS for part in _chain(error)
    )
