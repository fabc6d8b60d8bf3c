"""Findings about DeepSpeed's operators, Triton's kernels, and what compiles them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ds_trainer.engine.deepspeed_operators import missing_tools, operators, unreadable_architectures
from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.parallel.kernel_trial import kernel_problem, suits
from ds_trainer.utils.compiler_caches import compiler_caches, on_network

_OPTIONAL = ("libaio.h",)


def operator_findings(device_type: str) -> list[Finding]:
    """Which operators are available, and which tools are missing to compile others at first use."""
    known = operators()
    ready = [one.name for one in known if one.installed]
    later = [one.name for one in known if one.compilable and not one.installed]
    never = [one.name for one in known if not one.compilable and not one.installed]
    parts = {"installed": ready, "compiled at first use": later, "not possible here": never}
    message = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)
    found = [Finding(Level.OK, "operators of DeepSpeed", message)]
    for tool, remedy in missing_tools(device_type).items():
        level = Level.OK if tool in _OPTIONAL else Level.WARN
        found.append(Finding(level, "compiling operators", f"{tool} is missing", remedy))
    unreadable = unreadable_architectures() if device_type == "cuda" else []
    if unreadable:
        message = f"TORCH_CUDA_ARCH_LIST has {' '.join(unreadable)}, which DeepSpeed cannot read: no operator compiles"
        found.append(Finding(Level.WARN, "compiling operators", message, "Write numbers only (9.0), or unset it."))
    return found


def kernel_findings(device: torch.device, environment: Mapping[str, str]) -> list[Finding]:
    """Whether Triton compiles here, and whether its cache and inductor's are on a disk of this machine."""
    found = []
    for name, path in compiler_caches(environment).items():
        if on_network(path):
            message = f"{path} is on a network file system, where machines that compile at once fail"
            remedy = f"Set {name} to a directory on a disk of each machine."
            found.append(Finding(Level.WARN, f"cache {name}", message, remedy))
        else:
            found.append(Finding(Level.OK, f"cache {name}", f"{path}, on this machine"))
    if suits(device):
        problem = kernel_problem(device)
        if problem is None:
            found.append(Finding(Level.OK, "Triton's kernels", "compiled, and equal to torch's operators"))
        else:
            remedy = "Without them the loss is slower. Triton needs a C compiler (gcc) and Python's headers."
            found.append(Finding(Level.WARN, "Triton's kernels", problem, remedy))
    return found
