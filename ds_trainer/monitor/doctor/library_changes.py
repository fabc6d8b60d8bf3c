"""Whether functions that ds_trainer replaces or relies on are those that its tests have run with.

The table is :mod:`ds_trainer.engine.library_functions`. Comparing takes seconds, so the result is recorded beside those
of the self-test, under the sizes and times of the files that were read: an edited or reinstalled package is compared
again. Rank 0 does it when a training begins; ``ds-trainer doctor`` always compares.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from ds_trainer.engine.library_functions import (
    DIGESTS,
    Change,
    changed_functions,
    functions,
    installed_version,
    source_files,
)
from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.utils.files import write_json
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

TESTED = Path(__file__).with_name("tested_versions.json")
"""What the tests said in each environment of ``tools/versions.sh``, which writes it, and the bounds of pyproject."""
_INSTALL = "What then fails is in docs/reference/versions.md and pyproject.toml. Install versions within the bounds."
_NAMED = 8  # changes in a warning
_COMPARED = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "peft")


def warn_of_changes(directory: Path, self_test: str) -> bool:
    """Warn of packages outside the bounds, and of changed functions, with what they could corrupt. Called by one rank.

    Args:
        directory: where the records are; beside that of the self-test.
        self_test: the mode of the self-test, for the remedy.

    Returns:
        Whether a change was found that no earlier start has recorded: the self-test should run again.
    """
    outside = outside_bounds()
    if outside:
        logger.warning("ds_trainer needs other versions than the installed ones: %s. %s", "; ".join(outside), _INSTALL)
    whole = hashlib.sha256(DIGESTS.read_bytes())
    for path in source_files():
        status = path.stat()
        whole.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    record = directory / f"{whole.hexdigest()[:16]}.json"
    try:
        texts, new = json.loads(record.read_text(encoding="utf-8"))["changes"], False
    except (OSError, ValueError, KeyError):
        texts, new = [str(change) for change in changed_functions()], True
        try:
            write_json(record, {"changes": texts})
        except OSError as error:
            logger.warning("The comparison of libraries cannot be recorded in %s (%s).", directory, error)
    if texts:
        rest = len(texts) - _NAMED
        logger.warning(
            "Libraries differ from those that ds_trainer was tested with, in functions that it replaces or relies on:\n"
            "  %s%s\n%s; ds-trainer doctor says more.",
            "\n  ".join(texts[:_NAMED]),
            f"\n  and {rest} more" if rest > 0 else "",
            "The self-test is off (self_test=never): nothing checks them"
            if self_test == "never"
            else "The self-test compares gradients, skipped steps and tensor parallelism with plain PyTorch",
        )
    return bool(texts and new)


def library_findings() -> list[Finding]:
    """For ``ds-trainer doctor``: what is known about the installed set of versions, and each changed function."""
    changes, outside = changed_functions(), outside_bounds()
    bounds = [Finding(Level.WARN, "bounds", "; ".join(outside), _INSTALL)] if outside else []
    installed = {package: installed_version(package) for package in _COMPARED}
    return [
        versions_finding({name: version for name, version in installed.items() if version is not None}, tested_sets()),
        *bounds,
        *([_function(change) for change in changes] or [_no_change()]),
    ]


def outside_bounds() -> list[str]:
    """Installed packages that pyproject.toml does not allow: each with its version and the bounds.

    Only the release number counts, as vendors build from the source of a coming release: torch 2.12.0a0+nv.
    """
    bounds: dict[str, str] = json.loads(TESTED.read_text(encoding="utf-8"))["bounds"]
    releases = {name: re.match(r"[\d.]*\d", installed_version(name) or "") for name in bounds}
    return [
        f"{name} {installed_version(name)} is installed, and ds_trainer asks for {name}{bounds[name]}"
        for name, release in releases.items()
        if release is not None and not SpecifierSet(bounds[name]).contains(release[0])
    ]


def tested_sets() -> list[dict[str, Any]]:
    """The environments of ``tools/versions.sh``: name, versions, and how many tests passed and which failed."""
    sets: list[dict[str, Any]] = json.loads(TESTED.read_text(encoding="utf-8"))["sets"]
    return sets


def versions_finding(installed: dict[str, str], sets: Sequence[dict[str, Any]]) -> Finding:
    """Compares ``installed``, the versions by package, with the ``sets`` that were tested."""
    name, text = "tested versions", ", ".join(f"{package} {version}" for package, version in installed.items())
    for one in sets:
        if all(one["packages"].get(package) == version for package, version in installed.items()):
            failed = one["failed"]
            result = f"{one['passed']} tests passed{f', {len(failed)} failed' if failed else ''}"
            parts = "docs/reference/versions.md says in which parts"
            message = f"the set '{one['name']}' of {one['date']}, with which {result} ({parts}): {text}"
            if failed:
                return Finding(Level.WARN, name, message, f"What fails: {'; '.join(failed)}.")
            return Finding(Level.OK, name, message)
    unknown = []
    for package, version in installed.items():
        known = sorted({one["packages"][package] for one in sets if package in one["packages"]}, key=_order)
        if known and version not in known:
            where = "between" if _order(known[0]) < _order(version) < _order(known[-1]) else "outside"
            unknown.append(f"{package} {version} ({where} the tested {', '.join(known)})")
    if not unknown:
        return Finding(Level.OK, name, f"each is in a tested set, though not together: {text}")
    outside = any("outside" in one for one in unknown)
    remedy = "Install tested versions (pip install -c constraints.txt ...), or run the tests with these."
    return Finding(Level.WARN if outside else Level.OK, name, "; ".join(unknown), remedy if outside else "")


def _function(change: Change) -> Finding:
    covered = change.tested_at_start
    remedy = (
        "The self-test covers it: train with self_test=always once."
        if covered
        else "The self-test does not cover it: compare a short run with one of a tested version."
    )
    return Finding(Level.WARN, "changed function", str(change), remedy)


def _no_change() -> Finding:
    return Finding(Level.OK, "functions", f"all {len(functions())} that are replaced or relied on are known")


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
