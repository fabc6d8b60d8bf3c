"""Where the files of a model are on this machine: a local directory, or a repository of the Hub, downloaded once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.loading.weight_index import files_of_index
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import read_json, write_text_atomic
from ds_trainer.utils.secrets import keep_secret, redacted

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
# Configuration, tokenizer and code; all small.
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


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
    """The local directory that holds the model ``name_or_path``; of the Hub, without ``weights``, all but those.

    A name of the Hub is downloaded into huggingface_hub's cache: configuration, tokenizer, and the weight files that
    are read (safetensors if there are any, else ``.bin``). Where several processes of a machine ask at the same time,
    one talks to the Hub and the others wait for its files.

    Raises:
        ConfigError: it is neither a directory nor a repository that can be had.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        found = path / subfolder
        if not found.is_dir():
            raise ConfigError(f"{name_or_path!r} has no folder {subfolder!r} (subfolder).")
        return found
    if path.is_file():
        raise ConfigError(
            f"{name_or_path!r} is a file. Name the directory that holds it together with the model's config.json."
        )
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1 or not name_or_path.strip():
        near = did_you_mean(path.name, _names_beside(path)).replace("'", f"'{path.parent}/", 1)
        raise ConfigError(
            f"{name_or_path!r} is no directory (looked from {Path.cwd()}), and not the name of a repository either."
            f"{near} Name the directory of a saved model, or a repository of the Hub such as 'me/my-model'."
        )
    return _Download(name_or_path, revision, token, cache_dir, subfolder, local_files_only, weights).directory()


def _names_beside(path: Path) -> list[str]:
    beside = path.parent
    return [child.name for child in beside.iterdir() if child.is_dir()] if beside.is_dir() else []


class _Download:
    """One repository of the Hub at one revision."""

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
                f"{name!r} is no directory, and names of the Hub need the package huggingface_hub: pip install "
                "huggingface_hub."
            ) from None
        keep_secret(token if isinstance(token, str) else None)
        self._name, self._revision, self._token, self._subfolder = name, revision, token, subfolder
        self._with_weights = weights
        self._cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
        self._offline = local_files_only or bool(constants.HF_HUB_OFFLINE)

    def directory(self) -> Path:
        """The folder of the snapshot; downloads what is not there yet."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        if self._offline:
            return self._fetched()
        began = time.time()
        identity = json.dumps([self._name, self._revision, self._subfolder, self._with_weights])
        locks = self._cache / ".locks" / "ds_trainer"
        locks.mkdir(parents=True, exist_ok=True)
        place = locks / hashlib.sha256(identity.encode()).hexdigest()[:32]
        result = place.with_suffix(".json")
        with WeakFileLock(f"{place}.lock"):
            if result.is_file() and result.stat().st_mtime >= began:
                told = Path(read_json(result)["directory"])  # who held the lock meanwhile has just asked the Hub
                if told.is_dir():
                    return told
            directory = self._fetched()
            write_text_atomic(result, json.dumps({"directory": str(directory)}))
        return directory

    def _fetched(self) -> Path:
        root = self._snapshot(_SMALL)
        directory = root / self._subfolder
        for names in self._weights(directory) if self._with_weights else ():
            self._snapshot(names, commit=root.name)
            if any((directory / name).is_file() for name in names):
                break
        return directory

    def _weights(self, directory: Path) -> Iterable[list[str]]:
        """What may hold the weights, one alternative after the other."""
        if (directory / ADAPTER_CONFIG).is_file():
            yield from ([name] for name in _ADAPTERS)
        for single in (SAFETENSORS, BIN):
            index = directory / f"{single}.index.json"
            yield sorted(set(files_of_index(index).values())) if index.is_file() else [single]

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
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> ConfigError:
        name, kind = self._name, type(error).__name__
        what = f"{name!r} is no directory (looked from {Path.cwd()}), and "
        chain = (error, error.__cause__, error.__context__)
        codes: list[Any] = [getattr(getattr(one, "response", None), "status_code", None) for one in chain]
        status = next((code for code in codes if code is not None), None)
        if kind == "HFValidationError":
            return ConfigError(f"{what}no name of a repository of the Hub, such as 'me/my-model'.")
        if kind == "RevisionNotFoundError":
            return ConfigError(f"The repository {name!r} of the Hub has no revision {self._revision!r}.")
        if kind == "GatedRepoError" or status in (401, 403):
            return ConfigError(
                f"{what}the Hub does not give this token the repository of that name. Ask for access on its page and "
                "log in with `hf auth login`, or pass token=."
            )
        if kind == "RepositoryNotFoundError":
            return ConfigError(
                f"{what}the Hub has no repository of that name that this token may see. Check the name, log in with "
                "`hf auth login`, or pass token=."
            )
        if self._offline:
            return ConfigError(
                f"{what}the cache {self._cache} does not hold that repository, and the Hub may not be asked "
                "(HF_HUB_OFFLINE, or local_files_only=True). Download it first: "
                f"`hf download {name}` on a machine with a network, with the same HF_HOME."
            )
        said = " ".join(redacted(str(error)).split())[:300]
        return ConfigError(
            f"{what}the Hub could not be asked for that repository ({said or kind}). Try again, or download it first: "
            f"`hf download {name}`."
        )
