"""Pushes in the background: one after the other, in a thread, from files that were set aside."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ds_trainer.training.hub.client import patiently
from ds_trainer.training.hub.repository import Repository
from ds_trainer.training.hub.staging import FOLDER
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.threads import new_executor

logger = get_logger(__name__)

# Files that a commit removes where it does not replace them: two models in one repository would confuse a reader.
_OF_ONE_MODEL = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_model*")

_FAILED = "%s Nothing was pushed; training goes on, and the next push sends everything again."


@dataclass(frozen=True)
class Commit:
    """One commit: all files of a folder.

    Attributes:
        folder: what is sent.
        message: of the commit.
        path_in_repo: folder in the repository, which is made equal to ``folder``; empty for its root, where only
            weights that ``folder`` does not replace are removed.
    """

    folder: Path
    message: str
    path_in_repo: str = ""


class Uploads:
    """The pushes of one run to one repository. A process that ends waits for those under way.

    Args:
        output_dir: below it, files are set aside.
    """

    def __init__(self, output_dir: Path) -> None:
        self._root = output_dir / FOLDER
        self._numbers = itertools.count()
        self._pending: list[Future[Any]] = []
        self._worker: ThreadPoolExecutor | None = None
        shutil.rmtree(self._root, ignore_errors=True)  # of a process that was killed

    @property
    def busy(self) -> bool:
        """Whether a push is under way or waiting."""
        return any(not push.done() for push in self._pending)

    def begin(
        self,
        prepare: Callable[[Path], list[Commit]],
        repository: Repository,
        revision: str | None,
        nobody_waits: bool = False,
    ) -> Future[Any]:
        """Set files aside now, and push them in the background.

        Args:
            prepare: fills an empty folder and says which commits are made of it, in order.
            repository: where to.
            revision: branch; default: the main one.
            nobody_waits: say in the log if it fails; before the future knows, so that whoever waits for that has
                been told.

        Returns:
            What comes of it: huggingface_hub's ``CommitInfo`` of the first commit.

        Raises:
            OSError: files cannot be set aside.
        """
        staged = self._root / str(next(self._numbers))
        try:
            staged.mkdir(parents=True)
            commits = prepare(staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if self._worker is None:
            self._worker = new_executor("ds_trainer-hub")
        push = self._worker.submit(self._push, staged, commits, repository, revision, nobody_waits)
        self._pending = [*(earlier for earlier in self._pending if not earlier.done()), push]
        return push

    def finish(self) -> None:
        """Wait until nothing is under way. Whether it went well, the futures know."""
        for push in self._pending:
            push.exception()
        self._pending = []

    def _push(
        self, staged: Path, commits: list[Commit], repository: Repository, revision: str | None, nobody_waits: bool
    ) -> Any:
        try:
            with _without_progress_bars():
                repository.use_branch(revision)
                infos = [_send(commit, repository, revision) for commit in commits]
            return infos[0]
        except Exception as error:
            if nobody_waits:
                logger.warning(_FAILED, error)
            raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            if self._root.is_dir() and not any(self._root.iterdir()):
                self._root.rmdir()


def _send(commit: Commit, repository: Repository, revision: str | None) -> Any:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    def attempt() -> Any:
        files = [path for path in sorted(commit.folder.rglob("*")) if path.is_file()]
        prefix = f"{commit.path_in_repo}/" if commit.path_in_repo else ""
        sent = {prefix + path.relative_to(commit.folder).as_posix(): path for path in files}
        present = repository.api.list_repo_files(repository.id, revision=revision)
        stale = [name for name in present if name not in sent and _is_replaced(name, prefix)]
        return repository.api.create_commit(
            repository.id,
            operations=[
                *(CommitOperationDelete(name) for name in stale),
                *(CommitOperationAdd(name, path) for name, path in sent.items()),
            ],
            commit_message=commit.message,
            revision=revision,
        )

    return patiently(attempt, f"Pushing {commit.message!r} to {repository.id}")


def _is_replaced(name: str, prefix: str) -> bool:
    if prefix:
        return name.startswith(prefix)
    return any(fnmatch(name, pattern) for pattern in _OF_ONE_MODEL) and "/" not in name


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """They would be drawn across that of the training."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
