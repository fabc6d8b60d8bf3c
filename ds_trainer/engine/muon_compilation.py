"""Compiles the kernels of DeepSpeed's Muon optimizer at their first call.

DeepSpeed 0.19.8 imports Muon whenever an engine is created, to see whether it is the optimizer
(``runtime/zero/utils.py``). That import decorates three functions with ``torch.compile``, which imports torch's
compiler: about two seconds of CPU time in every process, a fifth of the start of a small training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

_MUON = "deepspeed.runtime.zero.muon.original_muon"
_compiles = True


def run_muon_uncompiled() -> None:
    """Let the kernels of Muon run as they are, where torch cannot compile. Call it on all ranks, before training."""
    global _compiles
    _compiles = False


def compile_muon_when_called() -> None:
    """Imports Muon without torch's compiler. All its kernels are compiled when the first of them is called."""
    if _MUON in sys.modules:
        return
    from deepspeed.runtime import compiler

    uncompiled: list[Callable[..., Any]] = []

    def deferred(kernel: Callable[..., Any]) -> Callable[..., Any]:
        uncompiled.append(kernel)

        @wraps(kernel)
        def call(*args: Any, **keywords: Any) -> Any:
            names = kernel.__globals__
            while uncompiled:  # all of them: a compiled kernel must find compiled ones, not this function
                other = uncompiled.pop()
                names[other.__name__] = compiler.compile()(other) if _compiles else other
            return names[kernel.__name__](*args, **keywords)

        return call

    decorator, compiler.compile = compiler.compile, lambda: deferred
    try:
        import_module(_MUON)
    finally:
        compiler.compile = decorator
