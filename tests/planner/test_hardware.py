"""Peaks are found by the names that drivers give, and not under names that only look alike."""

from __future__ import annotations

import pytest

from ds_trainer.planner.hardware import DEVICES, FORMATS, find_device, peak_flops
from ds_trainer.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Tesla V100-SXM2-16GB", "v100 sxm2"),
        ("Tesla V100-PCIE-32GB", "v100 pcie"),
        ("Tesla V100S-PCIE-32GB", "v100s pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx 3090 ti"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090"),
        ("NVIDIA RTX A6000", "rtx a6000"),
        ("RTX4090", "rtx 4090"),
        ("rtxa6000", "rtx a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H100 NVL", "h100 nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200 nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_as_drivers_give_them(name: str, row: str) -> None:
    assert find_device(name) is DEVICES[row]


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA A1000",  # begins like one that is known
        "AMD Instinct MI25",
    ],
)
def test_names_that_are_not_in_the_table(name: str) -> None:
    assert find_device(name) is None
    assert peak_flops(name, "bf16", {}) is None


def test_formats() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16", {}) == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "tf32", {}) == 494.7e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32", {}) == pytest.approx(66.9e12)
    assert peak_flops("Tesla T4", "bf16", {}) is None  # it has no units for it: a share of nothing
    assert peak_flops("Tesla T4", "fp16", {}) == 65e12


def test_the_table_is_plausible() -> None:
    """Slips of a factor of two (sparsity) or a thousand would break these orders."""
    for name, device in DEVICES.items():
        assert device.source, name
        known = [device.peak(number_format) for number_format in FORMATS]
        speeds = [speed for speed in known if speed is not None]
        assert all(1e12 < speed < 3e15 for speed in speeds), name
        assert device.fp16 is not None and device.fp16 >= device.fp32, name
        if device.tf32 is not None and device.bf16 is not None:  # half the width, twice the speed
            assert device.bf16 == pytest.approx(2 * device.tf32, rel=0.03), name


def test_the_environment_overrides_the_table() -> None:
    override = {"DS_TRAINER_PEAK_TFLOPS": "123.5"}
    assert peak_flops("cpu", "fp32", override) == 123.5e12
    assert peak_flops("NVIDIA H200", "bf16", override) == 123.5e12


@pytest.mark.parametrize("value", ["", "fast", "0", "-3", "nan", "inf", "989TF"])
def test_a_wrong_peak_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match=f"DS_TRAINER_PEAK_TFLOPS='{value}'.*not a positive number"):
        peak_flops("NVIDIA H200", "bf16", {"DS_TRAINER_PEAK_TFLOPS": value})
