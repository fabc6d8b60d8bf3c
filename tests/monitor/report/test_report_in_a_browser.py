"""The report in a real Chromium: phone and desktop, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.monitor.report.writing import write_comparison, write_report
from tests.monitor.report.example_run import example_run
from tests.support.chromium import Chromium

pytestmark = pytest.mark.needs("chromium")
PHONE, DESKTOP = (390, 844), (1200, 1500)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    run = example_run(folder / "chat-8b")
    other = example_run(folder / "chat-8b-again")
    return {"report": write_report(run), "comparison": write_comparison(run, other, folder / "comparison.html")}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def colors(chromium: Chromium, selector: str) -> dict[str, Any]:
    return chromium.evaluate(  # type: ignore[no-any-return]
        f"(() => {{const found = getComputedStyle(document.querySelector('{selector}'));"
        "return {text: found.color, back: found.backgroundColor};})()"
    )


def luminance(color: str) -> float:
    parts = [int(text) / 255 for text in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["report", "comparison"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_page_fits_and_needs_nothing_else(
    page: str, dark: bool, size: tuple[int, int], pages: dict[str, Path], chromium: Chromium
) -> None:
    chromium.requests.clear()
    chromium.problems.clear()
    chromium.open(pages[page], *size, dark)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= size[0]
    beyond = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg'))"
    assert chromium.evaluate(f"{beyond}.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length") == 0
    assert chromium.problems == []
    assert chromium.requests == [pages[page].absolute().as_uri()]
    assert chromium.evaluate("document.querySelectorAll('script, link, img, iframe').length") == 0


def test_colors_follow_the_scheme_and_can_be_read(pages: dict[str, Path], chromium: Chromium) -> None:
    backgrounds = []
    for dark in (False, True):
        chromium.open(pages["report"], *PHONE, dark)
        body, card = colors(chromium, "body"), colors(chromium, ".card")
        backgrounds.append(body["back"])
        assert contrast(body["text"], card["back"]) > 7
        for selector in (".soft", ".good", "th", "summary"):
            assert contrast(colors(chromium, selector)["text"], card["back"]) > 4.5, (dark, selector)
    assert luminance(backgrounds[0]) > 0.8 and luminance(backgrounds[1]) < 0.05


def test_the_first_screen_answers_the_questions(pages: dict[str, Path], chromium: Chromium, tmp_path: Path) -> None:
    chromium.open(pages["report"], *DESKTOP, False)
    text = chromium.evaluate("document.body.innerText")
    for words in (
        "Finished", "MFU 37",
        "device hours at 2.5 each", "of the time of steps is waiting for data", "eval_loss rose from"
    ):  # fmt: skip
        assert words in text, words
    last = chromium.evaluate("[...document.querySelectorAll('.card')].at(-1).getBoundingClientRect().bottom")
    assert last < 500  # the cards are above the fold
    # The bottom of the curve is drawn where it is: a wrong scale would put points outside of the image.
    outside = "[...document.querySelectorAll('svg .spike')].filter(e => +e.getAttribute('cy') < 0).length"
    assert chromium.evaluate(outside) == 0
    chromium.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 20_000


def test_a_page_that_is_too_wide_is_noticed(pages: dict[str, Path], chromium: Chromium, tmp_path: Path) -> None:
    """The negative control: an element of 500 pixels, a script, and a picture of another host."""
    broken = tmp_path / "broken.html"
    text = (
        pages["report"]
        .read_text()
        .replace("<main>", '<main><div style="width:500px">x</div><img src="https://a.test/x">')
    )
    broken.write_text(text)
    chromium.problems.clear()
    chromium.open(broken, *PHONE, False)
    assert chromium.evaluate("document.documentElement.scrollWidth") > PHONE[0]
    assert any("Content Security Policy" in problem for problem in chromium.problems)
