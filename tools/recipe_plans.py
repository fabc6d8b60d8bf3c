"""Write the table of docs/how-to/recipes.md: what the recipes of ds_configs take on GPUs, by the planner.

    python tools/recipe_plans.py            print the page
    python tools/recipe_plans.py --write    write it

Each recipe is planned as it is (``ds-trainer plan RECIPE --as-written``), with the shapes that model cards give.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from published_configs import MODERNBERT_BASE, QWEN2_5_VL_7B, llama, models

from ds_trainer.cli.main import main
from ds_trainer.planner.plan_report import seconds

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how-to" / "recipes.md"
DEVICE, DEVICES = "H100-80GB", (8, 1)
MODELS = {
    "meta-llama/Llama-3.1-8B": llama(4096, 14_336, 32, 32),
    "meta-llama/Llama-3.1-8B-Instruct": llama(4096, 14_336, 32, 32),
    "meta-llama/Llama-3.2-1B-Instruct": llama(2048, 8192, 16, 32, tied=True),
    "answerdotai/ModernBERT-base": MODERNBERT_BASE,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
}
RECIPES = ("full", "lora", "qlora", "continued_pretraining", "long_context", "distillation", "dpo", "reward",
           "classification", "embedding", "vision_language")  # fmt: skip
_TABLE = re.compile(r"(?<=\| recipe \| ).*?(?=\n\n)", re.DOTALL)


def page(text: str) -> str:
    """``text`` of the page with the figures of today."""
    return _TABLE.sub(lambda _: "\n".join(table()), text, count=1)


def table() -> Iterator[str]:
    """The lines, without the beginning of the first."""
    columns = [f"{count} x {DEVICE}: memory | step | tokens/s" for count in DEVICES]
    yield f"model, tokens | {' | '.join(columns)} |"
    yield f"|{'---|' * (2 + 3 * len(DEVICES))}"
    with models(MODELS):
        for name in RECIPES:
            answers = [_answer(name, count) for count in DEVICES]
            cells = [cell for answer in answers for cell in _cells(answer)]
            about, length = answers[0]["model"], answers[0]["goal"]["length"]
            yield f"| `{name}.yaml` | {about['name']}, {length:,} | {' | '.join(cells)} |"


def _answer(name: str, devices: int) -> dict[str, Any]:
    captured = io.StringIO()
    options = ["--as-written", "--json", "--device", DEVICE, "--devices-per-node", str(devices)]
    overrides = ["--arguments.sequence_parallel_size=1"] if name == "long_context" and devices == 1 else []
    with redirect_stdout(captured):
        main(["plan", f"ds_configs/recipes/{name}.yaml", *options, *overrides])
    answer: dict[str, Any] = json.loads(captured.getvalue())
    return answer


def _cells(answer: dict[str, Any]) -> tuple[str, str, str]:
    plan = (answer["plans"] or answer["rejected"])[0]
    memory = f"{plan['memory']['device'] / 1e9:.0f} GB"
    if not plan["fits"]:
        return f"{memory}: too large", "", ""
    return memory, seconds(plan["seconds"]["estimate"]), f"{plan['tokens_per_second']:,.0f}"


if __name__ == "__main__":
    found = page(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(found, encoding="utf-8")
    else:
        print(found)
