"""Arguments of transformers 4 that version 5 no longer has: one row each, with what became of them.

The rows cover every name that a release from 4.0 to 4.57 had and 5.23 has not. An old name is accepted with one
deprecation line that says the new spelling; where the thing itself is gone, a value that asked for it is refused.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Container, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value
from ds_trainer.utils.secrets import is_secret, masked

_PACKAGE = __name__.partition(".")[0]

_Keywords = Mapping[str, Any]


@dataclass(frozen=True)
class Renamed:
    """What became of one argument.

    Attributes:
        hint: its type in version 4.
        default: its default in version 4; given as such it asks for nothing. None asks for nothing either.
        now: the new spelling, or what to do instead: a sentence without its full stop.
        fields: new fields for an old value, given all keywords; None: no field follows from it.
        accepts: whether a value can be had; those for which it says False are refused with ``now``.
        unset: values of the new field that count as not given beside the old name.
    """

    hint: Any
    default: Any
    now: str
    fields: Callable[[Any, _Keywords], dict[str, Any]] | None = None
    accepts: Callable[[Any], bool] = lambda _: True
    unset: tuple[Any, ...] = (None,)


def _same(new: str, hint: Any) -> Renamed:
    """Another name for the same thing."""
    return Renamed(hint, None, f"write {new}", lambda value, _: {new: value})


def _switch(new: str, choice: Any) -> Renamed:
    """A switch whose True is one choice of another argument."""
    return Renamed(bool, False, f"True is now {new}={choice!r}", lambda value, _: {new: copy(choice)} if value else {})


def _without_effect(hint: Any, default: Any, now: str) -> Renamed:
    """Accepted; nothing follows from any value."""
    return Renamed(hint, default, now)


def _refused(hint: Any, default: Any, now: str, *harmless: Any) -> Renamed:
    """Accepted at its default and at ``harmless`` values; any other asked for something that is gone."""
    return Renamed(hint, default, now, accepts=lambda value: value in harmless)


def _named_repository(name: str, keywords: _Keywords) -> dict[str, Any]:
    """From ``push_to_hub_model_id``: its owner may stand in ``push_to_hub_organization``."""
    owner = keywords.get("push_to_hub_organization")
    return {"hub_model_id": f"{owner}/{name}" if owner and "/" not in name else name}


def _owned_repository(owner: str, keywords: _Keywords) -> dict[str, Any]:
    """From ``push_to_hub_organization``: the name may stand in ``push_to_hub_model_id``, else it is the output's."""
    name = keywords.get("push_to_hub_model_id") or os.path.normpath(keywords.get("output_dir") or "trainer_output")
    return {"hub_model_id": f"{owner}/{os.path.basename(name)}"}


_AMP = ("auto", "amp", "torch", "cuda_amp", "cpu_amp")
_NO_APEX = "apex is gone; fp16=True is DeepSpeed's own float16 with a dynamic loss scale, bf16=True needs no scale"
_NO_TPU = "there is no TPU behind a DeepSpeed engine; it runs on GPUs and CPUs"
_NO_FSDP = "ZeRO needs no wrapping rule; shard the parameters with zero_stage=3"
_NO_MODEL_PARALLEL = "split layers with tensor_parallel_size, or shard the parameters with zero_stage=3"

