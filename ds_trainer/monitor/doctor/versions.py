"""What must be equal on all ranks: versions, code, arguments. One small gather compares them.

Ranks that differ here train something nobody asked for, or wait for each other forever.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.monitor.doctor.findings import Finding, Level, RankHost, hosts_text
from ds_trainer.utils.units import human_bytes

_PACKAGES = ("deepspeed", "transformers", "datasets", "accelerate", "peft", "numpy", "safetensors")
_PACKAGE = Path(__file__).parents[2]
_CODE = (".py", ".json", ".yaml")
_MAY_DIFFER = frozenset(
    {
        *("local_rank", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name"),
        *("hub_token", "nvme_path", "self_test", "resume_from_checkpoint"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        "deepspeed",  # may be another file on each machine: the compiled configuration is compared instead
    }
)
_DIRECTORIES = frozenset({"output_dir", "logging_dir"})
_COMPILED_PATHS = ("nvme_path",)  # keys of the compiled configuration that may differ

Facts = dict[str, str]
"""Properties of a rank by name."""


@functools.cache
def versions() -> Facts:
    """Versions of the libraries that compute. Every call returns the same object: do not change it."""
    values: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "ds_trainer": _installed("ds-trainer"),
        **{name: _installed(name) for name in _PACKAGES},
        "code of ds_trainer": code_digest(_PACKAGE),
    }
    return {name: value for name, value in values.items() if value is not None}


def machine_versions() -> Facts:
    """Versions that may differ between machines, but rarely should."""
    values = {"kernel": platform.release(), "GPU driver": _driver(), "device": _device()}
    return {name: value for name, value in values.items() if value is not None}


def script_digest() -> Facts:
    """Name and digest of the running script; empty if it is not a file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return {}
    return {"script": f"{Path(path).name} {_digest(Path(path).read_bytes())}"}


def code_digest(package: Path) -> str:
    """One short digest of all code in a directory, independent of where it is installed."""
    files: dict[str, str] = {}  # by relative path; without pathlib, which takes longer than reading the files
    for folder, folders, names in os.walk(package):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        paths = (os.path.join(folder, name) for name in names if name.endswith(_CODE))
        files.update((os.path.relpath(path, package), path) for path in paths)
    whole = hashlib.sha256()
    for relative in sorted(files):
        with open(files[relative], "rb") as file:
            whole.update(relative.encode() + b"\0" + file.read() + b"\0")
    return whole.hexdigest()[:12]


def argument_facts(args: TrainingArguments, compiled: Mapping[str, Any] | None = None) -> Facts:
    """All arguments that must be equal on all ranks, and the values of the compiled configuration.

    Left out are arguments that may differ between ranks: ``local_rank``, log levels, device paths, data loader workers,
    the output directory with ``save_on_each_node`` or without saves, and the fields that a subclass adds.
    """
    ours = Seq2SeqTrainingArguments if isinstance(args, Seq2SeqTrainingArguments) else TrainingArguments
    shared = args.save_strategy != SaveStrategy.NO and not args.save_on_each_node
    left_out = _MAY_DIFFER | (frozenset() if shared else _DIRECTORIES)
    known = ours.__dataclass_fields__
    facts = {n: _text(v) for n, v in args.to_dict().items() if n in known and n not in left_out}
    for path, value in _flat(compiled or {}):
        if path.rpartition(".")[2] not in _COMPILED_PATHS:
            facts[f"deepspeed {path}"] = _text(value)
    return facts


def digest_of(facts: Facts) -> str:
    """One short digest of facts."""
    return _digest(json.dumps(facts, sort_keys=True).encode())


@dataclass(frozen=True)
class Difference:
    """A fact that differs between ranks: each value with its ranks, the most common value first."""

    name: str
    values: tuple[tuple[str, tuple[RankHost, ...]], ...]

    def __str__(self) -> str:
        values = ", but ".join(f"{value} on {hosts_text(ranks)}" for value, ranks in self.values)
        return f"{self.name} differs: {values}"


def differences(reports: Sequence[tuple[RankHost, Facts]]) -> list[Difference]:
    """The facts that differ between ranks. A rank without a fact counts as having ``nothing``."""
    names = dict.fromkeys(name for _, facts in reports for name in facts)
    rows = []
    for name in names:
        values: dict[str, list[RankHost]] = {}
        for rank, facts in reports:
            values.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda entry: -len(entry[1]))
            rows.append(Difference(name, tuple((value, tuple(ranks)) for value, ranks in ordered)))
    return rows


def argument_differences(
    here: RankHost, arguments: Facts, digests: Iterable[str], gather: Callable[[Any], list[Any]]
) -> list[Difference]:
    """The arguments that differ between ranks. Collective if the ``digests`` of the ranks differ."""
    if len(set(digests)) == 1:
        return []
    return differences(gather((here, arguments)))


def version_findings(reports: Sequence[tuple[RankHost, Facts]], required: Iterable[str]) -> list[Finding]:
    """One finding per version: the common value, or the ranks of each value. Those in ``required`` must be equal."""
    different = {difference.name: difference for difference in differences(reports)}
    must, findings = set(required), []
    for name in dict.fromkeys(name for _, facts in reports for name in facts):
        if name not in different:
            findings.append(Finding(Level.OK, name, reports[0][1][name]))
            continue
        level = Level.FAIL if name in must else Level.WARN
        remedy = (
            "Install the same version on all machines, preferably from one environment on a shared file system."
            if level == Level.FAIL
            else "Ranks wait for the slowest; kernels on different machines may round differently."
        )
        findings.append(Finding(level, name, str(different[name]), remedy))
    return findings


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _installed(package: str) -> str | None:
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:  # may differ from the installed package
        return str(imported)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    fields = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return next((field for field in fields if field.count(".") >= 1 and field[0].isdigit()), None)


def _device() -> str:
    if not torch.cuda.is_available():
        return f"cpu ({platform.machine()})"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {human_bytes(properties.total_memory)}"
