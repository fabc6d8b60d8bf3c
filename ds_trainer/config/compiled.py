"""``CompiledConfig``: the JSON that DeepSpeed gets, with the origin of each of its values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ds_trainer.utils.secrets import without_secrets

_SHORT_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Attributes:
        kind: ``argument`` (of TrainingArguments), ``user`` (the user's DeepSpeed file), ``derived`` (from other values)
            or ``default`` (of an argument, or of this package).
        detail: the argument's name, or the reason.
        source: where it was written: ``recipe.yaml:12``, ``command line``, ``ds.json:7``. Empty if it was not written.
    """

    kind: str
    detail: str
    source: str = ""

    def __str__(self) -> str:
        source = self.source if self.source not in ("argument", "default") else ""
        source = f" ({source})" if source and self.detail else source
        return f"{self.kind}: {self.detail}{source}"


@dataclass(frozen=True)
class Precision:
    """The number formats of a run, each ``fp32``, ``bf16`` or ``fp16``.

    Attributes:
        dtype: dtype of the model's weights.
        master: dtype of the master weights that the optimizer updates.
        autocast: dtype of ``torch.autocast`` in the forward pass; None without autocast.
    """

    dtype: str
    master: str
    autocast: str | None = None

    @property
    def compute(self) -> str:
        """Dtype of the matrix products."""
        return self.autocast or self.dtype

    def __str__(self) -> str:
        return self.dtype if self.autocast is None else f"{self.dtype}, autocast {self.autocast}"


