"""What the run that goes on says of numbered optimizer states: which parameter each of them belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds_trainer.arguments.enums import SchedulerType
from ds_trainer.checkpoint.foreign.plain_trainer import RunningModel
from ds_trainer.config.library_optimizers import library_optimizer
from ds_trainer.optim.stepping import steps_on_metric
from ds_trainer.training.hooks.optimizer import OptimizerHooks, members_of
from ds_trainer.training.signatures import is_overridden
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


def running_model(trainer: Trainer) -> RunningModel:
    """The model of ``trainer`` and the parameter groups that its optimizer will have. The optimizer need not exist.

    Raises:
        ConfigError: only an overridden ``create_optimizer`` knows the groups.
    """
    given: Any = trainer._given_optimizers[0]
    if given is None and is_overridden(trainer, OptimizerHooks, "create_optimizer"):
        raise ConfigError(
            f"{type(trainer).__name__} overrides create_optimizer: which parameter a numbered optimizer state of "
            "transformers.Trainer belongs to is not known. Pass the optimizer by optimizers=(optimizer, None), or "
            "begin anew from the weights (start_from_weights)."
        )
    groups = members_of(trainer.parameter_groups() if given is None else given)
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    named = [[names[id(parameter)] for parameter in group if id(parameter) in names] for group in groups]
    return RunningModel(trainer.model, named, _optimizer_name(trainer, given), _follows_metric(trainer))


def _follows_metric(trainer: Trainer) -> bool:
    given = trainer._given_optimizers[1]
    if given is not None:
        return steps_on_metric(given)
    return trainer.args.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def _optimizer_name(trainer: Trainer, given: Any) -> str:
    if given is not None:
        return type(given).__name__
    if trainer._optimizer_class is not None:
        return trainer._optimizer_class[0].__name__
    if library_optimizer(trainer.args) is not None:
        return str(trainer.args.optim)
    return str(trainer.compiled.get("optimizer.type"))
