"""Building a model whose parameters take no memory: names, shapes and types on the meta device, buffers real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_trainer.engine.loading.construction_record import ConstructionRecorder
from ds_trainer.engine.loading.large_tensors import LargeTensorsOnDemand
from ds_trainer.utils.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)


def empty_model(build: Callable[[], Model], recorded: bool = True) -> Model:
    """What ``build`` returns, with every parameter on the meta device and every buffer as the constructor computed it.

    Modules that initialize themselves in their constructor, as those of torch do, draw no random numbers: their
    parameters are on meta by then. Weights that the constructor ties stay tied.

    Args:
        build: makes the model on the CPU, such as ``lambda: Model(config)``.
        recorded: note what the constructor does to the parameters, for
            :class:`~ds_trainer.engine.loading.fresh_weights.FreshWeights`. Where files have all weights, False is
            faster.

    Raises:
        ConfigError: the constructor reads numbers of a parameter, which there are not.
    """
    with _numbers_of_parameters_refused(), empty_parameters(recorded):
        model = build()
    _refuse_computed_from_parameters(model)
    return model


@contextmanager
def empty_parameters(recorded: bool = True) -> Iterator[None]:
    """Every parameter that a module registers goes to the meta device.

    Unlike accelerate's ``init_empty_weights``, a parameter that is registered twice stays one parameter, keeps the
    attributes that were set on it, and takes no memory before it is registered either where it is large.
    """
    register = nn.Module.register_parameter
    recorder = ConstructionRecorder() if recorded else None
    large = LargeTensorsOnDemand()
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
def _numbers_of_parameters_refused() -> Iterator[None]:
    """What torch says of a tensor on meta whose numbers are read, in words, with the line that reads them."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).casefold():
            raise
        reader, trace = "the model", error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                place = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
                reader = f"{type(owner).__name__} ({place})"
            trace = trace.tb_next
        raise ConfigError(
            f"The constructor of {reader} reads numbers of a parameter, and a model that is built without its weights "
            f"has none ({' '.join(str(error).split())[:120]}). {_LOAD_IT}"
        ) from error


def _refuse_computed_from_parameters(model: nn.Module) -> None:
    """A tensor that is neither parameter nor buffer, computed from a parameter: no file has it."""
    computed = [
        f"{type(module).__name__}.{key}"
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    if computed:
        raise ConfigError(
            f"The constructor computes {', '.join(sorted(set(computed)))} from parameters, and a model that is built "
            f"without its weights has no numbers to compute with. {_LOAD_IT}"
        )


_LOAD_IT = (
    "Load it with its weights (`model = ModelClass.from_pretrained(...)`, or its constructor), and pass the model "
    "itself to the Trainer."
)
