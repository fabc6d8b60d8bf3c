"""Calls to the Hub: the client of huggingface_hub, retries, and errors that name a remedy.

huggingface_hub 2.4 retries preparing an upload, the upload itself and listing files (5 times, up to 8 s apart). It
does not retry the creation of repositories, branches and commits. This module retries each call as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger, hide_in_logs
from ds_trainer.utils.secrets import redacted, register_secret

logger = get_logger(__name__)

WAITS = (1.0, 4.0, 15.0)
"""Seconds before each retry after a transient failure."""

_LOGGERS = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "hf_xet")
_CONNECTIONS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_TRANSIENT_STATUS = (408, 425, 429)
_MAX_TEXT = 400
_TOKEN = (
    "Create a token with write permission (huggingface.co/settings/tokens), and pass it as hub_token, in the "
    "environment variable HF_TOKEN, or with `hf auth login`"
)

R = TypeVar("R")


MAIN = "main"


class HubError(RuntimeError):
    """The Hub could not be reached, or answered with a server error, also after retries."""


def hub_api(token: str | None) -> Any:
    """A client of the Hub that uses ``token``, or the one of the environment. From now on its logs hide the token.

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
    register_secret(token)
    register_secret(huggingface_hub.get_token())
    hide_in_logs(*_LOGGERS)
    return api


def with_retries(call: Callable[[], R], action: str) -> R:
    """``call()``, with retries after transient failures: no connection, 5xx, too many requests.

    Args:
        call: a request to the Hub; may be called several times.
        action: subject of the sentence "... failed" in messages.

    Raises:
        ConfigError: the Hub refused the request; the message names what to change.
        HubError: all attempts failed.
    """
    for wait in (*WAITS, None):
        try:
            return call()
        except Exception as error:
            if not _is_of_hub(error):
                raise
            failure = hub_failure(error, action)
            if wait is None or not isinstance(failure, HubError):
                raise failure from None  # the original message may contain URLs with credentials
            logger.info("%s Trying again in %g s.", failure, wait)
        time.sleep(wait)
    raise AssertionError("the last round returns or raises")


def hub_failure(error: BaseException, action: str) -> ConfigError | HubError:
    """Convert an error of huggingface_hub during ``action`` to one of ours, with a remedy and without secrets."""
    status = _status(error)
    detail = " ".join(redacted(str(error)).split())[:_MAX_TEXT]
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ConfigError(
            f"{action} failed: HF_HUB_OFFLINE is set in the environment. Unset it, or set push_to_hub=False."
        )
    if type(error).__name__ == "HFValidationError":
        return ConfigError(f"{action} failed: {detail} Set hub_model_id to a name such as 'me/my-model'.")
    if status == 401:
        return ConfigError(
            f"{action} failed: the token is invalid or missing (401). {_TOKEN}; or set push_to_hub=False."
        )
    if status == 403:
        return ConfigError(
            f"{action} failed: the token lacks the permission (403). {_TOKEN}; or set hub_model_id to a "
            "repository of your own."
        )
    if status == 404:
        return ConfigError(
            f"{action} failed: the Hub has no such repository or branch, or the token has no access to it (404). Check "
            "hub_model_id and hub_revision."
        )
    if status is None or status >= 500 or status in _TRANSIENT_STATUS:
        return HubError(
            f"{action} failed ({detail or type(error).__name__}). Try again when the Hub (HF_ENDPOINT) can be reached, "
            "or set push_to_hub=False."
        )
    return ConfigError(f"{action} failed: the Hub refused it ({detail}).")


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
    """Whether the Hub or the network caused ``error``, rather than a defect here, a full disk or an interrupt."""
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HFValidationError | OfflineModeIsEnabled):
        return True
    return any(
        _status(part) is not None or type(part).__module__.split(".")[0] in _CONNECTIONS for part in _chain(error)
    )


def repository_name(hub_model_id: str | None, output_dir: str) -> str:
    """``hub_model_id``, or else the last part of ``output_dir``. Without an owner, it belongs to the token's user."""
    return hub_model_id if hub_model_id is not None else Path(output_dir).absolute().name


class Repository:
    """A repository on the Hub; created if it does not exist.

    Args:
        name: ``owner/name``, or a name under the token's user.
        token: a token with write permission; default: that of the environment or of ``hf auth login``.
        private: whether a new repository is private; default: the owner's setting.

    Raises:
        ConfigError: no token, or one without permission; no such owner; huggingface_hub is missing.
        HubError: the Hub does not answer.

    Attributes:
        api: the client of huggingface_hub.
        id: ``owner/name``.
    """

    def __init__(self, name: str, token: str | None = None, private: bool | None = None) -> None:
        self.api: Any = hub_api(token)
        created = with_retries(
            lambda: self.api.create_repo(name, private=private, exist_ok=True), f"Creating the repository {name!r}"
        )
        self.id: str = created.repo_id
        self._branches: set[str] = set()

    def use_branch(self, revision: str | None) -> None:
        """Create the branch ``revision`` if it does not exist. Pull requests (``refs/pr/1``) must exist.

        Raises:
            ConfigError, HubError: see the constructor.
        """
        if revision is None or revision == MAIN or revision.startswith("refs/") or revision in self._branches:
            return
        with_retries(
            lambda: self.api.create_branch(self.id, branch=revision, exist_ok=True),
            f"Creating the branch {revision!r} of {self.id}",
        )
        self._branches.add(revision)

    def files(self, revision: str | None) -> set[str]:
        """Paths of all files of a branch.

        Raises:
            ConfigError, HubError: see the constructor.
        """
        return set(
            with_retries(
                lambda: self.api.list_repo_files(self.id, revision=revision), f"Listing the files of {self.id}"
            )
        )
