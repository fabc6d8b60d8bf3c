"""Devices of a plan: by name, with a size in the name, from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.planner.cluster import BOARDS, COLLECTIVE, HOP, NETWORK_HOP, Cluster, read_devices
from ds_trainer.planner.hardware import DEVICES
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_memory import total_host_memory


@pytest.mark.parametrize(
    ("name", "memory", "link"),
    [
        ("H100-80GB", 84.9, 450),
        ("H100", 84.9, 450),
        ("NVIDIA H100 80GB HBM3", 84.9, 450),
        ("A100-40GB", 42.4, 300),
        ("A100-80GB", 84.9, 300),
        ("H200-141GB", 150.1, 450),
        ("H100-60GB", 60, 450),  # is not sold: a part of one
        ("v100-16gb", 16.9, 150),
        ("V100 PCIe", 34, 16),
        ("H100 PCIe", 84.9, 300),
        ("MI300X", 206.1, 448),
    ],
)
def test_devices_are_found_by_name(name: str, memory: float, link: float) -> None:
    cluster = Cluster.of(name, 2, 4)
    assert (cluster.board.memory, cluster.board.link, cluster.world_size) == (memory, link, 8)


@pytest.mark.parametrize(
    ("name", "gibibytes"),  # "GPU 0 has a total capacity of" in messages of PyTorch
    [("H100", 79.10), ("A100-40GB", 39.50), ("L40", 44.40), ("A30", 23.53), ("RTX 4090", 23.64), ("RTX 5090", 31.36)],
)
def test_memory_is_what_cuda_reports(name: str, gibibytes: float) -> None:
    assert Cluster.of(name, 1, 1).board.memory == pytest.approx(gibibytes * 2**30 / 1e9, rel=0.005)


def test_every_board_is_that_of_a_known_device() -> None:
    assert BOARDS.keys() <= DEVICES.keys()
    assert all(min(vars(board).values()) > 0 for board in BOARDS.values())


def test_unknown_devices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"device 'X9000' is not in the table.*h100.*--device-file"):
        Cluster.of("X9000", 1, 1)


@pytest.mark.parametrize(("name", "near"), [("H10", "h100"), ("GB300X", "gb300"), ("rtx 409", "rtx 4090")])
def test_the_nearest_name_is_proposed(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        Cluster.of(name, 1, 1)


def test_a_machine_by_its_devices() -> None:
    devices = [("NVIDIA H100 80GB HBM3", 85_029_158_912)] * 3 + [("NVIDIA H100 80GB HBM3", 85_000_000_000)]
    cluster = Cluster.of_devices(devices, 512 * 10**9, nodes=2)
    assert (cluster.nodes, cluster.devices_per_node, cluster.host_memory) == (2, 4, 512)
    assert cluster.board.memory == 85 and cluster.board.link == 450
    with pytest.raises(ConfigError, match="different GPUs: NVIDIA L4, NVIDIA A10"):
        Cluster.of_devices([("NVIDIA L4", 24 * 10**9), ("NVIDIA A10", 24 * 10**9)], 10**9)
    with pytest.raises(ConfigError, match=r"no GPU that torch can use.*--device H100-80GB --devices-per-node 8"):
        Cluster.of_devices([], 10**9)


@pytest.mark.parametrize(
    ("ranks", "stride", "inside", "between"),
    [
        (1, 1, 0, 0),
        (8, 1, 7, 0),
        (16, 1, 14, 1),
        (64, 1, 56, 7),
        (1024, 1, 896, 127),
        (4096, 1, 3584, 511),
        (4, 2, 3, 0),
        (8, 4, 4, 3),  # two ranks of each machine
        (512, 8, 0, 511),
        (12, 1, 10, 1),  # the second machine has four
    ],
)
def test_each_rank_of_a_ring_is_a_hop(ranks: int, stride: int, inside: int, between: int) -> None:
    found = Cluster.of("H100", 512, 8).latency(ranks, stride)
    assert found == pytest.approx(COLLECTIVE + inside * HOP + between * NETWORK_HOP)


def test_an_all_reduce_takes_a_tree_over_many_machines() -> None:
    cluster = Cluster.of("H100", 512, 8)
    assert cluster.latency(8, 1, True) == pytest.approx(COLLECTIVE + 14 * HOP)
    assert cluster.latency(1024, 1, True) == pytest.approx(COLLECTIVE + 14 * HOP + 14 * NETWORK_HOP)
    assert cluster.latency(512, 8, True) == pytest.approx(COLLECTIVE + 18 * NETWORK_HOP)
    assert cluster.latency(3, 1, True) == pytest.approx(COLLECTIVE + 4 * HOP)


def test_this_machine() -> None:
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="This machine has no GPU"):
            Cluster.of_this_machine()
        return
    cluster = Cluster.of_this_machine()
    assert cluster.world_size == torch.cuda.device_count()
    assert cluster.board.memory == pytest.approx(torch.cuda.get_device_properties(0).total_memory / 1e9)
    assert cluster.host_memory == total_host_memory() / 1e9


def test_devices_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    numbers = "memory: 64\n  bandwidth: 2000\n  link: 200\n  host: 32\n  network: 25\n"
    path.write_text(f"Own-1:\n  tflops: {{bf16: 300, fp32: 20}}\n  {numbers}")
    cluster = Cluster.of("own-1", 1, 2, read_devices(path))
    assert cluster.peaks.peak("bf16") == 300e12 and cluster.peaks.tf32 is None and cluster.board.memory == 64
    path.write_text("Own-1:\n  tflops: {bf16: 300}\n  memory: many\n")
    with pytest.raises(ConfigError, match="Own-1 needs tflops"):
        read_devices(path)
    for content, problem in {
        "": "must be a mapping",
        "- a\n": "must be a mapping",
        f"Own-1:\n  tflops: {{fp8: 300}}\n  {numbers}": "tflops has fp8",
        f"Own-1:\n  tflops: {{}}\n  {numbers}": "tflops has nothing",
        f"Own-1:\n  tflops: 300\n  {numbers}": "Own-1 needs tflops",
        f"Own-1:\n  tflops: {{bf16: -3}}\n  {numbers}": "-3 is not a positive number",
        "Own-1:\n  tflops: {bf16: 300}\n": "'memory' is missing",
        "Own-1: [": "while parsing",
    }.items():
        path.write_text(content)
        with pytest.raises(ConfigError, match=problem):
            read_devices(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_devices(tmp_path / "missing.yaml")
