"""Spans of a timeline are attributed to the parts of a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ds_trainer.monitor.health.heartbeat import COMPUTE
from ds_trainer.monitor.step_profiler import (
    PARTS,
    PHASE_PREFIX,
    DeviceTimes,
    Kind,
    Span,
    StepProfile,
    breakdown,
    kind_of,
    page_text,
    step_profile,
)


def seconds(*spans: tuple[float, float, Kind]) -> dict[str, float]:
    """The breakdown of spans in seconds, without the parts that took no time."""
    parts = breakdown(Span(start * 1e6, end * 1e6, kind) for start, end, kind in spans)
    assert tuple(parts) == PARTS
    return {part: pytest.approx(value) for part, value in parts.items() if value}


STEP = ((0, 1, Kind.DATA), (1, 9, Kind.COMPUTE), (9, 10, Kind.UPDATE))


def test_every_moment_counts_once() -> None:
    parts = seconds(
        *STEP,
        (0, 0.5, Kind.OPERATOR),  # collating
        (1.5, 3.5, Kind.OPERATOR),
        (2, 3, Kind.OPERATOR),  # inside of the other
        (4, 7, Kind.BACKWARD),
        (4, 6, Kind.OPERATOR),
        (5, 8, Kind.COMMUNICATION),  # one second overlaps with an operator
        (9.25, 9.75, Kind.OPERATOR),
    )
    assert parts == {"data": 1, "forward": 2, "backward": 2, "communication": 2, "optimizer": 0.5, "Python": 2.5}


def test_the_time_between_steps_belongs_to_callbacks() -> None:
    parts = seconds(*STEP, (10.5, 10.75, Kind.OPERATOR), (12, 13, Kind.DATA), (13, 14, Kind.COMPUTE))
    assert parts == {"data": 2, "callbacks": 2, "Python": 10}


def test_what_happens_before_and_after_the_steps_is_left_out() -> None:
    parts = seconds((-5, -1, Kind.OPERATOR), *STEP, (9.5, 20, Kind.OPERATOR), (15, 16, Kind.COMMUNICATION))
    assert parts == {"data": 1, "optimizer": 0.5, "Python": 8.5}
    assert not seconds((0, 1, Kind.OPERATOR))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", Kind.OPERATOR),
        ("flash_attn::_flash_attn_forward", Kind.OPERATOR),
        ("autograd::engine::evaluate_function: MmBackward0", Kind.BACKWARD),
        ("MmBackward0", None),
        ("torch::autograd::AccumulateGrad", None),
        ("Optimizer.step#AdamW.step", None),
        ("gloo:all_reduce", Kind.COMMUNICATION),
        ("nccl:all_gather", Kind.COMMUNICATION),
        ("c10d::allreduce_", Kind.COMMUNICATION),
        (PHASE_PREFIX + COMPUTE, Kind.COMPUTE),
        (PHASE_PREFIX + "another", None),
    ],
)
def test_kinds_of_events(name: str, kind: Kind | None) -> None:
    assert kind_of(name) is kind


def test_times_of_a_gpu() -> None:
    """Two steps: kernels overlap, and the GPU is idle between 40 and 60."""
    kernels = [
        ("ampere_gemm", 0.0, 30.0),
        ("ncclDevKernel_AllReduce", 20.0, 40.0),
        ("ampere_gemm", 60.0, 90.0),
        ("Memcpy HtoD", 90.0, 100.0),
    ]
    times = DeviceTimes.of(kernels, steps=2)
    assert times.compute == pytest.approx(30e-6)
    assert times.communication == pytest.approx(10e-6)
    assert times.copies == pytest.approx(5e-6)
    assert times.idle == pytest.approx(10e-6)
    assert times.kernels == 2
    assert times.longest[0] == ("ampere_gemm", pytest.approx(30e-6))
    parts = dict.fromkeys(PARTS, 0.0) | {"forward": 0.05, "Python": 0.05}
    busy = StepProfile(2, parts, [("aten::mm", 0.01, 4.0)], times)
    assert "- **" not in page_text(busy, "trace.json.gz")  # the GPU waits for 0.01 ms of 100
    text = page_text(replace(busy, device=replace(times, idle=0.06)), "trace.json.gz")
    assert "| Python | 50.00 | 50.0 % |" in text
    assert "- **Python**: " in text
    assert "- **data**: " not in text
    assert "`ncclDevKernel_AllReduce`" in text


def test_ranges_of_the_host_are_no_kernels() -> None:
    """The profiler repeats them on the timeline of a GPU."""

    def event(name: str, device: str, start: float, end: float, annotation: bool) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, time_range=span, is_user_annotation=annotation)

    phase = PHASE_PREFIX + COMPUTE
    events = [
        event(phase, "CPU", 0.0, 100.0, True),
        event("aten::mm", "CPU", 0.0, 50.0, False),
        event(phase, "CUDA", 10.0, 90.0, True),
        event("ampere_gemm", "CUDA", 10.0, 20.0, False),
        event("ampere_gemm", "CUDA", 80.0, 90.0, False),
    ]
    found = step_profile(SimpleNamespace(events=lambda: events, key_averages=lambda: []), 1)
    assert found.device is not None
    assert found.device.compute == pytest.approx(20e-6)
    assert found.device.idle == pytest.approx(60e-6)
    assert [name for name, _ in found.device.longest] == ["ampere_gemm"]
    assert found.parts["forward"] == pytest.approx(50e-6)
