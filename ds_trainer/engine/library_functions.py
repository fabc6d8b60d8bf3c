"""The functions of other packages that ds_trainer replaces, or whose inside it relies on, and digests of their sources.

Another version of a package may change such a function without an error. Then a replacement no longer takes effect, or
takes effect on something else: gradients, weights or skipped steps can be wrong silently. So every row of
``library_functions.yaml`` names the functions, the file of ds_trainer that depends on them, what a change could
corrupt, and what would show it. ``library_functions.json`` has the digest of every function in each version that the
tests have run with; ``tools/library_functions.py`` adds those of the installed packages. :func:`changed_functions`
compares. It reads source files, and imports nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DIGESTS = Path(__file__).with_name("library_functions.json")
MISSING = "missing"
"""In place of a digest, where a version does not have the function."""


@dataclass(frozen=True)
class LibraryRow:
    """What one file of ds_trainer depends on.

    Attributes:
        file: its path below ``ds_trainer/``.
        risk: what goes wrong if one of the functions changes.
        shown_by: what would show it in a run: begins with "self-test" if that test covers it.
        replaces: functions whose place another one takes, ``module:name``.
        relies_on: functions whose inside the file knows.
    """

    file: str
    risk: str
    shown_by: str
    replaces: tuple[str, ...] = ()
    relies_on: tuple[str, ...] = ()


@functools.cache
def library_rows() -> tuple[LibraryRow, ...]:
    """The rows of ``library_functions.yaml``."""
    text = DIGESTS.with_suffix(".yaml").read_text(encoding="utf-8")
    table = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C it takes a tenth of the time

    def names(by_owner: Mapping[str, list[str]]) -> tuple[str, ...]:
        owners = {key: table["owners"].get(key, key) for key in by_owner}
        return tuple(
            f"{owner}{'.' if ':' in owner else ':'}{name}" for key, owner in owners.items() for name in by_owner[key]
        )

    return tuple(
        LibraryRow(**{**row, **{kind: names(row.get(kind, {})) for kind in ("replaces", "relies_on")}})
        for row in table["rows"]
    )


@dataclass(frozen=True)
class Change:
    """A function whose source is not one that the tests have run with.

    Attributes:
        function: ``module:name``.
        version: package and installed version.
        missing: it does not exist there.
        tested: the versions whose source is known.
        rows: what depends on it.
    """

    function: str
    version: str
    missing: bool
    tested: tuple[str, ...]
    rows: tuple[LibraryRow, ...]

    def __str__(self) -> str:
        tested = ", ".join(self.tested) or "no version"
        how = "does not exist" if self.missing else "has changed"
        risks = "; ".join(f"{row.file}: {row.risk}; {row.shown_by}" for row in self.rows)
        return f"{self.function} {how} in {self.version} (tested with {tested}): {risks}"

    @property
    def tested_at_start(self) -> bool:
        """Whether the self-test covers everything that depends on it."""
        return all(row.shown_by.startswith("self-test") for row in self.rows)


def known_digests() -> dict[str, dict[str, list[str]]]:
    """For each function, its digests, and the versions that have each of them."""
    digests: dict[str, dict[str, list[str]]] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return digests


def functions(rows: Iterable[LibraryRow] | None = None) -> dict[str, tuple[LibraryRow, ...]]:
    """Every function of ``rows`` (None: the table), with the rows that name it."""
    by_function: dict[str, tuple[LibraryRow, ...]] = {}
    for row in library_rows() if rows is None else rows:
        for name in (*row.replaces, *row.relies_on):
            by_function[name] = (*by_function.get(name, ()), row)
    return by_function


def changed_functions(rows: Iterable[LibraryRow] | None = None) -> list[Change]:
    """The functions of installed packages whose source is none of the known ones. Takes seconds: it parses files."""
    known, changes = known_digests(), []
    for name, of_rows in functions(rows).items():
        package = package_of(name)
        version = installed_version(package)
        if version is None:
            continue
        digest = source_digest(name)
        digests = known.get(name, {})
        if digest not in digests:
            tested = tuple(one for versions in digests.values() for one in versions)
            changes.append(Change(name, f"{package} {version}", digest == MISSING, tested, of_rows))
    return changes


def source_files(rows: Iterable[LibraryRow] | None = None) -> list[Path]:
    """The files of installed packages that contain the functions of ``rows`` (None: the table)."""
    files = {_file_of(name.partition(":")[0]) for name in functions(rows)}
    return sorted(path for path in files if path is not None)


def package_of(function: str) -> str:
    """``deepspeed`` for ``deepspeed.runtime.engine:DeepSpeedEngine.step``."""
    return function.partition(":")[0].partition(".")[0]


@functools.cache
def installed_version(package: str) -> str | None:
    """The installed version of ``package`` without the part that names a build (``+cpu``); None if there is none."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def source_digest(function: str) -> str:
    """Digest of the source of ``module:name`` without docstrings, comments and blank lines, or :data:`MISSING`.

    A name at the level of the module may also be an assignment or an import.
    """
    module, _, name = function.partition(":")
    path = _file_of(module)
    if path is None:
        return MISSING
    lines, tree = _parsed(path)
    node: Any = tree
    for part in name.split("."):
        node = (
            next((one for one in _statements(node.body) if part in _names(one)), None)
            if hasattr(node, "body")
            else None
        )
        if node is None:
            return MISSING
    return hashlib.sha256("\n".join(_code(node, lines)).encode()).hexdigest()[:12]


def _file_of(module: str) -> Path | None:
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *rest)
    # The functions of an extension are described by a stub.
    choices = (path.with_name(f"{path.name}.py"), path / "__init__.py", path.with_name(f"{path.name}.pyi"))
    return next((choice for choice in choices if choice.is_file()), None)


@functools.lru_cache(maxsize=4)
def _parsed(path: Path) -> tuple[list[str], ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those inside ``if`` and ``try``."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.ExceptHandler)):
                yield from _statements(getattr(statement, field, ()))


def _names(statement: ast.stmt) -> set[str]:
    """The names that ``statement`` defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in statement.names}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _code(node: Any, lines: list[str]) -> Iterator[str]:
    """The lines of a definition, with decorators, without docstrings, comments and blank lines."""
    left_out: set[int] = set()
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            left_out.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    begin = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    for number in range(begin, node.end_lineno + 1):
        line = lines[number - 1].rstrip()
        if number not in left_out and line and not line.lstrip().startswith("#"):
            yield line
