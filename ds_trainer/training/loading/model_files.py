"""Locates the files of a model: a local directory, or a Hub repository, which is downloaded once per machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.loading.weight_index import read_weight_map
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import directory_problem, read_json, unusual_file, user_path, write_text_atomic
from ds_trainer.utils.secrets import redacted, register_secret

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
# Configuration, tokenizer and code; all small.
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_WEIGHTS = ("*.safetensors", "*.bin")


def model_directory(
    name_or_path: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """Returns the local directory of the model ``name_or_path``.

    A Hub repository is downloaded to huggingface_hub's cache: configuration, tokenizer and, if ``weights``, the weight
    files that are read (safetensors if there are any, otherwise ``.bin``). If several processes on a machine request it
    at the same time, one downloads and the others wait.

    Raises:
        ConfigError: it is neither a directory nor an accessible repository.
    """
    directory = local_directory(name_or_path, subfolder)
    if directory is not None:
        return directory
    return _Download(
        name=name_or_path,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        subfolder=subfolder,
        local_files_only=local_files_only,
        weights=weights,
    ).directory()


def local_directory(name_or_path: str, subfolder: str = "") -> Path | None:
    """The directory that ``name_or_path`` is; None if it may be the name of a Hub repository.

    Raises:
        ConfigError: it is neither.
    """
    path = user_path(name_or_path, f"The model {name_or_path!s}")
    if (problem := directory_problem(path)) not in (None, "is a file"):
        raise ConfigError(f"{name_or_path!r} {problem}. Pass the directory of a saved model.")
    if path.is_dir():
        directory = path / subfolder
        if not directory.is_dir():
            raise ConfigError(f"{name_or_path!r} has no subfolder {subfolder!r}. Correct subfolder.")
        if (unusual := unusual_file(directory, _SMALL_FILES) or unusual_file(directory, _WEIGHTS, 2**60)) is not None:
            raise ConfigError(unusual)
        return directory
    if path.is_file():
        raise ConfigError(
            f"{name_or_path!r} is a file. Pass the directory that contains it and the model's config.json."
        )
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1 or not name_or_path.strip():
        parent = path.parent
        near = did_you_mean(
            path.name, ([child.name for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else [])
        ).replace("'", f"'{path.parent}/", 1)
        raise ConfigError(
            f"{name_or_path!r} is not a directory (working directory: {Path.cwd()}) and not a valid repository name."
            f"{near} Pass the directory of a saved model, or a Hub repository such as 'me/my-model'."
        )
    return None


class _Download:
    """The download of one revision of a Hub repository."""

    def __init__(
        self,
        name: str,
        revision: str | None,
        token: str | bool | None,
        cache_dir: str | None,
        subfolder: str,
        local_files_only: bool,
        weights: bool,
    ) -> None:
        try:
            from huggingface_hub import constants
        except ImportError:
            raise ConfigError(
                f"{name!r} is not a directory, and Hub names require huggingface_hub: pip install huggingface_hub."
            ) from None
        register_secret(token if isinstance(token, str) else None)
        self._name, self._revision, self._token, self._subfolder = name, revision, token, subfolder
        self._with_weights = weights
        self._cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
        self._offline = local_files_only or bool(constants.HF_HUB_OFFLINE)

    def directory(self) -> Path:
        """Returns the directory of the snapshot; downloads missing files."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        if self._offline:
            return self._download()
        identity = json.dumps([self._name, self._revision, self._subfolder, self._with_weights])
        locks = self._cache / ".locks" / "ds_trainer"
        locks.mkdir(parents=True, exist_ok=True)
        lock = locks / hashlib.sha256(identity.encode()).hexdigest()[:32]
        result = lock.with_suffix(".json")
        before = result.stat().st_mtime_ns if result.is_file() else None
        with WeakFileLock(f"{lock}.lock"):
            if result.is_file() and result.stat().st_mtime_ns != before:
                cached = Path(read_json(result)["directory"])  # downloaded by another process while this one waited
                if cached.is_dir():
                    return cached
            directory = self._download()
            write_text_atomic(result, json.dumps({"directory": str(directory)}))
        return directory

    def _download(self) -> Path:
        root = self._snapshot(_SMALL_FILES)
        directory = root / self._subfolder
        for names in self._weights(directory) if self._with_weights else ():
            self._snapshot(names, commit=root.name)
            if any((directory / name).is_file() for name in names):
                break
        return directory

    def _weights(self, directory: Path) -> Iterable[list[str]]:
        """Yields lists of files that may contain the weights, in order of preference."""
        if (directory / ADAPTER_CONFIG).is_file():
            yield from ([name] for name in _ADAPTERS)
        for single in (SAFETENSORS, BIN):
            index = directory / f"{single}.index.json"
            yield sorted(set(read_weight_map(index).values())) if index.is_file() else [single]

    def _snapshot(self, patterns: Iterable[str], commit: str | None = None) -> Path:
        from huggingface_hub import snapshot_download

        prefix = f"{self._subfolder}/" if self._subfolder else ""
        try:
            return Path(
                snapshot_download(
                    self._name,
                    revision=commit or self._revision,
                    token=self._token,
                    cache_dir=self._cache,
                    local_files_only=self._offline,
                    allow_patterns=[prefix + pattern for pattern in patterns],
                    library_name="ds_trainer",
                )
            )
        except Exception as error:
            if not type(error).__module__.startswith(("huggingface_hub", "httpx", "requests")):
                raise
            raise self._explain(error) from None

    def _explain(self, error: Exception) -> ConfigError:
        name, kind = self._name, type(error).__name__
        what = f"{name!r} is not a directory (working directory: {Path.cwd()}), and "
        chain = (error, error.__cause__, error.__context__)
        codes: list[Any] = [getattr(getattr(exception, "response", None), "status_code", None) for exception in chain]
        status = next((code for code in codes if code is not None), None)
        if kind == "HFValidationError":
            return ConfigError(f"{what}not a valid Hub repository name such as 'me/my-model'.")
        if kind == "RevisionNotFoundError":
            return ConfigError(f"The Hub repository {name!r} has no revision {self._revision!r}.")
        if kind == "GatedRepoError" or status in (401, 403):
            return ConfigError(
                f"{what}this token has no access to the Hub repository of that name. Request access on its page and "
                "log in with `hf auth login`, or pass token=."
            )
        if kind == "RepositoryNotFoundError":
            return ConfigError(
                f"{what}the Hub has no repository of that name that is visible to this token. Check the name, log in "
                "with `hf auth login`, or pass token=."
            )
        if self._offline:
            return ConfigError(
                f"{what}the cache {self._cache} does not contain that repository, and access to the Hub is disabled "
                "(HF_HUB_OFFLINE, or local_files_only=True). Download it first: "
                f"`hf download {name}` on a machine with network access, with the same HF_HOME."
            )
        message = " ".join(redacted(str(error)).split())[:300]
        return ConfigError(
            f"{what}the request to the Hub for that repository failed ({message or kind}). Try again, or download it "
            f"first: `hf download {name}`."
        )