RENAMED: dict[str, Renamed] = {
    # another name
    "evaluation_strategy": _same("eval_strategy", str | None),
    "per_gpu_train_batch_size": _same("per_device_train_batch_size", int | None),
    "per_gpu_eval_batch_size": _same("per_device_eval_batch_size", int | None),
    "push_to_hub_token": _same("hub_token", str | None),
    "torchdynamo": _same("torch_compile_backend", str | None),
    # another spelling
    "warmup_ratio": Renamed(
        float,
        0.0,
        "write warmup_steps: from 1 on it counts steps, below 1 it is a fraction of all steps",
        lambda value, _: {"warmup_steps": value},
        lambda value: 0 <= value < 1,
        unset=(None, 0),
    ),
    "no_cuda": _switch("use_cpu", True),
    "adafactor": _switch("optim", "adafactor"),
    "group_by_length": _switch("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": _switch("include_for_metrics", ["inputs"]),
    "push_to_hub_model_id": Renamed(str | None, None, "write hub_model_id='owner/name'", _named_repository),
    "push_to_hub_organization": Renamed(str | None, None, "write hub_model_id='owner/name'", _owned_repository),
    # nothing to set
    "overwrite_output_dir": _without_effect(
        bool,
        False,
        "a run never deletes what it finds; give it a new output_dir, or remove the old checkpoints yourself",
    ),
    "logging_dir": _without_effect(
        str | None,
        None,
        "trackers have settings of their own; for TensorBoard set the environment variable TENSORBOARD_LOGGING_DIR",
    ),
    "include_tokens_per_second": _without_effect(bool | None, False, "tokens per second are always recorded"),
    "save_safetensors": _refused(bool | None, True, "weights are always written as safetensors"),
    # gone
    "half_precision_backend": _refused(str, "auto", _NO_APEX, *_AMP),
    "fp16_backend": _refused(str, "auto", _NO_APEX, *_AMP),
    "fp16_opt_level": _refused(str, "O1", _NO_APEX),
    "xpu_backend": _refused(str | None, None, "the backend of collectives follows from the device: nccl or gloo"),
    "use_mps_device": _refused(bool, False, "the engine runs on NVIDIA GPUs and CPUs; on a Mac use use_cpu=True"),
    "use_ipex": _refused(bool, False, "torch has taken over its CPU kernels; use use_cpu=True and bf16=True"),
    "jit_mode_eval": _refused(bool, False, "TorchScript has had its day; use torch_compile=True"),
    "tpu_num_cores": _refused(int | None, None, _NO_TPU),
    "tpu_metrics_debug": _refused(bool, False, _NO_TPU),
    "mp_parameters": _refused(str, "", f"SageMaker's model parallelism is gone; {_NO_MODEL_PARALLEL}"),
    "model_parallel": _refused(bool, False, _NO_MODEL_PARALLEL),
    "sharded_ddp": _refused(
        Any,  # bool, text or list of texts
        "",
        "fairscale's sharding is ZeRO here: simple and zero_dp_2 are zero_stage=2, zero_dp_3 is zero_stage=3, offload "
        "is offload_optimizer='cpu'",
        False,
        [],
    ),
    "fsdp_min_num_params": _refused(int, 0, _NO_FSDP),
    "fsdp_transformer_layer_cls_to_wrap": _refused(str | None, None, _NO_FSDP),
    "dispatch_batches": _refused(bool | None, None, "every rank reads its own part of each batch itself", False),
    "split_batches": _refused(
        bool | None,
        None,
        "per_device_train_batch_size is the batch of one replica; divide the global batch by the replicas yourself",
        False,
    ),
    "past_index": _refused(
        int, -1, "hidden states are not carried from batch to batch; override Trainer.compute_loss to carry them"
    ),
    "use_legacy_prediction_loop": _refused(bool, False, "there is one evaluation loop, for metrics of any kind"),
    "ray_scope": _refused(str | None, "last", "version 5 reads the environment variable RAY_SCOPE instead"),
}


def name_as_given(field: str, given: Mapping[str, Any]) -> str | None:
    """The name in ``given`` under which a field's value was given: its own, or one of version 4; None for neither."""
    if field in given:
        return field
    return next((old for old in given if old in RENAMED and field in translate({old: given[old]})[0]), None)


def translate(
    keywords: Mapping[str, Any], declared: Container[str] = ()
) -> tuple[dict[str, Any], list[str], list[str]]:
    """``keywords`` with the names of version 4 replaced by those of version 5.

    Args:
        keywords: arguments by name. Values under old names may be text as typed on a command line.
        declared: names that are fields in their own right, as in a subclass that brings back ``logging_dir``: these
            are left alone.

    Returns:
        The new keywords; one line for each old name, for a deprecation warning; one sentence for each problem. An old
        name with a problem has no line and sets nothing.
    """
    old = {name: value for name, value in keywords.items() if name in RENAMED and name not in declared}
    new = {name: value for name, value in keywords.items() if name not in old}
    deprecations: list[str] = []
    given, problems = _read_all(old)
    setters: dict[str, str] = {}  # new field -> how it was given: by its own name or an old one
    for name, value in given.items():
        row, said = RENAMED[name], f"{name}={_shown(name, value)}"
        asks = value is not None and value != row.default
        if asks and not row.accepts(value):
            problems.append(f"{said} of transformers 4 is refused: {row.now}.")
            continue
        fields = row.fields(value, {**keywords, **given}) if asks and row.fields else {}
        clashes = [field for field in fields if not _agrees(fields[field], new.get(field), row.unset)]
        problems += [
            f"{said} (now {field}={_shown(field, fields[field])}) contradicts "
            f"{setters.get(field) or f'{field}={_shown(field, new[field])}'}; keep {field} alone."
            for field in clashes
        ]
        if clashes:
            continue
        for field, wanted in fields.items():
            if _plain(new.get(field)) in row.unset:
                new[field] = wanted
                setters[field] = said
        deprecations.append(_line(said, row, fields))
    return new, deprecations, problems


def warn_renamed(deprecations: list[str]) -> None:
    """One ``FutureWarning`` for each line, shown at the first line of code outside this package."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == _PACKAGE:
        frame = frame.f_back
        level += 1
    for line in deprecations:
        warnings.warn(line, FutureWarning, stacklevel=level)


def _line(said: str, row: Renamed, fields: Mapping[str, Any]) -> str:
    if fields:
        spelling = ", ".join(f"{field}={_shown(field, value)}" for field, value in fields.items())
        return f"{said} is an argument of transformers 4: write {spelling}."
    return f"{said} is an argument of transformers 4 and sets nothing: leave it out ({row.now})."


def _read_all(old: _Keywords) -> tuple[dict[str, Any], list[str]]:
    """Old values by their types in version 4, and a sentence for each that does not fit."""
    values: dict[str, Any] = {}
    problems = []
    for name, value in old.items():
        row = RENAMED[name]
        try:
            values[name] = read_as(_located(value), row.hint)
        except WrongType:
            problems.append(
                f"{name}={_shown(name, value)} of transformers 4 must be {describe(row.hint)}. Now: {row.now}."
            )
    return values, problems


def _located(value: Any) -> Located:
    value = _plain(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):  # "" would be null
        return read_command_line_value(value) if value else Located("", "", "")
    if isinstance(value, list | tuple):
        return Located([_located(entry) for entry in value], "")
    return Located(value, "")


def _agrees(wanted: Any, present: Any, unset: tuple[Any, ...]) -> bool:
    """Whether the new field's value, if it has one, says what the old name says."""
    present = _plain(present)
    if present in unset:
        return True
    if isinstance(wanted, list) and isinstance(present, list):
        return set(wanted) <= set(present)
    return bool(wanted == present)


def _shown(name: str, value: Any) -> str:
    return masked(name) if is_secret(name) else repr(_plain(value))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
