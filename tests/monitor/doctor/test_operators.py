"""Findings about the tools that compile DeepSpeed's operators."""

from __future__ import annotations

import pytest

from ds_trainer.monitor.doctor.examination import operator_findings
from ds_trainer.monitor.doctor.findings import Level


@pytest.mark.parametrize(
    ("value", "unreadable"),
    [("9.0a", "9.0a"), ("8.0;9.0a 10.0+PTX Hopper", "9.0a Hopper"), ("8.0 9.0+PTX", None), ("", None)],
)
def test_architectures_that_deepspeed_cannot_read(
    value: str, unreadable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch can; DeepSpeed 0.19.8 raises ValueError at the first operator."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    found = [one for one in operator_findings("cuda") if "TORCH_CUDA_ARCH_LIST" in one.message]
    assert [one.level for one in found] == ([Level.WARN] if unreadable else [])
    assert all(f"TORCH_CUDA_ARCH_LIST has {unreadable}, which" in one.message for one in found)
    assert not any("TORCH_CUDA_ARCH_LIST" in one.message for one in operator_findings("cpu"))
