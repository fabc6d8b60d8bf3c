"""``TFTrainingArguments`` of early transformers, for :class:`~ds_trainer.TFTrainer`.

The source is ``TFTrainingArguments`` of transformers 3 and 4: :class:`TrainingArguments` of that time plus five fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.checks.type_checks import type_problems
from ds_trainer.arguments.checks.unsupported import SupportedValues
from ds_trainer.arguments.field_topics import topic
from ds_trainer.arguments.training_arguments import TrainingArguments

_early = topic("TensorFlow (early transformers)")
_NO_TPU = "names a TPU, and a DeepSpeed engine runs on GPUs and CPUs"
_REFUSED = (
    SupportedValues(
        "tpu_name", (None,), _NO_TPU, "Leave it out, and start one process per GPU with ds-trainer launch."
    ),
    SupportedValues("tpu_zone", (None,), _NO_TPU, "Leave it out."),
    SupportedValues("gcp_project", (None,), _NO_TPU, "Leave it out."),
    SupportedValues(
        "xla", (False,), "compiles TensorFlow graphs, and the model is a torch model", "Use torch_compile=True."
    ),
    SupportedValues(
        "debug",
        lambda value: value is not True,
        "traced TensorFlow graphs",
        "Use torch.profiler, or debug='underflow_overflow' to find NaN and infinite values.",
    ),
)


class DataParallelStrategy:
    """What scripts use of ``tf.distribute.Strategy``: each process of the launcher is a replica of its own.

    Attributes:
        num_replicas_in_sync: number of processes.
    """

    def __init__(self, num_replicas_in_sync: int) -> None:
        self.num_replicas_in_sync = num_replicas_in_sync

    @contextmanager
    def scope(self) -> Iterator[DataParallelStrategy]:
        """A context without effect: models are built as anywhere else."""
        yield self


@dataclass(repr=False)
class TFTrainingArguments(TrainingArguments):
    """:class:`TrainingArguments` with the further fields of early transformers' class for TensorFlow.

    ``poly_power`` and ``evaluate_during_training`` become ``lr_scheduler_type`` and ``eval_strategy``.

    Raises:
        ConfigError: one or more values are invalid, or have no meaning without TensorFlow; ``problems`` has one
            sentence for each.
    """

    poly_power: float = _early(
        "Power of the polynomial decay of the learning rate to zero; 1 is lr_scheduler_type=linear.", 1.0
    )
    evaluate_during_training: bool | None = _early("Evaluate every eval_steps; write eval_strategy=steps.")
    tpu_name: str | None = _early("Name of a TPU; refused.")
    tpu_zone: str | None = _early("Zone of a TPU; refused.")
    gcp_project: str | None = _early("Project of a TPU; refused.")
    xla: bool = _early("Compile TensorFlow graphs; refused.", False)

    def __post_init__(self) -> None:
        debug: Any = self.debug
        if debug is False:  # a switch in early transformers
            self.debug = ""
        super().__post_init__()

    def problems(self) -> list[str]:
        """As for :class:`TrainingArguments`, plus those of the further fields."""
        values = [(row, getattr(self, row.field)) for row in _REFUSED]
        refused = [row.sentence(value) for row, value in values if not row.accepts(value)]
        debug: Any = self.debug
        if debug is True:
            return refused  # the other checks expect names
        if wrong_types := list(type_problems(self)):
            return wrong_types
        return [*super().problems(), *refused, *self._contradictions()]

    def fill_in(self) -> None:
        """As for :class:`TrainingArguments`; also the schedule and the evaluation that the early fields describe."""
        if self.poly_power != 1.0:
            self.lr_scheduler_type = "polynomial"
            self.lr_scheduler_kwargs = {"power": self.poly_power, "lr_end": 0.0}
        if self.evaluate_during_training:
            self.eval_strategy = "steps"
        super().fill_in()

    def _contradictions(self) -> Iterator[str]:
        wanted: dict[str, Any] = {"power": self.poly_power, "lr_end": 0.0}
        named, kwargs = str(self.lr_scheduler_type), self.lr_scheduler_kwargs
        if not self.poly_power > 0:
            yield f"poly_power={self.poly_power!r} must be a positive number."
        elif self.poly_power != 1.0 and not (named in ("linear", "polynomial") and kwargs in (None, {}, wanted)):
            yield (
                f"poly_power={self.poly_power!r} contradicts lr_scheduler_type={named}, lr_scheduler_kwargs={kwargs!r}."
                f" Leave poly_power out, or write lr_scheduler_type='polynomial', lr_scheduler_kwargs={wanted!r}."
            )
        if self.evaluate_during_training and str(self.eval_strategy) not in ("no", "steps"):
            yield f"evaluate_during_training=True contradicts eval_strategy={self.eval_strategy}; keep only the second."

    @property
    def n_replicas(self) -> int:
        """Number of processes, each with its own part of the data unless a model is partitioned over several."""
        return self.world_size

    @property
    def strategy(self) -> DataParallelStrategy:
        """What scripts enter with ``strategy.scope()`` to build a model."""
        return DataParallelStrategy(self.world_size)
