"""Draws docs/assets/report.png, report-phone.png and dashboard.png: of a run that took place, in a headless Chromium.

    PYTHONPATH=. python tools/report_screenshots.py RUN

Those of the site are of the run of docs/tutorials/chat-fine-tune.md.
"""

from __future__ import annotations

import sys
import tempfile
from html import escape
from pathlib import Path

from ds_trainer.monitor.dashboard.screen import screen_lines
from ds_trainer.monitor.report.run_files import RunFiles
from ds_trainer.monitor.report.writing import write_report
from tests.support.chromium import Chromium

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
_STYLE = (
    "body{margin:0;background:#0f1318;color:#d7dde6}"
    "pre{font:14px/1.2 'DejaVu Sans Mono',monospace;padding:14px;margin:0}"
    # Fonts of browsers have wider dots than letters, those of terminals do not.
    "i{display:inline-block;width:1ch;font-style:normal;transform:scaleX(.82);transform-origin:left}"
)


def dashboard_page(lines: list[str]) -> str:
    """The dashboard as HTML, for a picture."""
    cells = (f"<i>{c}</i>" if 0x2800 <= ord(c) < 0x2900 else escape(c) for c in "\n".join(lines))
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style><pre>{''.join(cells)}</pre>"


def main() -> None:
    """Write the pictures."""
    run = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as profile:
        folder = Path(name)
        page = folder / "report.html"
        page.write_text(write_report(run).read_text().replace(str(run.parents[1]), ""))
        terminal = folder / "dashboard.html"
        terminal.write_text(dashboard_page(screen_lines(RunFiles.read(run), 120, 40, 2.0)))
        with Chromium(Path(profile)) as chromium:
            for path, size, dark, picture in (
                (page, (1100, 1250), False, "report.png"),
                (page, (390, 1250), True, "report-phone.png"),
                (terminal, (1045, 700), True, "dashboard.png"),
            ):
                chromium.open(path, *size, dark)
                chromium.screenshot(ASSETS / picture)
                print(ASSETS / picture, (ASSETS / picture).stat().st_size)


if __name__ == "__main__":
    main()
