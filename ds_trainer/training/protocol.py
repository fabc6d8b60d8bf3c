"""``TrainerProtocol``: all that the machinery of the Trainer reads from it and calls on it.

The names are those of transformers' Trainer. Every other name belongs to the script: a subclass may keep any attribute
and add any method. What the machinery keeps for itself is in :class:`ds_trainer.training.assembly.Assembly`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ds_trainer.accelerator.trainer_accelerator import TrainerAccelerator
    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.callbacks.protocol import CallbackHandler
    from ds_trainer.callbacks.state import TrainerControl, TrainerState
    from ds_trainer.training.model.label_smoothing import LabelSmoother

ASSEMBLY = "_ds_trainer"
"""The attribute of a Trainer with its assembly."""
_KEPT = ("args", "state", "control", "callback_handler")  # a component has the value, not the object
Method = Callable[..., Any]


class TrainerProtocol(Protocol):
    """Attributes and methods of the Trainer that the machinery uses. A subclass may override the methods."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    model: nn.Module
    model_wrapped: nn.Module
    model_init: Callable[..., Any] | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    data_collator: Callable[[list[Any]], Any]
    compute_loss_func: Callable[..., torch.Tensor] | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer: Any
    lr_scheduler: Any
    accelerator: TrainerAccelerator
    label_names: list[str]
    label_smoother: LabelSmoother | None
    can_return_loss: bool
    is_in_train: bool
    loss_is_scaled_for_ga: bool | None

    call_model_init: Method
    create_accelerator_and_postprocess: Method
    get_train_dataloader: Method
    get_eval_dataloader: Method
    get_test_dataloader: Method
    num_examples: Method
    set_initial_training_values: Method
    get_total_train_batch_size: Method
    _get_train_sampler: Method
    _get_eval_sampler: Method
    _remove_unused_columns: Method
    _set_signature_columns_if_needed: Method
    _get_collator_with_removed_columns: Method
    create_optimizer_and_scheduler: Method
    create_optimizer: Method
    create_scheduler: Method
    get_decay_parameter_names: Method
    get_batch_samples: Method
    training_step: Method
    compute_loss: Method
    compute_loss_context_manager: Method
    autocast_smart_context_manager: Method
    _prepare_inputs: Method
    _prepare_input: Method
    _get_num_items_in_batch: Method
    floating_point_ops: Method
    store_flos: Method
    get_optimizer_cls_and_kwargs: Method
    evaluate: Method
    evaluation_loop: Method
    prediction_step: Method
    log: Method
    save_model: Method
    save_state: Method
    push_to_hub: Method
    init_hf_repo: Method
    create_model_card: Method
    _save: Method
    _save_checkpoint: Method
    _load_optimizer_and_scheduler: Method
    is_world_process_zero: Method
    is_local_process_zero: Method


def check_names(trainer: Any) -> None:
    """Refuse a subclass that uses a name of :class:`TrainerProtocol` for something else, on the class or on the object.

    Raises:
        ConfigError: one sentence for each name.
    """
    problems = []
    for name, kind in [*TrainerProtocol.__annotations__.items(), (ASSEMBLY, "")]:
        where, value = _of_the_script(trainer, name)
        if where is None:
            continue
        what = f"{where}.{name} is a {type(value).__name__}"
        if kind == "Method":
            if isinstance(value, property) and ASSEMBLY in vars(trainer):
                value = getattr(trainer, name)
            if not (callable(value) or hasattr(value, "__get__")):
                problems.append(f"{what}, but {name} is a method that the Trainer calls. Give it another name.")
        elif isinstance(value, property) and value.fset is None:
            problems.append(f"{what} without a setter, but the Trainer sets {name}. Give it another name.")
        elif name == ASSEMBLY or (name in _KEPT and not isinstance(value, property)):
            problems.append(f"{what}, but the Trainer keeps its own {name} there. Give it another name.")
    if problems:
        raise ConfigError(problems)
    if ASSEMBLY in vars(trainer):
        check_kept(trainer)


def check_kept(trainer: Any) -> None:
    """Refuse a property of a script that gives another object than the one that the Trainer keeps.

    Raises:
        ConfigError: the first such property.
    """
    for name in _KEPT:
        where, value = _of_the_script(trainer, name)
        bases = (cls for cls in type(trainer).__mro__ if cls.__module__.startswith("ds_trainer."))
        own = next(vars(cls)[name] for cls in bases if name in vars(cls))
        if where is not None and getattr(trainer, name, None) is not own.__get__(trainer):
            text = "does not give the Trainer's own"
            raise ConfigError(f"{where}.{name} is a {type(value).__name__} that {text}. Return super().{name} in it.")


def _of_the_script(trainer: Any, name: str) -> tuple[str | None, Any]:
    """Where a script has given ``name`` another value than the Trainer, and the value; None if it has not."""
    kind = TrainerProtocol.__annotations__.get(name)
    if kind == "Method" and name in vars(trainer):
        return f"self (a {type(trainer).__qualname__})", vars(trainer)[name]
    for cls in type(trainer).__mro__:
        if cls.__module__.startswith("ds_trainer."):
            return None, None
        if name in vars(cls):
            return cls.__qualname__, vars(cls)[name]
    return None, None
