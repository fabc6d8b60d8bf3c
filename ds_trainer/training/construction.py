"""What is wrong with the arguments of ``Trainer(...)`` themselves, before anything is looked at."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_trainer.training.loading.model_argument import is_named
from ds_trainer.training.signatures import is_from
from ds_trainer.utils.errors import ConfigError


def check_construction(
    model: Any, model_init: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, data_collator: Any
) -> None:
    """Refuse what contradicts itself, all problems at once.

    Raises:
        ConfigError: no model or two, something that is no model nor its name, two optimizers, an optimizer over a model
            that is yet to be made, or a collator that cannot be called.
    """
    problems = []
    if (model is None) == (model_init is None):
        problems.append("Give either a model or a model_init that makes one, and not both.")
    if model is not None and not isinstance(model, nn.Module) and not is_named(model):
        hint = " Pass the function as model_init." if callable(model) else ""
        problems.append(
            f"model is a {type(model).__name__}, not a torch.nn.Module, the name of a model, or its configuration."
            f"{hint}"
        )
    problems += keras_problems(model)
    placed = getattr(model, "hf_device_map", None)
    if isinstance(placed, dict) and len(set(map(str, placed.values()))) > 1:
        problems.append(
            f"The model is spread over devices already ({', '.join(sorted(set(map(str, placed.values()))))}): load it "
            "without device_map; ZeRO stage 3 (zero_stage=3) spreads it."
        )
    if not isinstance(optimizers, tuple) or len(optimizers) != 2:
        problems.append(f"optimizers={optimizers!r} must be a pair (optimizer, schedule); either may be None.")
    elif optimizers != (None, None):
        if optimizer_cls_and_kwargs is not None:
            problems.append("optimizers and optimizer_cls_and_kwargs are both given. Keep one of them.")
        if model_init is not None:
            problems.append(
                "optimizers are over the parameters of one model, but model_init makes a new one for every train(). "
                "Pass optimizer_cls_and_kwargs=(class, arguments), or override create_optimizer."
            )
    if data_collator is not None and not callable(data_collator):
        problems.append(f"data_collator is a {type(data_collator).__name__}, which cannot be called with samples.")
    if problems:
        raise ConfigError(problems)


def keras_problems(model: Any) -> list[str]:
    """A Keras model trains silently as in inference, unless somebody tells it the mode."""
    if not is_from(model, "keras"):
        return []
    name = type(model).__name__
    return [f"{name} is a Keras model, which ignores train() and eval(): pass ds_trainer.KerasModule(model)."]
