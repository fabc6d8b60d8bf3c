"""A spike is left out wherever gradients wait for it: also where bf16 gradients are summed in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.diverging import Rows, run
from tests.support.pool import pool


@pytest.mark.cases(1, "0", "1")
@pytest.mark.parametrize("stage", [0, 1])
def test_float32_sums_are_cleared_after_a_skipped_step(stage: int, tmp_path: Path) -> None:
    """DeepSpeed keeps them in buffers of its own, in which the next step would find those of the spike."""
    more: dict[str, Any] = {
        "max_steps": 9,
        "loss_spike_factor": 2.0,
        "loss_spike_window": 6,
        "zero_stage": stage,
        "bf16": True,
        "grad_accum_dtype": "fp32",
        "gradient_accumulation_steps": 2,
    }
    found = pool(2).run(partial(run, str(tmp_path / "bad"), Rows(9, 8, bad=(6,)), "9.0", **more))
    wanted = pool(2).run(partial(run, str(tmp_path / "ok"), Rows(9, 8, without=(6,)), stop_at=8, **more))
    for (record, counted), (other, _) in zip(found, wanted, strict=True):
        assert (counted["skipped"], counted["at"]) == (1, [7])
        assert record.state == other.state
