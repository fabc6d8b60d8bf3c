"""``Engines``: builds the DeepSpeed engines of a Trainer, and loads the weights of the model into them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.loading.load_report import LoadReport
from ds_trainer.engine.weights import HALF_TYPES
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loading.model_argument import MeasuredLoad, is_on_meta, put_on_device
from ds_trainer.training.loading.weight_check import WeightCheck, note_origin
from ds_trainer.training.loop.device_copies import DeviceCopies
from ds_trainer.training.model.compilation import compile_options
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.engine.evaluation_engine import EvaluationEngine
    from ds_trainer.engine.training_engine import TrainingEngine
    from ds_trainer.training.generation.generation_phase import GenerationPhase

NO_ENGINE = "There is no engine yet: train() builds it."
_IN_TRAINING = (
    "Another Trainer trains {name} now, and only one engine can have its weights. Evaluate with that Trainer, or after "
    "its training."
)
_holders: weakref.WeakKeyDictionary[Any, weakref.ref[Engines]] = weakref.WeakKeyDictionary()  # of all engines


def divide_model(model: nn.Module, layout: ParallelLayout, sharded: bool) -> None:
    """Prepare the layers of ``model`` for ranks that exchange tokens: sharded sequences and experts. Collective."""
    if sharded:
        from ds_trainer.training.model.sequence_sharding.attention_modules import use_sharded_attention

        use_sharded_attention(model, layout)
    if layout.ep > 1:
        from ds_trainer.training.model.expert_division import divide_experts

        divide_experts(model, parallel_groups(layout))


class Engines:
    """At most one engine at a time: that of a training, or before a training an engine for evaluation only.

    Args:
        device: the device of this rank.
        args: the current arguments of the Trainer.
        in_training: whether it trains now.

    Attributes:
        trained: whether a training has used the optimizer; its engine may be gone.
        generation: prepares the engine's model for ``generate``; None if there is no engine.
        load_report: duration and size of the last load of weights from files; None if there was none.
        weight_check: compares the weights with the files of the model.
        preparation_seconds: time to prepare the model for its first evaluation; None before that.
        copies: copies batches to the device, with floating-point tensors in the precision of the engine (bf16 or fp16).
    """

    def __init__(
        self, device: torch.device, args: Callable[[], TrainingArguments], in_training: Callable[[], bool]
    ) -> None:
        self.generation: GenerationPhase | None = None
        self.load_report: LoadReport | None = None
        self.weight_check = WeightCheck()
        self.preparation_seconds: float | None = None
        self.copies = DeviceCopies.to(device)
        self._device = device
        self._args, self._in_training = args, in_training
        self.trained = False
        self._training: TrainingEngine | None = None
        self._evaluation: EvaluationEngine | None = None

    @property
    def training(self) -> TrainingEngine:
        """The engine of the training. Raises ConfigError before there is one."""
        if self._training is None:
            raise ConfigError(NO_ENGINE)
        return self._training

    @property
    def training_or_none(self) -> TrainingEngine | None:
        """The engine of the training; None before there is one."""
        return self._training

    @property
    def current(self) -> TrainingEngine | EvaluationEngine | None:
        """The engine of the model; None if there is none."""
        return self._training or self._evaluation

    def build(
        self,
        model: nn.Module,
        optimizer: Any,
        args: TrainingArguments,
        config: CompiledConfig,
        layout: ParallelLayout,
        reads_logits: bool,
    ) -> TrainingEngine:
        """Build the engine of a training. Collective.

        Args:
            model: the module; its weights are loaded now if they are on meta.
            optimizer: an optimizer over its parameters, or parameter groups.
            args: whether and how to compile the model.
            config: the compiled configuration.
            layout: the layout of the job.
            reads_logits: whether code other than the loss of the model may read the logits of a training step.
        """
        from ds_trainer.engine.training_engine import TrainingEngine

        self._take(model)
        self.trained = True
        with self._measured_load(model):
            self._training = TrainingEngine(model, optimizer, config, layout, compile_options(args), reads_logits)
        _holders[self._training] = weakref.ref(self)
        for part in (self._training.deepspeed, self._training.optimizer):
            vars(part)["of_ds_trainer"] = self._training  # is found as long as hooks on the weights know these
        self.copies.float_type = HALF_TYPES.get(self._training.precision)
        self._prepare_generation(self._training)
        return self._training

    def model_for_evaluation(
        self,
        model: nn.Module,
        args: TrainingArguments,
        config: CompiledConfig,
        layout: ParallelLayout,
        half: str | None,
        reads_logits: bool,
        sharded: bool,
    ) -> nn.Module:
        """The module to call in an evaluation. Collective.

        This is the training engine if there is one. Otherwise, with ZeRO-3 or tensor parallelism, it is an engine for
        evaluation, and without them the model on the device.

        Args:
            model: the module.
            args: the training arguments.
            config: the compiled configuration.
            layout: the layout of the job.
            half: number format of the weights in an evaluation outside of training; None keeps theirs.
            reads_logits: see :meth:`build`.
            sharded: whether sequences are sharded.
        """
        if self._training is not None:
            module: nn.Module = self._training.deepspeed
            return module
        divide_model(model, layout, sharded)
        note_origin(model)
        start = time.perf_counter()
        if config.zero_stage == 3 or layout.tp > 1 or layout.ep > 1:
            if self._evaluation is None:
                from ds_trainer.engine.evaluation_engine import EvaluationEngine

                self._take(model)
                with self._measured_load(model):
                    self._evaluation = EvaluationEngine(model, config, layout, half, reads_logits)
                _holders[self._evaluation] = weakref.ref(self)
                self.copies.float_type = HALF_TYPES.get(self._evaluation.precision)
                self._prepare_generation(self._evaluation)
                self.preparation_seconds = round(time.perf_counter() - start, 4)
                self.weight_check.loaded(model, args, self._evaluation)
            evaluation: nn.Module = self._evaluation.deepspeed
            return evaluation
        with self._measured_load(model):
            if half is None or is_on_meta(model):
                put_on_device(model, self._device)
        if self.preparation_seconds is None:
            self.preparation_seconds = round(time.perf_counter() - start, 4)
            self.weight_check.loaded(model, args, None)
        return model

    def _take(self, model: nn.Module) -> None:
        """Close the engines of other Trainers that have weights of ``model``: the hooks of both would run. Collective.

        Raises:
            ConfigError: one of them trains.
        """
        own = set(map(id, model.parameters()))
        for engine, reference in list(_holders.items()):
            holder = reference()
            if holder is self or own.isdisjoint(map(id, engine.deepspeed.module.parameters())):
                continue
            if holder is not None and holder._in_training():
                raise ConfigError(_IN_TRAINING.format(name=type(model).__name__))
            (engine if holder is None else holder).close()
            _holders.pop(engine, None)
            if holder is not None:
                holder.trained = True  # its optimizer is used up

    def close(self) -> None:
        """Close the engines and release their memory."""
        self.close_evaluation()
        self.trained = False
        if self._training is not None:
            self._end_generation(self._training)
            self._training.close()
            _holders.pop(self._training, None)
            self._training = self.copies.float_type = None

    def close_evaluation(self) -> None:
        """Close the engine for evaluation, before a training engine replaces it."""
        if self._evaluation is not None:
            self._end_generation(self._evaluation)
            self._evaluation.close()
            _holders.pop(self._evaluation, None)
            self._evaluation = self.copies.float_type = None
        self.preparation_seconds = None

    def _prepare_generation(self, engine: TrainingEngine | EvaluationEngine) -> None:
        from ds_trainer.training.generation.generation_phase import GenerationPhase, generate_in_context

        self.generation = GenerationPhase(engine, self._args)
        generate_in_context(engine.deepspeed.module, self.generation.call)

    def _end_generation(self, engine: TrainingEngine | EvaluationEngine) -> None:
        from ds_trainer.training.generation.generation_phase import generate_as_before

        self.generation = None
        generate_as_before(engine.deepspeed.module)

    @contextmanager
    def _measured_load(self, model: nn.Module) -> Iterator[None]:
        load = MeasuredLoad()
        with load.of(model):
            yield
        if load.report is not None:
            self.load_report = load.report
