#!/usr/bin/env python3
"""Which behaviors of transformers' Trainer are kept: docs/reference/behaviors.md, from tests/behaviors.

    python tools/behaviors_table.py            print the page
    python tools/behaviors_table.py --write    write it

The tests run every behavior with both libraries and fail if one differs that is not in the list of differences, or if a
listed one no longer does. So this counts without running them.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "behaviors.md"

_INTRODUCTION = """# Behaviors of transformers' Trainer

Scripts rely on many small behaviors of `Trainer` and `TrainingArguments`. `tests/behaviors` collects those that scripts
see, from public training code, as functions that run with transformers' classes and with those of ds_trainer, in one
process on the CPU. Results are compared exactly, numbers to 1e-5, and exceptions by the built-in class that an `except`
clause names.

**{kept} of {all} behaviors are the same.** The others differ on purpose, for the reasons below.
"""


def page() -> str:
    """The page."""
    sys.path.insert(0, str(ROOT))
    from tests.behaviors.differences import DIFFERENCES
    from tests.behaviors.runner import all_behaviors

    behaviors = all_behaviors()
    titles = {one.topic: _title(one.function) for one in behaviors}
    counts = Counter(one.topic for one in behaviors)
    differing = Counter(name.partition("/")[0] for name in DIFFERENCES)
    lines = [_INTRODUCTION.format(kept=len(behaviors) - len(DIFFERENCES), all=len(behaviors))]
    lines += ["## Topics", "", "| topic | behaviors | kept |", "|---|---|---|"]
    lines += [f"| {titles[name]} | {count} | {count - differing[name]} |" for name, count in counts.items()]
    lines += ["", "## Differences", "", "| behavior | reason |", "|---|---|"]
    order = {one.name: number for number, one in enumerate(behaviors)}
    for name in sorted(DIFFERENCES, key=order.__getitem__):
        topic, _, behavior = name.partition("/")
        lines.append(f"| {topic.replace('_', ' ')}: {behavior.replace('_', ' ')} | {DIFFERENCES[name]} |")
    return "\n".join(lines) + "\n"


def _title(function: object) -> str:
    """The first line of the docstring of the file that defines ``function``, without its period."""
    module = inspect.getmodule(function)
    assert module is not None and module.__doc__ is not None
    return module.__doc__.strip().splitlines()[0].rstrip(".")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
