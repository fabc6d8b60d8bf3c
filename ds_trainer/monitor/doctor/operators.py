"""DeepSpeed's operators and what they are compiled with, as findings."""

from __future__ import annotations

from ds_trainer.engine.operators import missing_tools, operators
from ds_trainer.monitor.doctor.findings import Finding, Level

_OPTIONAL = ("libaio.h",)


def operator_findings(device_type: str) -> list[Finding]:
    """Which operators there are, and what is missing to compile others at first use."""
    known = operators()
    ready = [one.name for one in known if one.installed]
    later = [one.name for one in known if one.compilable and not one.installed]
    never = [one.name for one in known if not one.compilable and not one.installed]
    parts = {"installed": ready, "compiled at first use": later, "not possible here": never}
    said = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts.items() if names)
    found = [Finding(Level.OK, "operators of DeepSpeed", said)]
    for tool, remedy in missing_tools(device_type).items():
        level = Level.OK if tool in _OPTIONAL else Level.WARN
        found.append(Finding(level, "compiling operators", f"{tool} is missing", remedy))
    return found
