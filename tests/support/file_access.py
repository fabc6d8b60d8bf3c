"""Which files a process opens: all of them, by whatever means."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_watching: list[tuple[Path, list[str]]] = []
_installed = False


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _watching and isinstance(arguments[0], (str, Path)):
        path = Path(arguments[0])
        for directory, found in _watching:
            if directory in path.parents or directory == path:
                found.append(path.relative_to(directory).as_posix())


@contextmanager
def opened(directory: Path) -> Iterator[list[str]]:
    """Inside, the list fills with the files opened and the folders listed in ``directory``, once for each time."""
    global _installed
    if not _installed:
        sys.addaudithook(_note)  # there is no way to take one away
        _installed = True
    watch: tuple[Path, list[str]] = (directory, [])
    _watching.append(watch)
    try:
        yield watch[1]
    finally:
        _watching.remove(watch)
