#!/usr/bin/env python3
"""What the losses of models and functions are the mean of: the table of docs/reference/losses.md.

    python tools/loss_table.py            print the page
    python tools/loss_table.py --write    write it

The rows are the cases of tests/support/loss_models.py; tests/training/loop/test_measured_losses.py measures each.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "losses.md"
_HEAD = """# What losses are the mean of

A loss that does not use `num_items_in_batch` is measured on the first batch
([how](../explanation/loss.md#what-a-loss-is-the-mean-of)). This table has what the measurement finds. *Items* are
labels that are not -100, or samples where the labels are one class or number for each. *Not additive*: the loss of a
batch does not follow from the losses of its parts, so it depends on the micro-batch, and a warning says so.

Models have a few thousand random weights and labels of different lengths. Causal language models are missing, because
they use the count. Made by `tools/loss_table.py`; `tests/training/loop/test_measured_losses.py` measures each row.

| field | model or loss function | the loss is a mean over |
|---|---|---|
"""
_TAIL = """
## Losses of sentence-transformers

Measured with a small encoder and six samples.

| loss | the loss is a mean over |
|---|---|
| CosineSimilarityLoss, TripletLoss, ContrastiveLoss, MegaBatchMarginLoss, MarginMSELoss, MSELoss | items |
| MultipleNegativesRankingLoss (also symmetric), CoSENTLoss, AnglELoss | **not additive** |
| BatchAllTripletLoss, BatchHardTripletLoss, BatchSemiHardTripletLoss, OnlineContrastiveLoss | **not additive** |
| the first with `gather_across_devices`, on several ranks | **not additive**: depends on other ranks |

## Detection

Measured with six images and SciPy installed, which these losses need.

| model | the loss is a mean over |
|---|---|
| DetrForObjectDetection | **not additive**: boxes, and all queries for the classes |
| ConditionalDetrForObjectDetection | boxes |
"""
_TEXTS = {"sum": "nothing: it is a sum", "not additive": "**not additive**"}


def page() -> str:
    """The page."""
    sys.path.insert(0, str(ROOT))
    from tests.support.loss_models import CASES

    rows = [f"| {case.field} | {case.name} | {_TEXTS.get(case.unit, case.unit)} |" for case in CASES]
    return _HEAD + "\n".join(sorted(rows, key=lambda row: row.split("|")[1])) + "\n" + _TAIL


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
