"""The repository on the Hub to which a run pushes: its name, and its creation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_trainer.training.hub.client import hub_api, with_retries

MAIN = "main"


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
