"""The repository on the Hub that a run pushes to: its name, and making it where it does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_trainer.training.hub.client import hub_api, patiently

MAIN = "main"


def repository_name(hub_model_id: str | None, output_dir: str) -> str:
    """``hub_model_id``, or else the last part of ``output_dir``. Without an owner it is one of the token's user."""
    return hub_model_id if hub_model_id is not None else Path(output_dir).absolute().name


class Repository:
    """A repository that exists.

    Args:
        name: ``owner/name``, or a name under the token's user.
        token: with write permission; default: that of the environment or of ``hf auth login``.
        private: whether others may see it, where it is made now; default: what the owner's settings say.

    Raises:
        ConfigError: a token without permission, or none; no such owner; huggingface_hub is missing.
        HubError: the Hub does not answer.

    Attributes:
        api: client of huggingface_hub.
        id: ``owner/name``.
    """

    def __init__(self, name: str, token: str | None = None, private: bool | None = None) -> None:
        self.api: Any = hub_api(token)
        made = patiently(
            lambda: self.api.create_repo(name, private=private, exist_ok=True), f"Making the repository {name!r}"
        )
        self.id: str = made.repo_id
        self._branches: set[str] = set()

    def use_branch(self, revision: str | None) -> None:
        """Make the branch ``revision`` where it does not exist. Pull requests (``refs/pr/1``) must exist.

        Raises:
            ConfigError, HubError: as the constructor.
        """
        if revision is None or revision == MAIN or revision.startswith("refs/") or revision in self._branches:
            return
        patiently(
            lambda: self.api.create_branch(self.id, branch=revision, exist_ok=True),
            f"Making the branch {revision!r} of {self.id}",
        )
        self._branches.add(revision)
