"""Run the commands of docs/how-to/plan.md again, and put today's output below them.

    python tools/plan_page.py            print the page
    python tools/plan_page.py --write    write it

In a block of text, every line that begins with ``$ ds-trainer plan`` is run, with ``| head -N`` if it has that; what
follows it up to the next such line is its output.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ds_trainer.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "plan.md"
PROMPT = "$ ds-trainer "
# Model cards of Llama 3.1: width, inner width, layers, heads.
SHAPES = {"Llama-3.1-8B": (4096, 14_336, 32, 32), "Llama-3.1-70B": (8192, 28_672, 80, 64)}


def page(text: str) -> str:
    """``text`` of the page with the output of today."""
    with _models():
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


@contextmanager
def _models() -> Iterator[None]:
    """Inside, the working directory has configurations of the models, and those of this repository."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "ds_configs").symlink_to(ROOT / "ds_configs")
        for name, (hidden, inner, layers, heads) in SHAPES.items():
            config = {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": 8,
                "vocab_size": 128_256,
                "max_position_embeddings": 131_072,
                "tie_word_embeddings": False,
            }
            (Path(directory) / name).mkdir()
            (Path(directory) / name / "config.json").write_text(json.dumps(config))
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    new = page(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    else:
        print(new)
