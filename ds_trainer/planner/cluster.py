"""``Cluster``: the machines of a plan: devices with their memory and links, host memory, network.

Figures are the vendors', like those of :mod:`ds_trainer.planner.hardware`, but for the memory, which is what CUDA
reports. It is in 10**9 bytes, bandwidths are in 10**9 bytes per second. A link's bandwidth is that of one direction,
half of the sum that data sheets give for NVLink.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.planner.hardware import DEVICES, FORMATS, Device, find_device, words_of
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import read_user_file
from ds_trainer.utils.host_memory import total_host_memory

COLLECTIVE, HOP, NETWORK_HOP = 8e-6, 1.5e-6, 8e-6
"""Seconds to start a collective, of a hop inside of a machine, and of one between machines: assumptions, not measured.

NCCL chooses its algorithm with such a sum (``src/graph/tuning.cc``: ``baseLat`` 3.6 to 10 us; ``hwLat`` of a ring 0.5
to 3.4 us over NVLink, 2.7 to 9.6 us over the network, for its protocols LL, LL128 and Simple)."""

_PCIE_3, _PCIE_4, _PCIE_5 = 16.0, 32.0, 64.0  # x16, one direction
_NUMBERS = ("memory", "bandwidth", "link", "host", "network")
_OPTIONAL = ("nvme_read", "nvme_write", "host_memory")


@dataclass(frozen=True)
class Board:
    """What a device has besides its FLOP/s.

    Args:
        memory: GB.
        bandwidth: GB/s of its memory.
        link: GB/s to the other devices of its machine, one direction.
        host: GB/s to the memory of the host, one direction.
        network: GB/s to other machines, as machines with this device usually have.
        nvme_read: GB/s that this device reads from local disks if all devices of its machine do.
        nvme_write: GB/s that it writes then.
        host_memory: GB of memory that a machine with such devices usually has.
    """

    memory: float
    bandwidth: float
    link: float
    host: float
    network: float
    nvme_read: float = 1.6
    nvme_write: float = 1.6
    host_memory: float = 2000


_H100 = Board(84.9, 3350, 450, _PCIE_5, 50)
_A100 = Board(84.9, 2039, 300, _PCIE_4, 25, nvme_read=2.0)
_B200 = Board(191.5, 7700, 900, _PCIE_5, 50)
_MI300X = Board(206.1, 5300, 448, _PCIE_5, 50)

BOARDS: dict[str, Board] = {
    "v100 sxm2": Board(34, 900, 150, _PCIE_3, 3),
    "v100 sxm3": Board(34, 981, 150, _PCIE_3, 12.5),
    "v100 pcie": Board(34, 900, _PCIE_3, _PCIE_3, 3),
    "v100s pcie": Board(34, 1134, _PCIE_3, _PCIE_3, 3),
    "t4": Board(15.6, 320, _PCIE_3, _PCIE_3, 3),
    "a10": Board(23.6, 600, _PCIE_4, _PCIE_4, 6),
    "a10g": Board(23.6, 600, _PCIE_4, _PCIE_4, 6),
    "a30": Board(25.2, 933, 100, _PCIE_4, 12.5),
    "a40": Board(47.6, 696, 56, _PCIE_4, 12.5),
    "a100": _A100,
    "a800": replace(_A100, link=200),
    "l4": Board(23.6, 300, _PCIE_4, _PCIE_4, 6),
    "l40": Board(47.6, 864, _PCIE_4, _PCIE_4, 12.5),
    "l40s": Board(47.6, 864, _PCIE_4, _PCIE_4, 12.5),
    "rtx 3090": Board(25.3, 936, 56, _PCIE_4, 1.25, host_memory=64),
    "rtx 4090": Board(25.3, 1008, _PCIE_4, _PCIE_4, 1.25, host_memory=128),
    "rtx 5090": Board(33.6, 1792, _PCIE_5, _PCIE_5, 1.25, host_memory=128),
    "rtx a6000": Board(50.9, 768, 56, _PCIE_4, 3, host_memory=128),
    "rtx 6000 ada": Board(50.9, 960, _PCIE_4, _PCIE_4, 3, host_memory=128),
    "h100": _H100,
    "h100 pcie": Board(84.9, 2000, 300, _PCIE_5, 25),
    "h100 nvl": Board(99.8, 3900, 300, _PCIE_5, 25),
    "h800": replace(_H100, link=200),
    "h20": Board(102, 4000, 450, _PCIE_5, 50),
    "h200": Board(150.1, 4800, 450, _PCIE_5, 50),
    "h200 nvl": Board(150.1, 4800, 450, _PCIE_5, 25),
    "gh200": Board(101.4, 4000, 450, 450, 50),
    "b200": _B200,
    "gb200": Board(186, 8000, 900, 450, 50),
    "b300": Board(270, 7700, 900, _PCIE_5, 100),
    "gb300": Board(278, 8000, 900, 450, 100),
    "mi210": Board(64, 1600, 150, _PCIE_4, 25),
    "mi250": Board(64, 1600, 150, _PCIE_4, 25),
    "mi250x": Board(64, 1600, 150, _PCIE_4, 25),
    "mi300x": _MI300X,
    "mi325x": replace(_MI300X, memory=256, bandwidth=6000),
    "mi350x": replace(_MI300X, memory=288, bandwidth=8000),
    "mi355x": replace(_MI300X, memory=288, bandwidth=8000),
}
"""Links and bandwidths: data sheets of the vendors, as in :data:`~ds_trainer.planner.hardware.DEVICES`. The network is
what cloud providers usually attach to each device.

