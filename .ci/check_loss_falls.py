"""Exit 0 if the training loss in a metrics file falls, 1 with the reason if not.

    python .ci/check_loss_falls.py runs/quickstart/metrics.jsonl

The file has one JSON object a line; lines with "step" and "loss" are training, all others are passed over. The loss
falls when the mean of its last five values is at least a tenth below the mean of its first five.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

WINDOW = 5
DROP = 0.10


def read_losses(path: Path) -> list[float]:
    """The training losses in the order of the file.

    Raises:
        ValueError: a line is no JSON object, or a loss is no finite number.
    """
    losses = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number} is no JSON object: {line}")
        if "step" not in record or "loss" not in record:
            continue
        loss = record["loss"]
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            raise ValueError(f"{path}:{number}: the loss at step {record['step']} is {loss}")
        losses.append(float(loss))
    return losses


def verdict(losses: list[float]) -> str:
    """One sentence that says how far the loss fell.

    Raises:
        ValueError: too few losses, or the loss did not fall far enough.
    """
    if len(losses) < 2 * WINDOW:
        raise ValueError(f"{len(losses)} training losses are too few: {2 * WINDOW} are needed to compare both ends")
    first = sum(losses[:WINDOW]) / WINDOW
    last = sum(losses[-WINDOW:]) / WINDOW
    means = f"mean of the first {WINDOW} losses {first:.4f}, of the last {WINDOW} {last:.4f}"
    if first <= 0 or last > (1 - DROP) * first:
        raise ValueError(f"the loss did not fall by {DROP:.0%}: {means}")
    return f"the loss fell by {1 - last / first:.0%}: {means}, {len(losses)} in all"


def main(argv: list[str]) -> int:
    """Run the check; gives the exit code."""
    if len(argv) != 1:
        print("usage: check_loss_falls.py METRICS_JSONL", file=sys.stderr)
        return 2
    try:
        print(verdict(read_losses(Path(argv[0]))))
    except (OSError, ValueError) as error:
        print(f"check_loss_falls: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
