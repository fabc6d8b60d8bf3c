"""Run the commands of docs/how-to/plan.md again, and put today's output below them.

    python tools/plan_page.py            print the page
    python tools/plan_page.py --write    write it

In a block of text, every line that begins with ``$ ds-trainer plan`` is run, with ``| head -N`` if it has that; what
follows it up to the next such line is its output.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

from published_configs import llama, models

from ds_trainer.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "plan.md"
PROMPT = "$ ds-trainer "
MODELS = {"Llama-3.1-8B": llama(4096, 14_336, 32, 32), "Llama-3.1-70B": llama(8192, 28_672, 80, 64)}


def page(text: str) -> str:
    """``text`` of the page with the output of today."""
    with models(MODELS):
        return re.sub(r"```text\n(.*?)```", lambda block: f"```text\n{_run_again(block[1])}```", text, flags=re.DOTALL)


def output(command: str) -> str:
    """What a command prints."""
    args, _, head = command.partition(" | head -")
    captured = io.StringIO()
    with redirect_stdout(captured):
        main(shlex.split(args))
    lines = captured.getvalue().splitlines(keepends=True)
    return "".join(lines[: int(head)] if head else lines)


def _run_again(block: str) -> str:
    commands = [line.removeprefix(PROMPT) for line in block.splitlines() if line.startswith(PROMPT)]
    return "".join(f"{PROMPT}{command}\n{output(command)}" for command in commands) if commands else block


if __name__ == "__main__":
    new = page(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    else:
        print(new)
