"""What is checked when a training begins, before anything is built: the ranks, the machines, the engine's gradient."""

from __future__ import annotations

from torch import nn

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.engine.weights import full_numel
from ds_trainer.monitor.doctor.gradients import self_test_once
from ds_trainer.monitor.doctor.startup_checks import check_machine, check_ranks
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.startup.compilers import check_compilers

_BYTES_OF_CHECKPOINT = 12  # for each trained number: a float32 master and Adam's two; the weights come on top


def check_start(args: TrainingArguments, model: nn.Module, config: CompiledConfig, layout: ParallelLayout) -> None:
    """Refuse a start that cannot go well, and warn of what may not. Collective.

    Raises:
        ConfigError: ranks differ in versions, code or arguments, a compiler that the arguments need does not
            work, or the engine computes wrong gradients here.
    """
    if args.local_process_index == 0:
        check_machine(args, _bytes_of_checkpoint(args, model))
    check_ranks(args, config.to_dict())
    check_compilers(args, model, config, layout)
    self_test_once(args, config, layout)


def _bytes_of_checkpoint(args: TrainingArguments, model: nn.Module) -> int:
    if args.save_strategy == SaveStrategy.NO:
        return 0
    weights = sum(full_numel(p) * p.element_size() for p in model.parameters())
    trained = sum(full_numel(p) for p in model.parameters() if p.requires_grad)
    return weights + (0 if args.save_only_model else _BYTES_OF_CHECKPOINT * trained)
