"""``model.freeze``: which parameters of a model are not trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from ds_trainer.utils.errors import ConfigError

# Parts of names of modules in the model families of transformers.
_PROJECTORS = (
    "multi_modal_projector", "mm_projector", "connector", "merger", "merger_list", "deepstack_merger_list", "aligner",
    "embed_vision", "vision_projection", "image_newline",
)  # fmt: skip
_VISION_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "vision_backbone", "image_encoder")


def part_of(parameter: str) -> str:
    """The part of a vision-language model that a parameter belongs to: its name in ``model.freeze``."""
    names = parameter.split(".")
    if any(name in _PROJECTORS for name in names):
        return "projector"
    return "vision_tower" if any(name in _VISION_TOWERS for name in names) else "language_model"


PARTS = ("vision_tower", "projector", "language_model")


def freeze(model: Any, selected: Sequence[str], where: str) -> None:
    """Exclude parameters of ``model`` from training.

    Args:
        model: adapters of PEFT that it has are parts of the modules that they adapt.
        selected: :data:`PARTS`, or patterns of parameter names (``*.layers.0.*``).
        where: the place of ``selected``, for messages.

    Raises:
        ConfigError: an entry selects nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    has_vision = any(part_of(name) == "vision_tower" for name in parameters)
    problems = []
    for entry in selected:
        if entry in PARTS and has_vision:
            names = [name for name in parameters if part_of(name) == entry]
        else:
            names = fnmatch.filter(parameters, entry)
        for name in names:
            parameters[name].requires_grad_(False)
        if not names:
            children = dict.fromkeys(".".join(name.split(".")[:2]) for name in parameters)
            problems.append(
                f"{where}: model.freeze: {entry!r} selects no parameter. Parts of vision-language models are "
                f"{', '.join(PARTS)}; a pattern is compared with whole names, as in '*.layers.0.*'. The names begin "
                f"with {', '.join(list(children)[:8])}."
            )
    if not problems and not any(parameter.requires_grad for parameter in parameters.values()):
        problems.append(f"{where}: model.freeze: nothing is left to train ({', '.join(selected)}).")
    if problems:
        raise ConfigError(problems)
