"""Compiles the module inside an engine in place with torch.compile, whole or by region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class CompileOptions:
    """How a model is compiled.

    Attributes:
        backend: backend of torch.compile.
        keywords: further keywords of torch.compile.
        regional: compile the repeated blocks of the model one by one. Equal blocks share one compilation, which takes a
            fraction of the time of the whole model; source: accelerate's ``compile_regions_deepspeed``. The head stays
            plain: its loss is computed in tiles.
    """

    backend: str
    keywords: dict[str, Any] = field(default_factory=dict)
    regional: bool = False


def compile_module(engine: DeepSpeedEngine, options: CompileOptions | None) -> None:
    """Compile the module of ``engine``.

    Args:
        engine: the engine, with all hooks of ZeRO in place.
        options: how; None for the options of DeepSpeed's own compiler in its configuration.
    """
    if options is None:
        engine.compile()
    elif options.regional:
        from accelerate.utils import compile_regions_deepspeed

        compile_regions_deepspeed(engine.module, backend=options.backend, **options.keywords)
        head = getattr(engine.module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            remove_compilation(head)
    else:
        engine.compile(backend=options.backend, compile_kwargs=options.keywords)


def compiled_in_place(model: nn.Module) -> nn.Module:
    """``model``, in which what the user gave to ``torch.compile`` is compiled in place.

    ``torch.compile(module)`` returns a module around it, whose name (``_orig_mod``) would be in all names of weights:
    ``from_pretrained`` would find none of them in what is saved.
    """

    def plain(module: Any) -> Any:
        inner = module._modules.get("_orig_mod")
        if inner is None or not hasattr(module, "dynamo_ctx"):
            return module
        inner = plain(inner)
        inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)
        return inner

    whole: nn.Module = plain(model)
    for part in whole.modules():
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = plain(child)
    return whole


def remove_compilation(module: nn.Module) -> None:
    """Make ``module`` plain again: torch compiles in place, and the next engine needs the plain model."""
    for part in module.modules():
        part._compiled_call_impl = None