@dataclass(frozen=True)
class Scheduler:
    """A ``scheduler`` block: a schedule that DeepSpeed steps.

    Attributes:
        type: DeepSpeed's name of the schedule.
        params: its parameters.
        source: where the type was written.
    """

    type: str
    params: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class ActivationCheckpointing:
    """The ``activation_checkpointing`` block, with DeepSpeed's names of its keys.

    Attributes:
        source: where the block was written.
    """

    source: str
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class CompiledConfig:
    """One complete DeepSpeed configuration with the origin of every value.

    :func:`ds_trainer.config.compiler.compile_config` makes it. Read it through the properties; ``get`` with a path is
    for the compiler and its rules.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[str, Origin] = {}

    def set(self, path: str, value: Any, origin: Origin) -> None:
        """Set the value at a dotted ``path``. Raises ValueError if it is set already: a defect of the compiler."""
        if path in self._origins:
            raise ValueError(f"{path} is set already, by {self._origins[path]}")
        *parents, name = path.split(".")
        section = self._values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
        self._origins[path] = origin

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted ``path``, or ``default``."""
        section: Any = self._values
        for name in path.split("."):
            if not isinstance(section, Mapping) or name not in section:
                return default
            section = section[name]
        return section

    def __contains__(self, path: str) -> bool:
        return self.get(path, _MISSING) is not _MISSING

    # -- typed access ---------------------------------------------------------------------------------------------

    @property
    def micro_batch_size(self) -> int:
        """Samples per replica in one micro-batch."""
        return int(self._values["train_micro_batch_size_per_gpu"])

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return int(self._values["gradient_accumulation_steps"])

    @property
    def gradient_clipping(self) -> float:
        """Maximum gradient norm; 0 for no clipping."""
        return float(self._values["gradient_clipping"])

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self.get("zero_optimization.stage", 0))

    @property
    def hpz_partition_size(self) -> int:
        """Ranks of the secondary partition of ZeRO++ (hpZ); 1 without it."""
        return int(self.get("zero_optimization.zero_hpz_partition_size") or 1)

    def offload(self, state: str) -> str | None:
        """Device to which ``state``, ``"optimizer"`` or ``"param"``, is offloaded: ``cpu``, ``nvme``, or None."""
        if state not in ("optimizer", "param"):
            raise ValueError(f"{state!r} is neither 'optimizer' nor 'param'")
        device = self.get(f"zero_optimization.offload_{state}.device", "none")
        return None if device == "none" else str(device)

    @property
    def precision(self) -> Precision:
        """Number formats of weights, master weights and autocast."""
        dtype = next((name for name in ("fp16", "bf16") if self.get(f"{name}.enabled") is True), "fp32")
        low = self.get(f"{dtype}.{dtype}_master_weights_and_grads") is True
        autocast = None
        if self.get("torch_autocast.enabled") is True:
            autocast = short_dtype(self.get("torch_autocast.dtype", "bf16"))
        return Precision(dtype, dtype if low else "fp32", autocast)

    @property
    def accumulation_dtype(self) -> str:
        """Dtype in which gradients are accumulated: ``fp32``, ``bf16`` or ``fp16``."""
        return short_dtype(self.get("data_types.grad_accum_dtype") or self.precision.dtype)

    @property
    def coarsest_dtype(self) -> str:
        """The dtype with the fewest significant bits through which a gradient passes: fp32, fp16 or bf16."""
        communicated = short_dtype(self.get("communication_data_type") or self.precision.dtype)
        used = {self.precision.compute, self.accumulation_dtype, communicated}
        return next((name for name in ("bf16", "fp16") if name in used), "fp32")

    @property
    def optimizer_type(self) -> str | None:
        """Name of the optimizer in the ``optimizer`` block; None if the optimizer is a Python object."""
        return self.get("optimizer.type")

    @property
    def optimizer_params(self) -> dict[str, Any]:
        """A copy of the parameters in the ``optimizer`` block."""
        return dict(self.get("optimizer.params", {}))

    @property
    def scheduler(self) -> Scheduler | None:
        """The schedule that DeepSpeed steps; None without a ``scheduler`` block."""
        if "scheduler.type" not in self:
            return None
        params = dict(self.get("scheduler.params", {}))
        return Scheduler(self.get("scheduler.type"), params, self.origin("scheduler.type").source)

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing | None:
        """DeepSpeed's activation checkpointing; None without the block."""
        block = self.get("activation_checkpointing")
        if block is None:
            return None
        path = next(path for path in self.paths() if path.startswith("activation_checkpointing"))
        names = {field.name for field in fields(ActivationCheckpointing)}
        values = {name: value for name, value in block.items() if name in names}
        return ActivationCheckpointing(self.origin(path).source, **values)

    @property
    def uses_deepspeed_compiler(self) -> bool:
        """Whether DeepSpeed compiles the model itself."""
        return bool(self.get("compile.deepcompile"))

    @property
    def vocab_parallel_lm_head(self) -> bool:
        """Whether tensor parallelism partitions the LM head over the vocabulary."""
        return self.get("tensor_parallel.vocab_parallel_lm_head") is True

    @property
    def tensor_parallel_preset(self) -> str | None:
        """Name of DeepSpeed's preset partition of a model; None without one."""
        return self.get("tensor_parallel.preset_model")

    # -- origins --------------------------------------------------------------------------------------------------

    def origin(self, path: str) -> Origin:
        """Where the value at ``path`` came from. Raises KeyError for an unknown path."""
        return self._origins[path]

    def paths(self) -> Iterator[str]:
        """All dotted paths, in the order in which they were set."""
        return iter(self._origins)

    def user_values(self) -> dict[str, Any]:
        """The values that only the user's DeepSpeed file sets, by dotted path."""
        return {path: self.get(path) for path, origin in self._origins.items() if origin.kind == "user"}

    def describe(self, path: str) -> str:
        """The value at ``path`` as the user wrote it, with its source, for messages.

        ``zero_stage=3 (recipe.yaml:4)``, ``fp16.enabled=true (ds.json:7)``, or for a derived value
        ``zero_optimization.stage=0 (one rank, nothing to shard)``.
        """
        if path not in self._origins:
            return f"{path} is not set"
        origin = self._origins[path]
        if origin.kind == "argument" or (origin.kind == "default" and origin.source == "default"):
            return f"{origin.detail} ({origin.source})"
        return f"{path}={self._shown(path)} ({origin.source or origin.detail})"

    def _shown(self, path: str) -> str:
        name = path.rpartition(".")[2]
        return json.dumps(without_secrets({name: self.get(path)})[name])

    # -- output ---------------------------------------------------------------------------------------------------

    def select(self, paths: Iterable[str]) -> dict[str, Any]:
        """The values at ``paths`` that are set, as a nested mapping for another configuration."""
        selected: dict[str, Any] = {}
        for path in paths:
            if (value := self.get(path)) is not None:
                *parents, name = path.split(".")
                section = selected
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[name] = value
        return selected

    def to_dict(self) -> dict[str, Any]:
        """A copy, which DeepSpeed modifies. It contains secrets: do not show or write it."""
        return copy.deepcopy(self._values)

    def to_json(self) -> str:
        """The configuration as indented JSON, in the format that ``deepspeed.initialize`` reads.

        API keys, tokens and passwords are masked (``"<API_KEY>"``), because it is printed and kept with the results.
        """
        return json.dumps(without_secrets(self._values), indent=2)

    def explain(self) -> str:
        """A table: path, value, origin."""
        rows = [(path, self._shown(path), str(origin)) for path, origin in self._origins.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for path, value, origin in rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompiledConfig):
            return NotImplemented
        return self._values == other._values and self._origins == other._origins

    def __hash__(self) -> int:
        return hash(json.dumps(self._values))


class WatchedConfig(CompiledConfig):
    """A view of ``config`` that notes which values are asked for."""

    def __init__(self, config: CompiledConfig) -> None:
        self._values, self._origins = config._values, config._origins
        self._read: set[str] = set()

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted ``path``, or ``default``; noted."""
        self._read.add(path)
        return super().get(path, default)

    def has_read(self, paths: Iterable[str]) -> bool:
        """Whether a value at or below one of ``paths`` was asked for."""
        return any(read == path or read.startswith(f"{path}.") for path in paths for read in self._read)


_MISSING = object()


def short_dtype(dtype: Any) -> str:
    """``fp32``, ``bf16`` or ``fp16`` for any of DeepSpeed's names of a dtype; another text as it is."""
    name = str(dtype).lower().removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)
