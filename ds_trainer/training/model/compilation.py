"""``torch_compile``: checks and builds the options of ``torch.compile``."""

from __future__ import annotations

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.compilation import CompileOptions

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WITHOUT_MODES = ("eager", "aot_eager", "cudagraphs")


def compile_problems(args: TrainingArguments) -> list[str]:
    """Reasons why the model cannot be compiled with these arguments, one sentence each."""
    import torch

    backend, mode = args.torch_compile_backend, args.torch_compile_mode
    problems = []
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        problems.append(f"torch_compile_backend={backend} is unknown to torch. Backends: {', '.join(backends)}.")
    if mode is not None and mode not in MODES:
        problems.append(f"torch_compile_mode={mode} is unknown to torch. Modes: {', '.join(MODES)}.")
    elif mode not in (None, "default") and backend in _WITHOUT_MODES:
        problems.append(
            f"torch_compile_mode={mode} applies to the inductor backend, but torch_compile_backend={backend}. "
            "Remove one of the two."
        )
    return problems


def compile_options(args: TrainingArguments) -> CompileOptions | None:
    """How the engine compiles the model; None if it does not."""
    if not args.torch_compile:
        return None
    mode = args.torch_compile_mode
    assert args.torch_compile_backend is not None  # completion of the arguments sets it
    return CompileOptions(
        args.torch_compile_backend, {} if mode is None else {"mode": mode}, args.torch_compile_regional
    )
