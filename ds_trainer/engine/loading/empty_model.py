"""Builds models whose parameters take no memory: parameters are on the meta device, buffers are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_trainer.engine.loading.construction_record import ConstructionRecorder
from ds_trainer.engine.loading.large_tensors import LazyLargeTensors
from ds_trainer.utils.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)


def empty_model(build: Callable[[], Model], recorded: bool = True) -> Model:
    """Builds a model with all parameters on meta and all buffers as the constructor computes them.

    Modules that initialize themselves in their constructor, as torch modules do, draw no random numbers, because
    their parameters are already on meta. Weights that the constructor ties stay tied.

    Args:
        build: builds the model on the CPU, such as ``lambda: Model(config)``.
        recorded: record how the constructor initializes the parameters, for
            :class:`~ds_trainer.engine.loading.new_weights.NewWeights`. If files contain all weights,
            False is faster.

    Raises:
        ConfigError: the constructor reads values of a parameter, which do not exist.
    """
    with _meta_errors_explained(), empty_parameters(recorded):
        model = build()
    _check_unregistered_tensors(model)
    return model


@contextmanager
def empty_parameters(recorded: bool = True) -> Iterator[None]:
    """Moves every parameter to the meta device when a module registers it.

    Unlike in accelerate's ``init_empty_weights``, a parameter that is registered twice stays one parameter and keeps
    its attributes, and a large one takes no memory even before it is registered.
    """
    register = nn.Module.register_parameter
    recorder = ConstructionRecorder() if recorded else None
    large = LazyLargeTensors()
    empty = WeakIdKeyDictionary()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            if param not in empty:
                empty[param] = _on_meta(param)
                if recorder is not None:
                    recorder.register(param, empty[param])
            param = empty[param]
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        with large, recorder or nullcontext():
            yield
        large.fill()
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(param.detach(), device="meta")
    on_meta = type(param)(data, requires_grad=param.requires_grad)
    on_meta.__dict__.update(param.__dict__)
    return on_meta


@contextmanager
def _meta_errors_explained() -> Iterator[None]:
    """Converts torch's errors about meta tensors to a ConfigError that names the line of the constructor."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).casefold():
            raise
        reader, trace = "the model", error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                location = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
                reader = f"{type(owner).__name__} ({location})"
            trace = trace.tb_next
        raise ConfigError(
            f"The constructor of {reader} reads values of a parameter, which do not exist when a model is built "
            f"without its weights ({' '.join(str(error).split())[:120]}). {_REMEDY}"
        ) from error


def _check_unregistered_tensors(model: nn.Module) -> None:
    """Raise for a tensor on meta that is neither parameter nor buffer: it was computed from a parameter."""
    computed = [
        f"{type(module).__name__}.{key}"
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if computed:
        raise ConfigError(
            f"The constructor computes {', '.join(sorted(set(computed)))} from parameters, which have no values when a "
            f"model is built without its weights. {_REMEDY}"
        )


_REMEDY = (
    "Load the model with its weights (`ModelClass.from_pretrained(...)`, or its constructor) and pass the model itself "
    "to the Trainer."
)
