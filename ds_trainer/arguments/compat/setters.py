"""Methods that set groups of arguments: ``args.set_training(...).set_save(...)``. The signatures are Hugging Face's.

A setter sets its whole group: a value that is not passed takes the setter's default, which may differ from the field's
(``set_logging`` logs on the first node only; the default of ``log_on_each_node`` is every node).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import warn

if TYPE_CHECKING:
    from typing_extensions import Self

_REQUIRED = inspect.Parameter.empty

# Of each setter: its purpose, and its parameters with field and default.
_SETTERS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "set_training": (
        "Set the basic training arguments and ``do_train``.",
        {
            "learning_rate": ("learning_rate", 5e-5),
            "batch_size": ("per_device_train_batch_size", 8),
            "weight_decay": ("weight_decay", 0),
            "num_epochs": ("num_train_epochs", 3),
            "max_steps": ("max_steps", -1),
            "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
            "seed": ("seed", 42),
            "activation_checkpointing": ("activation_checkpointing", False),
            "gradient_checkpointing": ("gradient_checkpointing", None),
        },
    ),
    "set_evaluate": (
        'Set the evaluation arguments, and ``do_eval`` unless ``strategy`` is ``"no"``.',
        {
            "strategy": ("eval_strategy", "no"),
            "steps": ("eval_steps", 500),
            "batch_size": ("per_device_eval_batch_size", 8),
            "accumulation_steps": ("eval_accumulation_steps", None),
            "delay": ("eval_delay", None),
            "loss_only": ("prediction_loss_only", False),
        },
    ),
    "set_testing": (
        "Set the arguments of testing on held-out data, and ``do_predict``.",
        {"batch_size": ("per_device_eval_batch_size", 8), "loss_only": ("prediction_loss_only", False)},
    ),
    "set_save": (
        "Set the checkpoint arguments.",
        {
            "strategy": ("save_strategy", "steps"),
            "steps": ("save_steps", 500),
            "total_limit": ("save_total_limit", None),
            "on_each_node": ("save_on_each_node", False),
        },
    ),
    "set_logging": (
        "Set the logging arguments.",
        {
            "strategy": ("logging_strategy", "steps"),
            "steps": ("logging_steps", 500),
            "report_to": ("report_to", "none"),
            "level": ("log_level", "passive"),
            "first_step": ("logging_first_step", False),
            "nan_inf_filter": ("logging_nan_inf_filter", False),
            "on_each_node": ("log_on_each_node", False),
            "replica_level": ("log_level_replica", "passive"),
        },
    ),
    "set_push_to_hub": (
        "Set the arguments of pushing to the Hugging Face Hub, and ``push_to_hub``.",
        {
            "model_id": ("hub_model_id", _REQUIRED),
            "strategy": ("hub_strategy", "every_save"),
            "token": ("hub_token", None),
            "private_repo": ("hub_private_repo", None),
            "always_push": ("hub_always_push", False),
            "revision": ("hub_revision", None),
        },
    ),
    "set_optimizer": (
        "Set the optimizer and its arguments.",
        {
            "name": ("optim", "adamw_torch"),
            "learning_rate": ("learning_rate", 5e-5),
            "weight_decay": ("weight_decay", 0),
            "beta1": ("adam_beta1", 0.9),
            "beta2": ("adam_beta2", 0.999),
            "epsilon": ("adam_epsilon", 1e-8),
            "args": ("optim_args", None),
        },
    ),
    "set_lr_scheduler": (
        "Set the learning rate schedule and the length of training.",
        {
            "name": ("lr_scheduler_type", "linear"),
            "num_epochs": ("num_train_epochs", 3.0),
            "max_steps": ("max_steps", -1),
            "warmup_steps": ("warmup_steps", 0),
        },
    ),
    "set_dataloader": (
        "Set the data loading arguments.",
        {
            "train_batch_size": ("per_device_train_batch_size", 8),
            "eval_batch_size": ("per_device_eval_batch_size", 8),
            "drop_last": ("dataloader_drop_last", False),
            "num_workers": ("dataloader_num_workers", 0),
            "pin_memory": ("dataloader_pin_memory", True),
            "persistent_workers": ("dataloader_persistent_workers", False),
            "prefetch_factor": ("dataloader_prefetch_factor", None),
            "multiprocessing_context": ("dataloader_multiprocessing_context", None),
            "in_order": ("dataloader_in_order", True),
            "auto_find_batch_size": ("auto_find_batch_size", False),
            "ignore_data_skip": ("ignore_data_skip", False),
            "sampler_seed": ("data_seed", None),
        },
    ),
}
_SWITCHES = {"set_training": "do_train", "set_testing": "do_predict", "set_push_to_hub": "push_to_hub"}


class Setters:
    """The nine setters. Each returns the same object, so that calls can be chained.

    All of them raise :class:`ConfigError` if a value is invalid, alone or with the other arguments. The object is then
    unchanged.
    """

    if TYPE_CHECKING:
        set_training: Callable[..., Self]
        set_evaluate: Callable[..., Self]
        set_testing: Callable[..., Self]
        set_save: Callable[..., Self]
        set_logging: Callable[..., Self]
        set_push_to_hub: Callable[..., Self]
        set_optimizer: Callable[..., Self]
        set_lr_scheduler: Callable[..., Self]
        set_dataloader: Callable[..., Self]

        def change(self, **values: Any) -> Self:
            """Set these fields and run all checks and conversions again; on a problem raise and change nothing."""


def _method(name: str, purpose: str, parameters: dict[str, tuple[str, Any]]) -> Callable[..., Any]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = {"self": _REQUIRED, **{parameter: default for parameter, (_, default) in parameters.items()}}
    signature = inspect.Signature([inspect.Parameter(each, kind, default=defaults[each]) for each in defaults])

    def setter(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        owner, *values = bound.arguments.values()
        fields = {
            field: value.value if isinstance(value, Enum) else value
            for (field, _), value in zip(parameters.values(), values, strict=True)
        }
        _complete(name, fields)
        return owner.change(**fields)

    described = [f"    {parameter}: sets ``{field}``." for parameter, (field, _) in parameters.items()]
    setter.__name__, setter.__qualname__ = name, f"Setters.{name}"
    setter.__doc__ = "\n".join([purpose, "", "Args:", *described])
    setter.__signature__ = signature  # type: ignore[attr-defined]
    return setter


def _complete(setter: str, fields: dict[str, Any]) -> None:
    """Refuse intervals of 0 steps, and set what follows from other values."""
    if setter in _SWITCHES:
        fields[_SWITCHES[setter]] = True
    for action in ("eval", "save", "logging"):
        # As a field, 0 means "not given" (eval_steps falls back to logging_steps). Passed to a setter it is a mistake.
        if fields.get(f"{action}_strategy") == "steps" and fields[f"{action}_steps"] == 0:
            raise ConfigError(f"{setter}(strategy='steps', steps=0): steps must be positive; use 'no' to turn it off.")
    if "eval_strategy" in fields:
        fields["do_eval"] = fields["eval_strategy"] != "no"
        fields["eval_delay"] = fields["eval_delay"] or 0  # transformers stores None and fails when comparing it
    if "gradient_checkpointing" in fields:
        old = fields["gradient_checkpointing"]
        if old is not None:
            text = f"gradient_checkpointing={old!r} is deprecated: write activation_checkpointing={old!r}."
            warn(text, FutureWarning, stacklevel=3)
            fields["activation_checkpointing"] = old
        fields["gradient_checkpointing"] = fields["activation_checkpointing"]  # the old name keeps the same value


for _name, _row in _SETTERS.items():
    setattr(Setters, _name, _method(_name, *_row))
