"""``Plan``: a way to run a model on a cluster, with its memory and its time; whether it fits, and why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import MemoryEstimate
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.step_time import StepTime, mfu, step_time, usual_seconds

MARGIN = 0.06
"""Share of a device's memory that a plan leaves free: the error of the estimate and fragmentation."""

MEASURED_FRAGMENTATION = (0.06, 0.25)
"""Shares that the allocator reserved beyond the tensors in runs on an H100 (docs/explanation/planner.md)."""


@dataclass(frozen=True)
class Plan:
    """A candidate with its memory and time."""

    model: PlannedModel
    candidate: Candidate
    cluster: Cluster
    memory: MemoryEstimate
    margin: float = MARGIN

    @cached_property
    def time(self) -> StepTime:
        """Time of a step."""
        return step_time(self.model, self.candidate, self.cluster)

    @cached_property
    def seconds(self) -> float:
        """Estimated time of a step."""
        return usual_seconds(self.model, self.candidate, self.cluster)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.candidate.global_batch * self.candidate.length / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        return mfu(self.model, self.candidate, self.cluster, self.seconds)

    @property
    def limit(self) -> float:
        """Bytes of a device that the plan may use."""
        return self.cluster.board.memory * 1e9 * (1 - self.margin)

    @property
    def host_share(self) -> float:
        """Memory that the plan needs of a machine, as a share of what it may use; 0 if that is unknown."""
        room = self.cluster.host_memory
        return 0.0 if room is None else self.host_of_a_machine / (room * 1e9 * (1 - self.margin))

    @property
    def excess(self) -> float:
        """The largest share of what it may use, of a device or of a machine; up to 1 if the plan fits."""
        return max(self.memory.device / self.limit, self.host_share, self.nvme_share)

    @property
    def is_cautious(self) -> bool:
        """Whether it fits even if the allocator reserves as much beyond the tensors as was measured at worst."""
        worst = replace(self.memory, fragmentation=max(self.memory.fragmentation, MEASURED_FRAGMENTATION[1]))
        return self.fits and worst.device <= self.cluster.board.memory * 1e9

    @property
    def nvme_share(self) -> float:
        """Disk space that the plan needs of a machine, as a share of what there is; 0 if that is unknown."""
        room = self.cluster.nvme
        return 0.0 if room is None else self.nvme / (room * 1e9)

    @property
    def nvme(self) -> float:
        """Bytes on the local disks of a machine."""
        return self.memory.nvme * self.cluster.devices_per_node

    @property
    def fits(self) -> bool:
        """Whether devices and machines have room for it."""
        return self.excess <= 1

    @property
    def problem(self) -> str:
        """Why it does not fit; empty if it does."""
        if self.memory.device > self.limit:
            return f"needs {self.memory.device / 1e9:.1f} GB of a device: {self.memory.peak.name}"
        if self.host_share > 1:
            return f"needs {self.host_of_a_machine / 1e9:,.0f} GB of memory on each machine"
        if self.nvme_share > 1:
            return f"needs {self.nvme / 1e9:,.0f} GB of NVMe on each machine"
        return ""

    @property
    def lacks_host_memory(self) -> bool:
        """Whether it would fit with more host memory."""
        return self.host_share > 1 and self.memory.device <= self.limit

    @property
    def host_of_a_machine(self) -> float:
        """Bytes of memory that its ranks need on a machine."""
        return self.memory.host * self.cluster.devices_per_node
