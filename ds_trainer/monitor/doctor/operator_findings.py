"""Findings about DeepSpeed's operators and the tools that compile them."""

from __future__ import annotations

from ds_trainer.engine.deepspeed_operators import missing_tools, operators, unreadable_architectures
from ds_trainer.monitor.doctor.findings import Finding, Level

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
