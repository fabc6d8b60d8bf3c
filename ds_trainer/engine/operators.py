"""Which of DeepSpeed's operators are there, can be compiled here, or cannot; and what compiling needs."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass

from ds_trainer.config.environment import Environment


@dataclass(frozen=True)
class Operator:
    """An operator of DeepSpeed: installed ahead of time, compilable at first use, or neither."""

    name: str
    installed: bool
    compilable: bool


def operators() -> list[Operator]:
    """All operators of the installed DeepSpeed, by name. A second or two: each looks for what it needs."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    found = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # they all comment
        for name, builder in sorted(ALL_OPS.items()):
            try:
                compilable = bool(builder.is_compatible(verbose=False))
            except Exception:  # what an operator needs is missing in a way that it did not expect
                compilable = False
            found.append(Operator(name, bool(installed_ops.get(name)), compilable))
    return found


def missing_tools(device_type: str) -> dict[str, str]:
    """What compiling an operator needs and is not there, with the remedy."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    wanted = {
        "a C++ compiler (c++)": (shutil.which("c++") is not None, "Install g++, or load a compiler module."),
        "ninja": (shutil.which("ninja") is not None, "pip install ninja"),
        "libaio.h": (Environment().has_async_io(), "Install libaio-dev; only offload to NVMe needs it."),
    }
    if device_type == "cuda":
        there = CUDA_HOME is not None and torch.version.cuda is not None
        wanted["the CUDA toolkit (nvcc)"] = (there, f"Install CUDA {torch.version.cuda}, or set CUDA_HOME.")
    return {name: remedy for name, (there, remedy) in wanted.items() if not there}
