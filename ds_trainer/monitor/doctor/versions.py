"""What must be alike on all ranks: versions, code, arguments; asked of all of them by one small gather.

Ranks that differ in them train something that nobody asked for, or wait for each other for ever.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.arguments.enums import SaveStrategy
from ds_trainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
from ds_trainer.monitor.doctor.findings import Finding, Level, Place, places_text

_PACKAGES = ("deepspeed", "transformers", "datasets", "accelerate", "peft", "numpy", "safetensors")
_PACKAGE = Path(__file__).parents[2]
_CODE = (".py", ".json", ".yaml")
_MAY_DIFFER = frozenset(
    {
        *("local_rank", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name"),
        *("hub_token", "nvme_path", "self_test", "resume_from_checkpoint"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        "deepspeed",  # may be a file of each machine's own: what is compiled of it is compared
    }
)
_OWN_FOLDERS = frozenset({"output_dir", "logging_dir"})
_PLACES = ("nvme_path",)  # of the compiled configuration

Facts = dict[str, str]
"""What a rank says of itself, by name."""


@functools.cache
def versions() -> Facts:
    """Versions of what computes. The same object at every call: not to be changed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": _nccl(),
        "ds_trainer": _installed("ds-trainer"),
        **{name: _installed(name) for name in _PACKAGES},
        "code of ds_trainer": code_digest(_PACKAGE),
    }
    return {name: value for name, value in found.items() if value is not None}


def machine_versions() -> Facts:
    """What may differ between machines, but seldom should."""
    found = {"kernel": platform.release(), "GPU driver": _driver(), "device": _device()}
    return {name: value for name, value in found.items() if value is not None}


def script_digest() -> Facts:
    """The script that was started, where it is a file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return {}
    return {"script": f"{Path(path).name} {_digest(Path(path).read_bytes())}"}


def code_digest(package: Path) -> str:
    """One short digest of all code in a directory, whatever the place it is installed in."""
    files = sorted(path for path in package.rglob("*") if path.suffix in _CODE and "__pycache__" not in path.parts)
    whole = hashlib.sha256()
    for path in files:
        whole.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


def argument_facts(args: TrainingArguments, compiled: Mapping[str, Any] | None = None) -> Facts:
    """All arguments that ranks must have in common, and the values of the compiled configuration.

    Left out is what may well differ from rank to rank: ``local_rank``, levels of logs, paths of devices, how data is
    loaded; the output directory with ``save_on_each_node``, or where nothing is saved there. What a subclass adds is
    its author's.
    """
    ours = Seq2SeqTrainingArguments if isinstance(args, Seq2SeqTrainingArguments) else TrainingArguments
    shared = args.save_strategy != SaveStrategy.NO and not args.save_on_each_node
    left_out = _MAY_DIFFER | (frozenset() if shared else _OWN_FOLDERS)
    known = ours.__dataclass_fields__
    said = {n: _text(v) for n, v in args.to_dict().items() if n in known and n not in left_out}
    for path, value in _flat(compiled or {}):
        if path.rpartition(".")[2] not in _PLACES:
            said[f"deepspeed {path}"] = _text(value)
    return said


def digest_of(facts: Facts) -> str:
    """One short digest of facts."""
    return _digest(json.dumps(facts, sort_keys=True).encode())


@dataclass(frozen=True)
class Difference:
    """A fact that ranks do not share: each value with who has it, the most common first."""

    name: str
    values: tuple[tuple[str, tuple[Place, ...]], ...]

    def __str__(self) -> str:
        said = ", but ".join(f"{value} on {places_text(places)}" for value, places in self.values)
        return f"{self.name} differs: {said}"


def differences(said: Sequence[tuple[Place, Facts]]) -> list[Difference]:
    """What not all ranks say alike; a rank that does not say it has ``nothing``."""
    names = dict.fromkeys(name for _, facts in said for name in facts)
    found = []
    for name in names:
        values: dict[str, list[Place]] = {}
        for place, facts in said:
            values.setdefault(facts.get(name, "nothing"), []).append(place)
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda entry: -len(entry[1]))
            found.append(Difference(name, tuple((value, tuple(places)) for value, places in ordered)))
    return found


def argument_differences(
    place: Place, own: Facts, digests: Iterable[str], gather: Callable[[Any], list[Any]]
) -> list[Difference]:
    """The arguments that differ; asked for only where the ``digests`` of all ranks are not alike. Collective then."""
    if len(set(digests)) == 1:
        return []
    return differences(gather((place, own)))


def version_findings(said: Sequence[tuple[Place, Facts]], alike: Iterable[str]) -> list[Finding]:
    """One finding for each version: what all have, or who has what. Those in ``alike`` have to be the same."""
    different = {difference.name: difference for difference in differences(said)}
    must, found = set(alike), []
    for name in dict.fromkeys(name for _, facts in said for name in facts):
        if name not in different:
            found.append(Finding(Level.OK, name, said[0][1][name]))
            continue
        level = Level.FAIL if name in must else Level.WARN
        remedy = (
            "Install the same on all machines, best from one environment on a shared file system."
            if level == Level.FAIL
            else "Ranks wait for the slowest; kernels of different machines may round differently."
        )
        found.append(Finding(level, name, str(different[name]), remedy))
    return found


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
    if imported is not None:  # may come from another place than what is installed
        return str(imported)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def _device() -> str:
    if not torch.cuda.is_available():
        return f"cpu ({platform.machine()})"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
