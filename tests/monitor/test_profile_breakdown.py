"""Spans of a timeline are attributed to the parts of a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ds_trainer.monitor.health.heartbeat import COMPUTE
from ds_trainer.monitor.kernel_groups import EXPOSED, HIDDEN, IDLE, OPTIMIZER, PRODUCTS, group_of, group_seconds, table
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
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.step_time import standing, step_time


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


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel", PRODUCTS),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_tn_align8>", PRODUCTS),
        ("aten::addmm", PRODUCTS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1_kernel0_0", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop<Flash_bwd_kernel_traits<cutlass::bfloat16_t>>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)", "attention"),
        ("void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", "softmax and loss"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norms"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norms"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>", OPTIMIZER),
        ("void at::native::distribution_elementwise_kernel<float, 4, normal_and_transform>", "element-wise"),
        ("triton_poi_fused_mul_silu_1", "element-wise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda, convert>", "element-wise"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
    ],
)  # fmt: skip
def test_groups_of_kernels(name: str, group: str) -> None:
    assert group_of(name) == group


def test_communication_is_hidden_as_far_as_something_computes() -> None:
    """Two steps of 50 microseconds: a collective of 40, of which 25 are beside kernels; one began before the window."""
    kernels = [("gemm", 10.0, 40.0, 30.0), ("add", 30.0, 45.0, 15.0), ("add", 80.0, 90.0, 10.0), ("add", 150, 160, 10)]
    found = group_seconds(kernels, [(20.0, 60.0), (-10.0, 5.0)], [(75.0, 95.0)], (0.0, 100.0), 2)
    assert found[PRODUCTS] == pytest.approx(15e-6)
    assert found["element-wise"] == pytest.approx(7.5e-6)
    assert found[OPTIMIZER] == pytest.approx(5e-6)  # what began in the update, whatever it is
    assert found[HIDDEN] == pytest.approx(12.5e-6)
    assert found[EXPOSED] == pytest.approx(10e-6)  # 15 of the first, 5 of the second
    assert found[IDLE] == pytest.approx(17.5e-6)


LLAMA_1B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize("slow", [PRODUCTS, "norms", OPTIMIZER, "attention", EXPOSED, IDLE])
def test_the_largest_gap_has_a_setting(slow: str) -> None:
    model, run = PlannedModel.from_config(LLAMA_1B), Candidate(1, 4096, stage=1, micro_batch=4)
    cluster = Cluster.of("H100", 1, 1)
    time = step_time(model, run, cluster)
    assert sum(time.best.values()) == pytest.approx(time.low)
    empty = group_seconds([], [], [], (0.0, 0.0), 1)
    found = empty | {group: time.best[group] for group in (PRODUCTS, "attention", "element-wise", OPTIMIZER)}
    text = "\n".join(table(found | {slow: found[slow] + 0.1}, time.best))
    extra = 1e3 * (0.1 - (time.best["host work between steps"] if slow == IDLE else 0))
    assert f"**Largest gap: {'element-wise' if slow == 'norms' else slow}**, {extra:.1f} ms. " in text
    assert "Largest gap" not in "\n".join(table(found, time.best))
    assert "at best" not in "\n".join(table(found, None))


def test_a_published_run_of_the_same_size_is_named() -> None:
    model, run = PlannedModel.from_config(LLAMA_1B), Candidate(1, 4096, stage=1, micro_batch=4)
    text = standing(model, run, Cluster.of("H100", 1, 1), 0.320)
    assert text.startswith("Model FLOPs utilization: 46.7 %. The best published one for 1.2B: 41.8 % (llm-foundry")
    assert "published" not in standing(model, run, Cluster.of("A100", 1, 1), 0.320)
    tiny = PlannedModel.from_config({**LLAMA_1B, "num_hidden_layers": 1, "vocab_size": 1024})
    assert "published" not in standing(tiny, run, Cluster.of("H100", 1, 1), 0.320)
