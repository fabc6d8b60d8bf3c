"""Building a model whose parameters take no memory: names, shapes and types on the meta device, buffers real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_trainer.engine.loading.construction_record import ConstructionRecorder

Model = TypeVar("Model", bound=nn.Module)


def empty_model(build: Callable[[], Model]) -> Model:
    """What ``build`` returns, with every parameter on the meta device and every buffer as the constructor computed it.

    Modules that initialize themselves in their constructor, as those of torch do, draw no random numbers: their
    parameters are on meta by then. What the constructor wanted is noted, for
    :class:`~ds_trainer.engine.loading.fresh_weights.FreshWeights`. Weights that the constructor ties stay tied.

    Args:
        build: makes the model on the CPU, such as ``lambda: Model(config)``.
    """
    with empty_parameters():
        return build()


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Every parameter that a module registers goes to the meta device.

    Unlike accelerate's ``init_empty_weights``, a parameter that is registered twice stays one parameter, and keeps the
    attributes that were set on it.
    """
    register = nn.Module.register_parameter
    recorder = ConstructionRecorder()
    empty = WeakIdKeyDictionary()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if param not in empty:
                empty[param] = _on_meta(param)
                recorder.register(param, empty[param])
            param = empty[param]
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        with recorder:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    with torch.no_grad():
        data = param.detach().to("meta")
    on_meta = type(param)(data, requires_grad=param.requires_grad)
    on_meta.__dict__.update(param.__dict__)
    return on_meta
