"""Checks for tensors that the files of a model lack: an error, unless they are allowed to be new."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ds_trainer.checkpoint.loading.file_weights import ShapeMismatch
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

logger = get_logger(__name__)

_MAX_NAMES = 8


def check_missing_weights(
    missing: Collection[str],
    mismatched: Iterable[ShapeMismatch],
    unexpected: Collection[str],
    allow_new_weights: Sequence[str] | bool,
    where: Path | str,
    model_class: str,
) -> list[str]:
    """Returns the names of the parameters to initialize; logs a warning for unused tensors in the files.

    Args:
        missing: names of the model that the files lack.
        mismatched: tensors whose shapes differ.
        unexpected: names in the files that the model does not have.
        allow_new_weights: patterns of names that may be new (``"classifier.*"``); True for all, False for none.
        where: the directory of the files, for messages.
        model_class: the class of the model, for messages.

    Raises:
        ConfigError: a missing or mismatched tensor is not allowed to be new.
    """
    rejected = sorted(name for name in missing if not _allowed(name, allow_new_weights))
    differing = {mismatch.name: mismatch for mismatch in mismatched}
    rejected_shapes = sorted(name for name in differing if not _allowed(name, allow_new_weights))
    problems = []
    if rejected:
        names = listed(_with_nearest(rejected, unexpected), _MAX_NAMES)
        problems.append(
            f"{where} has no weights for {counted(len(rejected), 'tensor')} of {model_class}: {names}. If they are "
            f"new, such as a head for another task, pass {_suggested_argument(rejected)} to initialize them. "
            "Otherwise the directory belongs to another model, or auto_class or key_mapping is "
            f"wrong.{_unmatched(allow_new_weights, missing)}"
        )
    if rejected_shapes:
        shapes = [str(differing[name]) for name in rejected_shapes]
        problems.append(
            f"{where} has tensors whose shapes differ from {model_class}: {listed(shapes, _MAX_NAMES)}. Change the "
            f"configuration (num_labels, vocab_size ...) to match, or pass {_suggested_argument(rejected_shapes)} to "
            "initialize them."
        )
    if problems:
        raise ConfigError(problems)
    if unexpected:
        logger.warning(
            "%s contains %s that %s does not have, ignored: %s.",
            *(where, counted(len(unexpected), "tensor"), model_class, listed(sorted(unexpected), _MAX_NAMES)),
        )
    new = sorted({*missing, *differing})
    if new:
        logger.warning(
            "Newly initialized, because %s does not contain them: %s. Train the model before using it for predictions.",
            where,
            listed(new, _MAX_NAMES),
        )
    return new


def _allowed(name: str, patterns: Sequence[str] | bool) -> bool:
    if isinstance(patterns, bool):
        return patterns
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unmatched(patterns: Sequence[str] | bool, names: Collection[str]) -> str:
    """Returns a sentence about patterns that match none of ``names``; empty if there are none."""
    given = [] if isinstance(patterns, bool) else patterns
    unused = [repr(pattern) for pattern in given if not any(fnmatchcase(name, pattern) for name in names)]
    matches = "matches" if len(unused) == 1 else "match"
    return f" {', '.join(unused)} in allow_new_weights {matches} no tensor that the files lack." * bool(unused)


def _with_nearest(names: Sequence[str], candidates: Collection[str]) -> list[str]:
    known = list(candidates)
    shown = []
    for name in names[:_MAX_NAMES]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        shown.append(f"{name} (nearest in the file: {near[0]})" if near else name)
    return [*shown, *names[_MAX_NAMES:]]


def _suggested_argument(names: Iterable[str]) -> str:
    patterns = dict.fromkeys(f"{parent}.*" if (parent := name.rpartition(".")[0]) else name for name in names)
    quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
    return f"allow_new_weights=[{quoted}]" if len(patterns) <= _MAX_NAMES else "allow_new_weights=True"
