"""Which of DeepSpeed's operators are installed or can be compiled, and what compiling them requires."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from dataclasses import dataclass

from ds_trainer.config.environment import Environment


@dataclass(frozen=True)
class Operator:
    """A DeepSpeed operator: installed ahead of time, compilable at first use, or neither."""

    name: str
    installed: bool
    compilable: bool


def operators() -> list[Operator]:
    """All operators of the installed DeepSpeed, sorted by name. Takes a second or two: each checks its requirements."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    names = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # the checks print
        for name, builder in sorted(ALL_OPS.items()):
            try:
                compilable = bool(builder.is_compatible(verbose=False))
            except Exception:  # a requirement is missing in a way that the check does not handle
                compilable = False
            names.append(Operator(name, bool(installed_ops.get(name)), compilable))
    return names


def missing_tools(device_type: str) -> dict[str, str]:
    """Missing requirements for compiling operators, each with its remedy."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    required = {
        "a C++ compiler (c++)": (shutil.which("c++") is not None, "Install g++, or load a compiler module."),
        "ninja": (shutil.which("ninja") is not None, "pip install ninja"),
        "libaio.h": (Environment().has_async_io(), "Install libaio-dev; only offload to NVMe needs it."),
    }
    if device_type == "cuda":
        has_cuda = CUDA_HOME is not None and torch.version.cuda is not None
        required["the CUDA toolkit (nvcc)"] = (has_cuda, f"Install CUDA {torch.version.cuda}, or set CUDA_HOME.")
    return {name: remedy for name, (has_cuda, remedy) in required.items() if not has_cuda}


def unreadable_architectures() -> list[str]:
    """Entries of the variable ``TORCH_CUDA_ARCH_LIST`` that torch reads and DeepSpeed's builders do not (``9.0a``)."""
    entries = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    return [entry for entry in entries if not re.fullmatch(r"\d+\.\d+(\+PTX)?", entry)]
