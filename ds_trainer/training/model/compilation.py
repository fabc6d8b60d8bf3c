"""``torch_compile``: what ``torch.compile`` is told."""

from __future__ import annotations

from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WITHOUT_MODES = ("eager", "aot_eager", "cudagraphs")


def compile_problems(args: TrainingArguments) -> list[str]:
    """Why the model cannot be compiled as asked, a sentence each."""
    import torch

    backend, mode = args.torch_compile_backend, args.torch_compile_mode
    problems = []
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        problems.append(f"torch_compile_backend={backend} is not known to torch. There are {', '.join(backends)}.")
    if mode is not None and mode not in MODES:
        problems.append(f"torch_compile_mode={mode} is not known to torch. There are {', '.join(MODES)}.")
    elif mode not in (None, "default") and backend in _WITHOUT_MODES:
        problems.append(
            f"torch_compile_mode={mode} is a setting of the backend inductor, but torch_compile_backend={backend}. "
            "Leave out one of them."
        )
    return problems


def compile_options(args: TrainingArguments) -> dict[str, Any] | None:
    """Keywords of the engine's ``compile``; None where the model is not compiled."""
    if not args.torch_compile:
        return None
    mode = args.torch_compile_mode
    return {"backend": args.torch_compile_backend, "compile_kwargs": {} if mode is None else {"mode": mode}}
