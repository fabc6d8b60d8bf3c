"""``DistillationTrainer``: a Trainer whose model learns the distribution of a teacher, token by token."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.evaluation_engine import EvaluationEngine
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.assembly import Assembly
from ds_trainer.training.loading.model_argument import put_on_device
from ds_trainer.training.loop.auxiliary_loss import adds_auxiliary_loss
from ds_trainer.training.model.chunked_loss.chunked_loss import ChunkedLoss
from ds_trainer.training.model.distillation_loss import DistillationLoss
from ds_trainer.training.trainer import Trainer
from ds_trainer.utils.errors import ConfigError


class DistillationAssembly(Assembly):
    """The machinery of a :class:`DistillationTrainer`: also the teacher and the loss, which its constructor sets."""

    distillation: DistillationLoss
    teacher: Teacher

    def build_engine(self, num_training_steps: int) -> None:
        """Build the engine of the student, then place the teacher. Collective."""
        super().build_engine(num_training_steps)
        self.teacher.place(self.compiled, self.layout, self.device, self.engines.copies.float_type)

    def start_fresh(self) -> None:
        """Also free the teacher, whose engine is built after that of the student."""
        self.teacher.close()
        super().start_fresh()

    def release(self) -> None:
        """Also free the teacher."""
        self.teacher.close()
        super().release()

    def fingerprint(self, plan: Any) -> dict[str, Any]:
        """Also temperature, weights and divergence."""
        own = {f"distillation.{name}": value for name, value in dataclasses.asdict(self.distillation).items()}
        return {**super().fingerprint(plan), **own}


class DistillationTrainer(Trainer):
    """A :class:`Trainer` for language models, with the loss of :mod:`ds_trainer.training.model.distillation_loss`.

    The loss of a step is the mean over the tokens with a label in the global batch, in every layout. An evaluation
    gives the model's own loss, the cross-entropy, which can be compared with that of other trainings.

    Args:
        model: the student, as for :class:`Trainer`.
        args: the training arguments.
        teacher: the teacher: a module, a directory or a Hub name. It is frozen.
        distillation: temperature, weights and divergence.
        rest: further arguments of :class:`Trainer`.

    Raises:
        ConfigError: as :class:`Trainer`; or the vocabularies differ, or the arguments cannot be combined with a
            teacher. Lists all problems.
    """

    _ds_trainer: DistillationAssembly
    _ds_assembly = DistillationAssembly

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        teacher: nn.Module | str | os.PathLike[str],
        distillation: DistillationLoss | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(model, args, **rest)
        assembly = self._ds_trainer
        assembly.distillation = own = distillation or DistillationLoss()
        module = assembly.module_of(teacher)
        problems = own.problems() + _layout_problems(self, assembly.layout)
        problems += _vocabulary_problems(self.model, module, own.classes)
        if problems:
            raise ConfigError(problems)
        assembly.teacher = Teacher(module, self.args.loss_chunk_tokens)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """In training, the loss of distillation, summed and divided by ``num_items_in_batch``; else that of the model.

        Raises:
            ConfigError: the batch has no labels.
        """
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assembly, rest = self._ds_trainer, dict(inputs)
        labels = rest.pop("labels", None)
        if labels is None:
            raise ConfigError(
                f"Distillation needs labels, which say what tokens count; the batch has {', '.join(inputs)}."
            )
        teacher = assembly.teacher.logits(rest)
        outputs = model(**rest)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        total = assembly.distillation.total(outputs["logits"], teacher, targets)
        items = (targets != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = total / items
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As :class:`Trainer`; the training loss is ``distillation_loss``, which ``eval_loss`` cannot be compared with.

        Args:
            logs: values by name, which are changed.
            start_time: as for :class:`Trainer`.
        """
        renamed = {
            f"distillation_{name}" if name == "loss" or name.startswith("loss/") else name: value
            for name, value in logs.items()
        }
        logs.clear()
        logs.update(renamed)
        super().log(logs, start_time)


def _vocabulary_problems(student: nn.Module, teacher: nn.Module, shared: int | None) -> list[str]:
    sizes = [_vocabulary(student), _vocabulary(teacher)]
    if shared is None and sizes[0] != sizes[1]:
        return [
            f"The vocabularies differ: the student has {sizes[0]} entries, the teacher {sizes[1]}. Use a teacher of "
            "the same tokenizer. If one has padded its vocabulary, set classes to the number of tokens that both have."
        ]
    small = [size for size in sizes if shared is not None and size is not None and size < shared]
    return [f"distillation.classes={shared} is more than the {small[0]} entries of a vocabulary."] if small else []


def _vocabulary(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    return getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "vocab_size", None)


def _layout_problems(trainer: DistillationTrainer, layout: ParallelLayout) -> list[str]:
    args = trainer.args
    sizes = {
        "tensor_parallel_size": layout.tp,
        "sequence_parallel_size": layout.sp,
        "context_parallel_size": layout.cp,
    }
    problems = [
        f"{name}={size}: distillation compares the logits of whole sequences and vocabularies. Set {name}=1, and "
        "zero_stage=3 if memory is short: it shards student and teacher."
        for name, size in sizes.items()
        if size > 1
    ]
    others = {"label_smoothing_factor": args.label_smoothing_factor, "z_loss_factor": args.z_loss_factor}
    problems += [
        f"{name}={value} is part of the cross-entropy, which distillation computes itself. Set {name}=0."
        for name, value in others.items()
        if value
    ]
    if trainer.compute_loss_func is not None:
        problems.append("compute_loss_func: distillation has its own loss; remove it.")
    if adds_auxiliary_loss(trainer.model):
        problems.append(
            f"{type(trainer.model).__name__} adds an auxiliary loss of its experts, which distillation leaves out. "
            "Set output_router_logits=False in its configuration."
        )
    return problems


class Teacher:
    """Computes logits without gradients.

    At ZeRO-3 its weights are sharded over all ranks and gathered layer by layer, by an engine of its own; below, every
    rank has all of them.

    Args:
        model: the module; its weights may still be on meta, with a source.
        chunk_tokens: ``loss_chunk_tokens``; see :class:`ChunkedLoss`.
    """

    def __init__(self, model: nn.Module, chunk_tokens: int | None) -> None:
        self.model = model.requires_grad_(False).eval()
        self._chunked = ChunkedLoss(chunk_tokens)
        self._engine: EvaluationEngine | None = None
        self._module: nn.Module | None = None

    def place(
        self, config: CompiledConfig, layout: ParallelLayout, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """Load the weights, on this rank or sharded over all. Collective; after the engine of the training was built.

        Args:
            config: the compiled configuration.
            layout: the parallel layout.
            device: the device of this rank.
            dtype: to which floating-point weights are converted below ZeRO-3; None keeps theirs.
        """
        if self._module is not None:
            return
        if config.zero_stage == 3:
            self._engine = EvaluationEngine(self.model, config, layout)
            self._module = self._engine.deepspeed
        else:
            put_on_device(self.model, device)
            self._module = self.model if dtype is None else self.model.to(dtype)

    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The logits ``[B, T, V]``, perhaps deferred (:mod:`ds_trainer.parallel.deferred_logits`).

        Args:
            inputs: a batch without labels, on the device.
        """
        assert self._module is not None  # place() was called
        with torch.no_grad(), self._chunked.deferring(self._module):
            outputs = self._module(**inputs, use_cache=False)
        logits: torch.Tensor = outputs["logits"]
        return logits

    def close(self) -> None:
        """Free the engine; :meth:`place` may be called again."""
        self._chunked.release()
        self._module = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
