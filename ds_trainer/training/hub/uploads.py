"""Background pushes: one after the other, in a thread, from staged files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.weights.weight_files import WEIGHTS
from ds_trainer.training.hub.client import Repository, with_retries
from ds_trainer.utils.files import new_partial
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.output_files import RECORD
from ds_trainer.utils.threads import new_executor

logger = get_logger(__name__)

# Model files that a commit removes if it does not replace them, so that a repository never holds files of two models.
_MODEL_FILES = re.compile(r"((pytorch_|adapter_)?model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")

_FAILED = "%s Training continues, and the next push sends everything again."

FOLDER = "hub_push"  # hidden: .hub_push.HOST.PROCESS..., since another process may push from the same directory
_CHECKPOINT = re.compile(r"checkpoint-\d+")
# The pointer names a checkpoint of this directory; the others are about this machine.
_LEFT_OUT = re.compile(
    rf"{re.escape(RECORD)}|latest(\.previous.*)?|(run_history|report)(\.previous.*)?\.(jsonl|html|json)"
)


@dataclass(frozen=True)
class Commit:
    """One commit: all files of a folder.

    Attributes:
        folder: the local folder.
        message: the commit message.
        path_in_repo: the folder in the repository, which becomes equal to ``folder``; empty for the root, where only
            weights that ``folder`` does not replace are removed.
    """

    folder: Path
    message: str
    path_in_repo: str = ""


class Uploads:
    """The pushes of one run to one repository. A process that exits waits for those in progress.

    Args:
        output_dir: files are staged in a folder of it.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._pending: list[Future[Any]] = []
        self._worker: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """Whether a push is in progress or waiting."""
        return any(not push.done() for push in self._pending)

    def begin(
        self,
        prepare: Callable[[Path], list[Commit]],
        repository: Repository,
        revision: str | None,
        log_failure: bool = False,
    ) -> Future[Any]:
        """Stage files now, and push them in the background.

        Args:
            prepare: fills an empty folder and returns the commits to make of it, in order.
            repository: the target.
            revision: branch; default: the main branch.
            log_failure: whether to log a warning if the push fails, before the future completes.

        Returns:
            A future with the ``CommitInfo`` of the first commit (huggingface_hub).

        Raises:
            OSError: files cannot be staged.
        """
        staged = new_partial(self._output_dir / FOLDER)
        try:
            commits = prepare(staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if self._worker is None:
            self._worker = new_executor("ds_trainer-hub")
        push = self._worker.submit(self._push, staged, commits, repository, revision, log_failure)
        self._pending = [*(earlier for earlier in self._pending if not earlier.done()), push]
        return push

    def finish(self) -> None:
        """Wait until no push is in progress. The futures hold the results and errors."""
        for push in self._pending:
            push.exception()
        self._pending = []

    def _push(
        self, staged: Path, commits: list[Commit], repository: Repository, revision: str | None, log_failure: bool
    ) -> Any:
        try:
            with _without_progress_bars():
                repository.use_branch(revision)
                infos = [_send(commit, repository, revision) for commit in commits]
            return infos[0]
        except Exception as error:
            if log_failure:
                logger.warning(_FAILED, error)
            raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _send(commit: Commit, repository: Repository, revision: str | None) -> Any:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    # Listed once: what disappears between two attempts is an error, and never a reason to remove it from the Hub.
    files = [path for path in sorted(commit.folder.rglob("*")) if path.is_file()]
    prefix = f"{commit.path_in_repo}/" if commit.path_in_repo else ""
    sent = {prefix + path.relative_to(commit.folder).as_posix(): path for path in files}

    def attempt() -> Any:
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

    return with_retries(attempt, f"Pushing {commit.message!r} to {repository.id}")


def _is_replaced(name: str, prefix: str) -> bool:
    if prefix:
        return name.startswith(prefix)
    return bool(_MODEL_FILES.fullmatch(name))


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of huggingface_hub, which would overwrite that of the training."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# What is pushed is staged, so that it cannot change or disappear during the upload. Files that are never modified in
# place (those of a complete checkpoint, weights) are hard-linked: links take no space and survive the removal of the
# original. All other files are copied.


def stage_model(output_dir: Path, target: Path) -> Path:
    """Stage ``output_dir`` without checkpoints, hidden files, and names that begin with an underscore.

    The record of the run and its report stay here too: they name paths, hosts and commands.
    """
    for path in _files(output_dir, leave_out_checkpoints=True):
        _stage(path, target / path.relative_to(output_dir), link=bool(WEIGHTS.fullmatch(path.name)))
    return target


def stage_checkpoint(checkpoint: Path, target: Path) -> Path:
    """Stage a complete checkpoint."""
    for path in _files(checkpoint):
        _stage(path, target / path.relative_to(checkpoint), link=True)
    return target


def _files(folder: Path, leave_out_checkpoints: bool = False) -> list[Path]:
    paths = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if leave_out_checkpoints and (_CHECKPOINT.match(path.name) or _LEFT_OUT.fullmatch(path.name)):
            continue
        if path.is_file():
            paths.append(path)
        elif path.is_dir() and not path.is_symlink():  # trackers link to their newest run
            paths.extend(_files(path, leave_out_checkpoints))
    return paths


def _stage(source: Path, target: Path, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without hard links
            pass
    shutil.copy2(source, target)
