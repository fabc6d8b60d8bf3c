"""``RunEstimate``: predicted memory and step time of a run, and their comparison with what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_trainer.planner.calibration import Calibration
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.estimate import MemoryEstimate, estimate_memory
from ds_trainer.planner.plan import MARGIN, Plan
from ds_trainer.planner.plan_report import seconds
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.remedies import cheapest_changes, describe_change
from ds_trainer.planner.step_time import StepTime, step_time
from ds_trainer.training.job_devices import JobDevices
from ds_trainer.utils.units import human_bytes

MEMORY_ERROR = 0.10
"""Share by which the predicted memory may be too high: only a run beyond it is refused."""


@dataclass(frozen=True)
class RunEstimate:
    """What the planner predicts for a run.

    Attributes:
        model: what is trained.
        candidate: how.
        devices: on what; None if the job is planned for unknown GPUs.
        unknown: why activations are not known; empty if they are. Without them there are only model states.
        calibration: corrections from earlier runs; None without any.
    """

    model: PlannedModel
    candidate: Candidate
    devices: JobDevices | None
    unknown: str = ""
    calibration: Calibration | None = None

    @property
    def memory(self) -> MemoryEstimate:
        """Memory of a rank: the least that it can be, if activations are not known."""
        run = replace(self.candidate, length=1) if self.unknown else self.candidate
        found = estimate_memory(self.model, run, None if self.devices is None else self.devices.cluster)
        factor = None if self.calibration is None else self.calibration.memory
        return found if factor is None or self.unknown else replace(found, factor=factor)

    @property
    def time(self) -> StepTime | None:
        """Time of a step; None if activations or the speed of the devices are not known, as that of CPUs never is."""
        if self.devices is None or self.unknown or not (self.devices.is_gpu and self.devices.is_known):
            return None
        time = step_time(self.model, self.candidate, self.devices.cluster)
        factor = 1.0 if self.calibration is None else self.calibration.step_seconds
        return replace(time, low=time.low * factor, seconds=time.seconds * factor, high=time.high * factor)

    def line(self) -> str:
        """For the header of a run."""
        memory, time = self.memory, self.time
        least = "at least " if self.unknown else ""
        if self.devices is None or not self.devices.is_gpu:
            text = f"{least}{human_bytes(memory.tensors)} of tensors on a rank"
        else:
            room = human_bytes(self.devices.cluster.board.memory * 1e9)
            text = f"{least}{human_bytes(memory.device)} of {room} on a device"
        if memory.nvme:
            text += f", {human_bytes(memory.nvme)} on NVMe for each rank"
        if self.unknown:
            return f"{text}, without activations, because {self.unknown}"
        text += f" (largest: {memory.peak.name})"
        if time is None:
            if self.devices is not None and not self.devices.is_gpu:
                return text
            reason = "the device is not known" if self.devices is None else "there are no figures of the device"
            return f"{text}; no step time, because {reason}"
        corrected = "" if self.calibration is None else f"; {self.calibration.describe()}"
        return f"{text}; {seconds(time.seconds)} a step ({seconds(time.low)} to {seconds(time.high)}){corrected}"

    def in_one_pass(self) -> RunEstimate:
        """With a chunked loss in one pass, if there is room for that; the memory of a CPU's ranks is not counted."""
        found = replace(self, candidate=replace(self.candidate, one_pass=self.candidate.chunked_loss))
        if self.devices is None or (self.unknown and self.devices.is_gpu):
            return self
        is_gpu, room = self.devices.is_gpu, self.devices.cluster.board.memory * 1e9 * (1 - self.margin)
        return found if not is_gpu or found.memory.device <= room else self

    @property
    def margin(self) -> float:
        """Share of a device's memory that a run should leave."""
        return MARGIN if self.calibration is None else self.calibration.margin(MARGIN)

    def problems(self) -> list[str]:
        """Why the run cannot start: its memory, even if it is less than predicted by :data:`MEMORY_ERROR`.

        Only for GPUs: the memory of a CPU's ranks is shared by all processes of the machine, and can be swapped.
        """
        if self.devices is None or not self.devices.is_gpu:
            return []
        memory, room = self.memory, self.devices.cluster.board.memory * 1e9
        if memory.device <= room * (1 + MEMORY_ERROR):
            return []
        plan = Plan(self.model, self.candidate, self.devices.cluster, memory, self.margin)
        changes = [describe_change(plan, other) for other in cheapest_changes(plan)] if not self.unknown else []
        return [
            f"The run needs {'at least ' if self.unknown else ''}{human_bytes(memory.device)} on a device, "
            f"which has {human_bytes(room)} ({self.devices.cluster.device}). Its largest moment: {memory.peak.name} "
            f"({_largest_items(memory)}). {_advice(changes)} To start it nevertheless: memory_check=False."
        ]


def _largest_items(memory: MemoryEstimate) -> str:
    items = sorted(memory.peak.items.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in items)


def _advice(changes: list[str]) -> str:
    if not changes:
        return "Use a higher zero_stage, offload_optimizer='cpu', or more devices."
    return "What makes it fit, fastest first: " + "; or ".join(changes) + "."
