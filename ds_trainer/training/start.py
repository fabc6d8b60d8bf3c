"""What is checked when a training begins, before anything is built: the ranks, the machines, the engine's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.engine.weights import full_numel
from ds_trainer.monitor.doctor.gradients import self_test_once
from ds_trainer.monitor.doctor.start import check_machine, check_ranks

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

_BYTES_OF_CHECKPOINT = 12  # for each trained number: a float32 master and Adam's two; the weights come on top


def check_start(trainer: Trainer) -> None:
    """Refuse a start that cannot go well, and say in the log what may not. Collective.

    Raises:
        ConfigError: ranks differ in versions, code or arguments, or the engine computes wrong gradients here.
    """
    args = trainer.args
    if trainer.is_local_process_zero():
        check_machine(args, _bytes_of_checkpoint(trainer))
    check_ranks(args, trainer.compiled.to_dict())
    self_test_once(args, trainer.compiled, trainer.layout)


def _bytes_of_checkpoint(trainer: Trainer) -> int:
    if trainer.args.save_strategy == SaveStrategy.NO:
        return 0
    weights = sum(full_numel(p) * p.element_size() for p in trainer.model.parameters())
    trained = sum(full_numel(p) for p in trainer.model.parameters() if p.requires_grad)
    return weights + (0 if trainer.args.save_only_model else _BYTES_OF_CHECKPOINT * trained)
