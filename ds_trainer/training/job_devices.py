"""``JobDevices``: the devices of a job, as the planner needs them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.planner.cluster import Board, Cluster
from ds_trainer.planner.hardware import Device
from ds_trainer.utils.devices import is_planned, planned_name
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_memory import total_host_memory
from ds_trainer.utils.ranks import known_local_size

_CPU_THREAD = 0.05
"""TFLOP/s of a CPU thread in float32: rough, since vector units and clocks differ by more than a factor of two."""
_CPU_MEMORY, _CPU_LINK, _CPU_NETWORK = 10.0, 2.0, 1.0  # GB/s of a rank: as rough
_SIMILAR = "A100"  # its figures stand for those of a GPU that is not in the table


@dataclass(frozen=True)
class JobDevices:
    """The devices of a job.

    Attributes:
        cluster: their figures.
        is_gpu: whether they are GPUs, whose memory belongs to one rank.
        is_known: whether their speed is that of a table; otherwise it is a rough one.
    """

    cluster: Cluster
    is_gpu: bool
    is_known: bool

    @classmethod
    def of_job(cls, args: TrainingArguments, world_size: int) -> JobDevices | None:
        """Those of the job of this rank; None if it is planned for GPUs of an unknown name.

        The memory is that of this rank's device: of a GPU in whole GB, since equal GPUs differ by some MB; of a CPU the
        machine's (or the job's limit) divided by the ranks on the machine.

        Args:
            args: the training arguments.
            world_size: ranks of the job.
        """
        local = math.gcd(world_size, known_local_size(os.environ) or world_size)
        nodes = world_size // local
        if args.device_type != "cuda":
            memory = total_host_memory() / local / 1e9
            return cls(cpu_cluster(nodes, local, memory, torch.get_num_threads()), False, False)
        if is_planned():
            name = planned_name()
            return None if name is None else cls(Cluster.of(name, nodes, local), True, True)
        properties = torch.cuda.get_device_properties(args.device)
        return cls(*gpu_cluster(properties.name, properties.total_memory, nodes, local))


def gpu_cluster(name: str, memory: int, nodes: int, devices_per_node: int) -> tuple[Cluster, bool, bool]:
    """The figures of a GPU, and whether it is one and is known.

    Args:
        name: as its driver reports it.
        memory: in bytes.
        nodes: machines.
        devices_per_node: GPUs of each.
    """
    try:
        cluster, is_known = Cluster.of(name, nodes, devices_per_node), True
    except ConfigError:
        cluster, is_known = replace(Cluster.of(_SIMILAR, nodes, devices_per_node), device=name), False
    return replace(cluster, board=replace(cluster.board, memory=memory // 10**9)), True, is_known


def cpu_cluster(nodes: int, ranks_per_node: int, memory: float, threads: int) -> Cluster:
    """CPU ranks, with rough figures.

    Args:
        nodes: machines.
        ranks_per_node: ranks of each.
        memory: GB of a rank.
        threads: threads of a rank.
    """
    speed = _CPU_THREAD * threads
    board = Board(memory, _CPU_MEMORY, _CPU_LINK, _CPU_MEMORY, _CPU_NETWORK)
    return Cluster("cpu", Device(speed, speed, None, speed, "rough"), board, nodes, ranks_per_node)
