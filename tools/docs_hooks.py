"""Hooks of mkdocs (mkdocs.yml): links to files of the repository, and docstrings that were written for Sphinx."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Turn links that leave ``docs/`` (they work in a checkout) into the path of the file in the repository.

    Raises:
        FileNotFoundError: such a link leads nowhere.
    """
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def as_path(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[2]))
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {match[2]} does not exist.")
        name = target.relative_to(ROOT).as_posix()
        return f"`{name}`" if match[1].strip("`") in (name, target.name) else f"{match[1]} (`{name}`)"

    return _LINK.sub(as_path, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove what reStructuredText leaves in rendered docstrings: roles, and the double colon before a block."""
    html = re.sub(r":\w+:(?=<code>)", "", html)
    html = re.sub(r"(<code>)~(?:\w+\.)*", r"\1", html)
    return re.sub(r"<p>::</p>\s*", "", re.sub(r"::(?=</p>)", ":", html))
