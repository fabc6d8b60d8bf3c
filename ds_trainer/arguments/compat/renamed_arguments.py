"""Arguments of transformers 4 that version 5 has removed: one row each, with the replacement.

The rows cover every name that a release from 4.0 to 4.57 has and 5.23 lacks. An old name is accepted with a deprecation
warning that gives the new spelling. If the feature itself is gone, a value that requests it is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value
from ds_trainer.utils.logging import warn
from ds_trainer.utils.secrets import is_secret, masked

_PACKAGE = __name__.partition(".")[0]

_Keywords = Mapping[str, Any]

OLDER_NAMES = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)
"""Names that version 5 has deprecated, each with the new one. Both are fields and have the same value."""


@dataclass(frozen=True)
class Renamed:
    """The replacement of one argument.

    Attributes:
        hint: type in version 4.
        default: default in version 4. This value and None request nothing.
        now: the new spelling, or what to do instead: a sentence without its period.
        fields: function of the old value and all keywords that returns the new fields; None: no field is set.
        accepts: whether a value is supported. Other values are refused with ``now``.
        unset: values of the new field that count as not given next to the old name.
    """

    hint: Any
    default: Any
    now: str
    fields: Callable[[Any, _Keywords], dict[str, Any]] | None = None
    accepts: Callable[[Any], bool] = lambda _: True
    unset: tuple[Any, ...] = (None,)


def _same(new: str, hint: Any) -> Renamed:
    """Another name of the same argument."""
    return Renamed(hint, None, f"write {new}", lambda value, _: {new: value})


def _switch(new: str, choice: Any) -> Renamed:
    """A switch whose True is now a choice of another argument."""
    return Renamed(bool, False, f"True is now {new}={choice!r}", lambda value, _: {new: copy(choice)} if value else {})


def _without_effect(hint: Any, default: Any, now: str) -> Renamed:
    """Accepted without effect."""
    return Renamed(hint, default, now)


def _refused(hint: Any, default: Any, now: str, *harmless: Any) -> Renamed:
    """Accepted at its default and at ``harmless`` values. Any other value requests a removed feature."""
    return Renamed(hint, default, now, accepts=lambda value: value in harmless)


def _named_repository(name: str, keywords: _Keywords) -> dict[str, Any]:
    """From ``push_to_hub_model_id``. The owner may be in ``push_to_hub_organization``."""
    owner = keywords.get("push_to_hub_organization")
    return {"hub_model_id": f"{owner}/{name}" if owner and "/" not in name else name}


def _owned_repository(owner: str, keywords: _Keywords) -> dict[str, Any]:
    """From ``push_to_hub_organization``. The name is ``push_to_hub_model_id``, or the output directory's."""
    name = keywords.get("push_to_hub_model_id") or os.path.normpath(keywords.get("output_dir") or "trainer_output")
    return {"hub_model_id": f"{owner}/{os.path.basename(name)}"}


_AMP = ("auto", "amp", "torch", "cuda_amp", "cpu_amp")
_NO_APEX = (
    "apex is no longer supported; fp16=True is DeepSpeed's float16 with a dynamic loss scale, bf16=True needs no scale"
)
_NO_TPU = "a DeepSpeed engine does not run on TPUs; it runs on GPUs and CPUs"
_NO_FSDP = "ZeRO needs no wrapping policy; shard the parameters with zero_stage=3"
_NO_MODEL_PARALLEL = "partition the layers with tensor_parallel_size, or shard the parameters with zero_stage=3"