Local disks: 25 GB/s on a DGX-2 with 16 devices (ZeRO-Infinity, arXiv 2104.07857, table in figure 2b) stand for every
machine; those with A100 read 16 GB/s with 8 (Amazon's p4d). They differ more than other figures: measure them with
``ds_nvme_tune`` of DeepSpeed.

Memory is what a process can use, the total of ``cudaMemGetInfo``: an H100 of 80 GB has 79.1 GiB, which are 84.9 GB. It
is about 0.55 GiB less than the total of ``nvidia-smi`` (H100 81,559 MiB, H200 143,771, A100 81,920 or 40,960, L40S
46,068, A10 23,028, L4 23,034, T4 15,360: thundergolfer.com/blog/nvidia-gpu-memory-capacity). Out-of-memory messages of
PyTorch in public issues have it: H100 79.10, A100 39.50, L40 44.40, A30 23.53, RTX 4090 23.64, RTX 5090 31.36, T4 14.57
GiB. Data sheets are used for GB200, B300, GB300 and AMD's devices but MI300X."""

SIZES = {("a100", 40): 42.4, ("a800", 40): 42.4, ("v100 sxm2", 16): 16.9, ("v100 pcie", 16): 16.9, ("h100", 96): 101.4}
"""Memory of the other size in which a device is sold."""


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Args:
        device: name of the device, for reports.
        peaks: its FLOP/s.
        board: its memory and links.
        nodes: number of machines.
        devices_per_node: devices of each.
        host_memory: GB of memory of a machine; None if unknown, which does not limit a plan.
        nvme: GB of the local disks of a machine for offload; None if it is not known that there are any.
    """

    device: str
    peaks: Device
    board: Board
    nodes: int = 1
    devices_per_node: int = 1
    host_memory: float | None = None
    nvme: float | None = None

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.device == "cpu"

    def crosses_machines(self, ranks: int, stride: int = 1) -> bool:
        """Whether a ring over ``ranks`` ranks that are ``stride`` apart leaves a machine."""
        return ranks * stride > self.devices_per_node

    def ring_bandwidth(self, ranks: int, stride: int = 1) -> float:
        """GB/s of a ring over ``ranks`` ranks that are ``stride`` apart.

        A ring over several machines uses the network of each of its devices on a machine.
        """
        if not self.crosses_machines(ranks, stride):
            return self.board.link
        return min(self.board.link, self.board.network * max(1, self.devices_per_node // stride))

    def hop(self, ranks: int, stride: int = 1) -> float:
        """Seconds of a message without data to the next rank of a ring over such ranks, at worst."""
        return COLLECTIVE + (NETWORK_HOP if self.crosses_machines(ranks, stride) else HOP)

    def latency(self, ranks: int, stride: int = 1, is_all_reduce: bool = False) -> float:
        """Seconds of a collective over such ranks without data.

        An all-gather or a reduce-scatter is a ring: each rank's part passes ``ranks - 1`` hops, one after the other. An
        all-reduce is two rings, or a chain in each machine and a tree over the machines, up and down, if faster.

        Args:
            ranks: number of ranks.
            stride: how far they are apart.
            is_all_reduce: whether it is an all-reduce.
        """
        machines = -(-ranks // max(1, self.devices_per_node // stride))
        ring = (ranks - machines) * HOP + (machines - 1) * NETWORK_HOP
        if not is_all_reduce:
            return COLLECTIVE + ring
        tree = (-(-ranks // machines) - 1) * HOP + math.ceil(math.log2(machines)) * NETWORK_HOP
        return COLLECTIVE + 2 * min(ring, tree)

    @classmethod
    def of(cls, device: str, nodes: int, devices_per_node: int, more: Mapping[str, Any] | None = None) -> Cluster:
        """The cluster for a device by name, such as ``H100-80GB``. A size in the name overrides the table's.

        Args:
            device: its name; words in any order and case.
            nodes: machines.
            devices_per_node: devices of each.
            more: other devices by name, as :func:`read_devices` returns them.

        Raises:
            ConfigError: the device is unknown.
        """
        entry = (more or {}).get(device.lower())
        if entry is not None:
            return cls(device, entry[0], entry[1], nodes, devices_per_node)
        size = re.search(r"(?:^|[-_ ])(\d+) ?GB\b", device, re.IGNORECASE)
        words = device if size is None else device.replace(size[0], " ")
        peaks = find_device(words) or find_device(f"{words} sxm2")
        name = next((key for key, row in DEVICES.items() if row is peaks and _matches(key, words)), None)
        if peaks is None or name not in BOARDS:
            known = [*BOARDS, *(more or {})]
            raise ConfigError(
                f"device {device!r} is not in the table of devices.{did_you_mean(words.lower().strip(), known)} It has "
                f"{', '.join(sorted(known))}. Describe another one in a YAML file, and pass it with --device-file."
            )
        board = BOARDS[name]
        if size is not None and abs(board.memory / float(size[1]) - 1) > 0.1:
            board = replace(board, memory=SIZES.get((name, int(size[1])), float(size[1])))
        return cls(device, peaks, board, nodes, devices_per_node)

    @classmethod
    def of_this_machine(cls, nodes: int = 1, more: Mapping[str, Any] | None = None) -> Cluster:
        """Machines like this one: its GPUs by name, their number and memory, its host memory. Imports torch.

        Links and network are those that machines with this device usually have.

        Args:
            nodes: machines.
            more: other devices by name, as :func:`read_devices` returns them.

        Raises:
            ConfigError: torch sees no GPU, GPUs of different kinds, or one that is unknown.
        """
        import torch

        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return cls.of_devices([(one.name, one.total_memory) for one in devices], total_host_memory(), nodes, more)

    @classmethod
    def of_devices(
        cls, devices: Sequence[tuple[str, int]], host_memory: int, nodes: int = 1, more: Mapping[str, Any] | None = None
    ) -> Cluster:
        """The cluster for the devices of a machine.

        Args:
            devices: name and bytes of each.
            host_memory: bytes of memory of the machine.
            nodes: machines.
            more: other devices by name, as :func:`read_devices` returns them.

        Raises:
            ConfigError: there are no devices, different ones, or unknown ones.
        """
        names = list(dict.fromkeys(name for name, _ in devices))
        if len(names) != 1:
            what = f"different GPUs: {', '.join(names)}" if names else "no GPU that torch can use"
            raise ConfigError(
                f"This machine has {what}. Describe the machines instead, for example with --device H100-80GB "
                "--devices-per-node 8 --host-memory 1000."
            )
        found_cluster = cls.of(names[0], nodes, len(devices), more)
        board = replace(found_cluster.board, memory=min(size for _, size in devices) / 1e9)
        return replace(found_cluster, board=board, host_memory=host_memory / 1e9)


def _matches(key: str, words: str) -> bool:
    tokens = words_of(words) | {"sxm2"}
    return tokens.issuperset(key.split())


def read_devices(path: Path) -> dict[str, tuple[Device, Board]]:
    """Devices of a YAML file: names with ``tflops`` (by format), ``memory``, ``bandwidth``, ``link``, ``host``,
    ``network``; optionally ``nvme_read``, ``nvme_write``, ``host_memory``.

    Raises:
        ConfigError: the file cannot be read, or an entry lacks a number.
    """
    source = f"--device-file {path}"
    root, problems = read_yaml(read_user_file(path, source, "YAML file"), source)
    if problems:
        raise ConfigError(problems)
    content = root.plain()
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"--device-file {path}: it must be a mapping from names of devices to their numbers.")
    devices = {}
    for name, entry in content.items():
        try:
            tflops = {number_format: _positive(value) for number_format, value in entry["tflops"].items()}
            if not tflops or tflops.keys() - set(FORMATS):
                raise ValueError(f"tflops has {', '.join(map(str, tflops)) or 'nothing'}")
            peaks = Device(
                tflops.get("bf16"), tflops.get("fp16"), tflops.get("tf32"), tflops.get("fp32", 0.0), str(path)
            )
            numbers = {key: _positive(entry[key]) for key in (*_NUMBERS, *(key for key in _OPTIONAL if key in entry))}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"--device-file {path}: {name} needs tflops (with {', '.join(FORMATS)}, in TFLOP/s), memory (GB), and "
                f"bandwidth, link, host and network (GB/s): {problem}."
            ) from error
        devices[str(name).lower()] = (peaks, Board(**numbers))
    return devices


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{value} is not a positive number")
    return number
