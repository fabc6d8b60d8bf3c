"""``RunEstimator``: predicts memory and step time of the trainings of a Trainer, and compares them at their ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.calibration import Calibration, read_calibration, record_run
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.estimate import MemoryEstimate, estimate_memory
from ds_trainer.planner.plan import MARGIN, Plan
from ds_trainer.planner.plan_report import seconds
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.remedies import cheapest_changes, describe_change
from ds_trainer.planner.step_time import StepTime, standing, step_time
from ds_trainer.training.job_devices import JobDevices
from ds_trainer.training.planning.candidates import candidate_of, main_input_name, sequence_length, unknown_activations
from ds_trainer.training.startup.configuration import TrainerInputs
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.printable import say
from ds_trainer.utils.units import human_bytes

logger = get_logger(__name__)


# ``RunEstimate``: predicted memory and step time of a run, and their comparison with what was measured.


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
        estimate = estimate_memory(self.model, run, None if self.devices is None else self.devices.cluster)
        factor = None if self.calibration is None else self.calibration.memory
        return estimate if factor is None or self.unknown else replace(estimate, factor=factor)

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
        estimate = replace(self, candidate=replace(self.candidate, one_pass=self.candidate.chunked_loss))
        if self.devices is None or (self.unknown and self.devices.is_gpu):
            return self
        is_gpu, room = self.devices.is_gpu, self.devices.cluster.board.memory * 1e9 * (1 - self.margin)
        return estimate if not is_gpu or estimate.memory.device <= room else self

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


def peak_memory(device: torch.device) -> int | None:
    """Most bytes of tensors that this process has had on its GPU; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class RunEstimator:
    """Predicts runs, and compares the last one with what was measured.

    Attributes:
        estimate: what was predicted for the last run; None if it cannot be predicted.
        reason: why not.
    """

    def __init__(self) -> None:
        self.estimate: RunEstimate | None = None
        self.reason = "nothing was trained yet"
        self._read: tuple[nn.Module, PlannedModel] | None = None
        self._metrics: dict[str, float] = {}
        self._records = False

    def predict(self, inputs: TrainerInputs, config: CompiledConfig, layout: ParallelLayout) -> RunEstimate | None:
        """Predict a run. A model that cannot be read is no problem of the run: the header shows :attr:`reason`.

        Args:
            inputs: what the Trainer was given.
            config: the compiled configuration.
            layout: the layout of the job.
        """
        model = inputs.model
        self.estimate, self._metrics, self._records = None, {}, inputs.args.calibrate_planner
        try:
            planned = self.read(model)
            length = sequence_length(inputs.args, inputs.train_dataset, main_input_name(model), planned.max_length)
            run = candidate_of(inputs, config, layout, length.tokens)
            unknown = unknown_activations(inputs, config, planned, length)
            devices = JobDevices.of_job(inputs.args, layout.world_size)
            calibration = None if devices is None else read_calibration(devices.cluster.device, planned.family)
            if calibration is not None:
                planned = replace(planned, busiest_expert=calibration.busiest_expert)
            estimate = RunEstimate(planned, run, devices, unknown, calibration).in_one_pass()
            estimate.line()  # computes everything that a run will ask for
        except Exception as error:  # whatever a model of a user looks like, it trains without a prediction
            logger.debug("The run cannot be predicted.", exc_info=True)
            self.reason = f"{type(model).__name__} cannot be planned: {type(error).__name__} {error}".strip()
            return None
        self.estimate = estimate
        return estimate

    def read(self, model: nn.Module) -> PlannedModel:
        """The model as the planner needs it. It is read once: the engine partitions its parameters later."""
        if self._read is None or self._read[0] is not model:
            self._read = (model, PlannedModel.from_module(model))
        return self._read[1]

    def text(self) -> str:
        """For the header of the run."""
        return f"none, because {self.reason}" if self.estimate is None else self.estimate.line()

    def prediction(self) -> dict[str, Any] | None:
        """For the report of the run: seconds of a step (low, expected, high) and bytes of a rank; None if unknown."""
        if self.estimate is None:
            return None
        time, memory, devices = self.estimate.time, self.estimate.memory, self.estimate.devices
        return {
            "step_seconds": None if time is None else [time.low, time.seconds, time.high],
            "tensor_bytes": memory.tensors,
            "device_bytes": memory.device if devices is not None and devices.is_gpu else None,
            "incomplete": self.estimate.unknown,
        }

    def at_best(self) -> tuple[Mapping[str, float] | None, Callable[[float], str] | None]:
        """For a profile: seconds of the parts of the fastest step, what to say of a measured one; None if unknown."""
        estimate = self.estimate
        if estimate is None or estimate.devices is None or estimate.time is None:
            return None, None
        return estimate.time.best, partial(standing, estimate.model, estimate.candidate, estimate.devices.cluster)

    def release(self) -> None:
        """Drop the reference to the model."""
        self._read = None

    # -- the end of a run ---------------------------------------------------------------------------------------------

    def metrics(
        self, step_seconds: float | None, peak_memory: int | None, busiest_expert: float | None = None
    ) -> dict[str, float]:
        """Predicted and measured values, with errors: measured / predicted - 1. Collective.

        The memory is that of the rank that had most, and only of a GPU: the memory of a CPU's process cannot be divided
        into tensors and the rest.

        Args:
            step_seconds: median of the measured seconds of a step; None if there were not enough steps.
            peak_memory: most bytes of tensors on the GPU of this rank; None on CPU ranks.
            busiest_expert: share of a layer's tokens that its busiest expert got; None without divided experts.
        """
        peak = None
        if peak_memory is not None:  # before anything that can differ between ranks: whether they have an estimate
            peak = float(distributed.largest(torch.tensor(float(peak_memory), dtype=torch.float64)))
        if self.estimate is None:
            return {}
        time, metrics = self.estimate.time, {}
        if time is not None:
            metrics["predicted_step_seconds"] = round(time.seconds, 6)
            if step_seconds is not None:
                metrics["measured_step_seconds"] = round(step_seconds, 6)
                metrics["step_seconds_error"] = round(step_seconds / time.seconds - 1, 4)
        if peak is not None:
            predicted = self.estimate.memory.tensors
            metrics["measured_peak_memory_bytes"] = peak
            if not self.estimate.unknown:
                metrics["predicted_peak_memory_bytes"] = predicted
                metrics["peak_memory_error"] = round(peak / predicted - 1, 4)
        self._metrics = metrics
        if self._records and distributed.rank() == 0:
            self._record(self.estimate, metrics, busiest_expert)
        return metrics

    def _record(self, estimate: RunEstimate, metrics: dict[str, float], busiest_expert: float | None) -> None:
        """Keep the ratios of the run, uncorrected, for later predictions."""
        if "step_seconds_error" not in metrics or estimate.devices is None:
            logger.warning(
                "calibrate_planner=True: nothing was kept, as no step time is predicted here (on CPUs none is)."
            )
            return
        before = estimate.calibration or Calibration(1.0)
        time = before.step_seconds * metrics["measured_step_seconds"] / metrics["predicted_step_seconds"]
        memory = metrics.get("peak_memory_error")
        memory = None if memory is None else (before.memory or 1.0) * (1 + memory)
        try:
            device, family = estimate.devices.cluster.device, estimate.model.family
            record_run(device, family, time, memory, busiest_expert=busiest_expert)
        except (ConfigError, OSError) as error:  # the training is done, whatever happens to this file
            logger.warning("calibrate_planner=True: nothing was kept. %s", error)

    def comparison(self) -> str | None:
        """The measured values beside the predicted ones, in one line; None if nothing can be compared."""
        metrics, parts = self._metrics, []
        if "step_seconds_error" in metrics:
            step, predicted = (seconds(metrics[f"{name}_step_seconds"]) for name in ("measured", "predicted"))
            parts.append(f"a step took {step} (predicted: {predicted}, error {metrics['step_seconds_error']:+.0%})")
        if "peak_memory_error" in metrics:
            peak, predicted = (human_bytes(metrics[f"{name}_peak_memory_bytes"]) for name in ("measured", "predicted"))
            parts.append(f"tensors took {peak} (predicted: {predicted}, error {metrics['peak_memory_error']:+.0%})")
        return "; ".join(parts) or None

    def print_comparison(self, is_main_process: bool) -> None:
        """Print :meth:`comparison` on the main process."""
        text = self.comparison()
        if is_main_process and text is not None:
            say(f"ds_trainer: {text}")