RENAMED: dict[str, Renamed] = {
    # renamed
    "evaluation_strategy": _same("eval_strategy", str | None),
    "per_gpu_train_batch_size": _same("per_device_train_batch_size", int | None),
    "per_gpu_eval_batch_size": _same("per_device_eval_batch_size", int | None),
    "push_to_hub_token": _same("hub_token", str | None),
    "torchdynamo": _same("torch_compile_backend", str | None),
    # spelled differently
    "warmup_ratio": Renamed(
        float,
        0.0,
        "write warmup_steps: a number of steps, or below 1 a fraction of all steps",
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
    # without effect
    "overwrite_output_dir": _without_effect(
        bool, False, "a run never deletes existing files; use a new output_dir, or remove the old checkpoints yourself"
    ),
    "logging_dir": _without_effect(
        str | None,
        None,
        "each tracker has its own settings; for TensorBoard set the environment variable TENSORBOARD_LOGGING_DIR",
    ),
    "include_tokens_per_second": _without_effect(bool | None, False, "tokens per second are always recorded"),
    "save_safetensors": _refused(bool | None, True, "weights are always written as safetensors"),
    # removed
    "half_precision_backend": _refused(str, "auto", _NO_APEX, *_AMP),
    "fp16_backend": _refused(str, "auto", _NO_APEX, *_AMP),
    "fp16_opt_level": _refused(str, "O1", _NO_APEX),
    "xpu_backend": _refused(str | None, None, "the communication backend follows from the device: nccl or gloo"),
    "use_mps_device": _refused(bool, False, "the engine runs on NVIDIA GPUs and CPUs; on a Mac use use_cpu=True"),
    "use_ipex": _refused(bool, False, "its CPU kernels are now part of torch; use use_cpu=True and bf16=True"),
    "jit_mode_eval": _refused(bool, False, "TorchScript is deprecated; use torch_compile=True"),
    "tpu_num_cores": _refused(int | None, None, _NO_TPU),
    "tpu_metrics_debug": _refused(bool, False, _NO_TPU),
    "mp_parameters": _refused(str, "", f"SageMaker's model parallelism is no longer supported; {_NO_MODEL_PARALLEL}"),
    "model_parallel": _refused(bool, False, _NO_MODEL_PARALLEL),
    "sharded_ddp": _refused(
        Any,  # bool, text or list of texts
        "",
        "ZeRO replaces fairscale's sharding: simple and zero_dp_2 are zero_stage=2, zero_dp_3 is zero_stage=3, offload "
        "is offload_optimizer='cpu'",
        False,
        [],
    ),
    "fsdp_min_num_params": _refused(int, 0, _NO_FSDP),
    "fsdp_transformer_layer_cls_to_wrap": _refused(str | None, None, _NO_FSDP),
    "dispatch_batches": _without_effect(bool | None, None, "every rank reads its own part of each batch"),
    "split_batches": Renamed(
        bool | None,
        None,
        "True is now accelerator_config={'split_batches': True}",
        lambda value, _: {"accelerator_config": {"split_batches": True}} if value else {},
    ),
    "past_index": _refused(
        int, -1, "hidden states are not passed from batch to batch; override Trainer.compute_loss to pass them"
    ),
    "use_legacy_prediction_loop": _refused(bool, False, "there is one evaluation loop for all kinds of metrics"),
    "ray_scope": _refused(str | None, "last", "version 5 reads the environment variable RAY_SCOPE instead"),
}


def name_as_given(field: str, given: Mapping[str, Any]) -> str | None:
    """The name in ``given`` that sets a field: the field's name, or one of version 4. None for neither."""
    if field in given:
        return field
    return next((old for old in given if old in RENAMED and field in translate({old: given[old]})[0]), None)


def translate(
    keywords: Mapping[str, Any], declared: Container[str] = ()
) -> tuple[dict[str, Any], list[str], list[str]]:
    """``keywords`` with the names of version 4 replaced by those of version 5.

    Args:
        keywords: arguments by name. Values under old names may be text as typed on a command line.
        declared: names that are fields themselves, such as ``logging_dir`` in a subclass that declares it. They are
            not translated.

    Returns:
        The new keywords; one deprecation warning for each old name; one sentence for each problem. An old name with a
        problem has no warning and sets nothing.
    """
    old = {name: value for name, value in keywords.items() if name in RENAMED and name not in declared}
    new = {name: value for name, value in keywords.items() if name not in old}
    deprecations: list[str] = []
    given, problems = _read_all(old)
    setters: dict[str, str] = {}  # new field -> the name that set it
    for name, value in given.items():
        row, shown = RENAMED[name], f"{name}={_shown(name, value)}"
        requested = value is not None and value != row.default
        if requested and not row.accepts(value):
            problems.append(f"{shown} of transformers 4 is not supported: {row.now}.")
            continue
        fields = row.fields(value, {**keywords, **given}) if requested and row.fields else {}
        clashes = [field for field in fields if not _agrees(fields[field], new.get(field), row.unset)]
        problems += [
            f"{shown} (now {field}={_shown(field, fields[field])}) contradicts "
            f"{setters.get(field) or f'{field}={_shown(field, new[field])}'}; keep only {field}."
            for field in clashes
        ]
        if clashes:
            continue
        for field, wanted in fields.items():
            if _plain(new.get(field)) in row.unset:
                new[field] = wanted
                setters[field] = shown
        deprecations.append(_warning(shown, row, fields))
    return new, deprecations, problems


def older_names(keywords: _Keywords) -> list[str]:
    """One deprecation warning for each older name of a field of version 5 that is given without the new one."""
    return [
        f"{old}={keywords[old]!r} is deprecated: write {new}={keywords[old]!r}."
        for old, new in OLDER_NAMES
        if keywords.get(old) is not None and keywords.get(new) is None
    ]


def warn_renamed(deprecations: list[str]) -> None:
    """Issue one ``FutureWarning`` for each text, located at the first line of code outside this package."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == _PACKAGE:
        frame = frame.f_back
        level += 1
    for line in deprecations:
        warn(line, FutureWarning, stacklevel=level)


def _warning(shown: str, row: Renamed, fields: Mapping[str, Any]) -> str:
    if fields:
        spelling = ", ".join(f"{field}={_shown(field, value)}" for field, value in fields.items())
        return f"{shown} is an argument of transformers 4: write {spelling}."
    return f"{shown} is an argument of transformers 4 and has no effect: leave it out ({row.now})."


def _read_all(old: _Keywords) -> tuple[dict[str, Any], list[str]]:
    """The old values read by their types in version 4, and one sentence for each that does not fit."""
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
    """Whether the new field is unset, or has the value that the old name sets."""
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
