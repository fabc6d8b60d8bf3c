"""Writes ``ds_trainer/planner/activations/table.json``: formulas of activations of the model families in transformers.

    python tools/activation_table.py            compare with the file; exit code 1 if it differs
    python tools/activation_table.py --write    replace it

Each entry is a run of a tiny model (``ds_trainer/planner/activations/probe.py``) for a family, an attention
implementation and a number format. What cannot run is left out, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ds_trainer.planner.activations.formula import TABLE, as_json
from ds_trainer.planner.activations.probe import EXPERTS, SIZES, probe
from tests.support.tiny_models import EXPERT_DECODERS, FAMILIES, positions, tiny

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
ATTENTIONS = ("sdpa", "eager")


def entries() -> Iterator[tuple[str, Any]]:
    """The key of each entry and its value."""
    for family in FAMILIES:
        for attention in ATTENTIONS:
            for name, dtype in FORMATS.items():
                key = f"{family} {attention} {name}"
                problems = []
                for sizes in _sizes(family):
                    try:
                        made = tiny(family, attention, dtype, sizes)
                        found = probe(made.model, made.layers, positions(family, sizes), made.inputs)
                        yield key, as_json(found)
                        break
                    except (ValueError, RuntimeError, AssertionError) as error:
                        problems.append((str(error).splitlines() or [type(error).__name__])[0][:120])
                else:
                    print(f"{key}: left out: {' / '.join(dict.fromkeys(problems))}", file=sys.stderr)


def _sizes(family: str) -> Iterator[dict[str, int]]:
    sizes = {**SIZES, **(EXPERTS if family in EXPERT_DECODERS else {})}
    yield sizes
    equal = {**sizes, "queries": sizes["hidden"], "keys": sizes["hidden"], "key_heads": sizes["heads"]}
    yield equal  # heads share the hidden width
    yield {**equal, "inner": 4 * sizes["hidden"]}  # no choice of the inner width


def main() -> int:
    """Compare or write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = dict(entries())
    text = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()) + "\n}\n"
    if options.write:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    same = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
    print(f"{TABLE.name} is {'up to date' if same else 'old: run tools/activation_table.py --write'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
