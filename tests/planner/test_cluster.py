"""Devices of a plan: by name, with a size in the name, from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.planner.cluster import BOARDS, Cluster, read_devices
from ds_trainer.planner.hardware import DEVICES
from ds_trainer.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "memory", "link"),
    [
        ("H100-80GB", 80, 450),
        ("H100", 80, 450),
        ("NVIDIA H100 80GB HBM3", 80, 450),
        ("A100-40GB", 40, 300),
        ("v100-16gb", 16, 150),
        ("V100 PCIe", 32, 16),
        ("H100 PCIe", 80, 300),
        ("MI300X", 192, 448),
    ],
)
def test_devices_are_found_by_name(name: str, memory: float, link: float) -> None:
    cluster = Cluster.of(name, 2, 4)
    assert (cluster.board.memory, cluster.board.link, cluster.world_size) == (memory, link, 8)


def test_every_board_is_that_of_a_known_device() -> None:
    assert BOARDS.keys() <= DEVICES.keys()
    assert all(min(vars(board).values()) > 0 for board in BOARDS.values())


def test_unknown_devices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--device X9000: not in the table.*h100.*--device-file"):
        Cluster.of("X9000", 1, 1)


def test_devices_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    numbers = "memory: 64\n  bandwidth: 2000\n  link: 200\n  host: 32\n  network: 25\n"
    path.write_text(f"Own-1:\n  tflops: {{bf16: 300, fp32: 20}}\n  {numbers}")
    cluster = Cluster.of("own-1", 1, 2, read_devices(path))
    assert cluster.peaks.peak("bf16") == 300e12 and cluster.peaks.tf32 is None and cluster.board.memory == 64
    path.write_text("Own-1:\n  tflops: {bf16: 300}\n  memory: many\n")
    with pytest.raises(ConfigError, match="Own-1 needs tflops"):
        read_devices(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_devices(tmp_path / "missing.yaml")
