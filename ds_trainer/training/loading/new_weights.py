"""What the files of a model do not have: refused with names and a remedy, unless it is allowed to be new."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ds_trainer.checkpoint.loading.file_weights import Mismatch
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_SHOWN = 8


def new_names(
    missing: Collection[str],
    mismatched: Iterable[Mismatch],
    unexpected: Collection[str],
    allow_new_weights: Sequence[str] | bool,
    where: Path | str,
    model_class: str,
) -> list[str]:
    """The parameters that are to be initialized; a warning lists what nobody asked the file for.

    Args:
        missing: names of the model that the files do not have.
        mismatched: names whose shape differs, with both.
        unexpected: names of the files that the model does not have.
        allow_new_weights: which names may be new, as patterns (``"classifier.*"``); True for all, False for none.
        where: of the files, for messages.
        model_class: of the model, for messages.

    Raises:
        ConfigError: a name may not be new.
    """
    lost = sorted(name for name in missing if not _allowed(name, allow_new_weights))
    differing = {one.name: one for one in mismatched}
    other = sorted(name for name in differing if not _allowed(name, allow_new_weights))
    problems = []
    if lost:
        names = _listed(_with_nearest(lost, unexpected))
        problems.append(
            f"{where} has no weights for {len(lost)} of {model_class}'s tensors: {names}. If they are new, as a head "
            f"for another task is, pass {_argument(lost)} to initialize them; else it is the directory of another "
            f"model, or auto_class or key_mapping is wrong.{_without_match(allow_new_weights, missing)}"
        )
    if other:
        shapes = [str(differing[name]) for name in other]
        problems.append(
            f"{where} has other shapes than {model_class}: {_listed(shapes)}. Change the configuration (num_labels, "
            f"vocab_size ...) to fit, or pass {_argument(other)} to initialize them anew."
        )
    if problems:
        raise ConfigError(problems)
    if unexpected:
        logger.warning(
            "%s holds %d tensors that %s does not have; they are left out: %s.",
            *(where, len(unexpected), model_class, _listed(sorted(unexpected))),
        )
    found = sorted({*missing, *differing})
    if found:
        logger.warning("New, not in %s, and initialized: %s. Train them before you use them.", where, _listed(found))
    return found


def _allowed(name: str, patterns: Sequence[str] | bool) -> bool:
    if isinstance(patterns, bool):
        return patterns
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_match(patterns: Sequence[str] | bool, names: Collection[str]) -> str:
    """A sentence of the patterns that none of ``names`` has."""
    given = [] if isinstance(patterns, bool) else patterns
    idle = [repr(pattern) for pattern in given if not any(fnmatchcase(name, pattern) for name in names)]
    matches = "matches" if len(idle) == 1 else "match"
    return f" {', '.join(idle)} in allow_new_weights {matches} no tensor of the model that the files lack." * bool(idle)


def _with_nearest(names: Sequence[str], candidates: Collection[str]) -> list[str]:
    known = list(candidates)
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        shown.append(f"{name} (nearest in the file: {near[0]})" if near else name)
    return [*shown, *names[_SHOWN:]]


def _argument(names: Iterable[str]) -> str:
    patterns = dict.fromkeys(f"{parent}.*" if parent else name for name, parent in _parents(names))
    listed = ", ".join(f'"{pattern}"' for pattern in list(patterns)[:_SHOWN])
    return f"allow_new_weights=[{listed}]" if len(patterns) <= _SHOWN else "allow_new_weights=True"


def _parents(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, name.rpartition(".")[0]) for name in names]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
