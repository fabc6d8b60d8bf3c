"""Names of transformers 4: what each becomes, which values are refused, and that no name is missing."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.compat.renamed_arguments import RENAMED, Renamed, translate, warn_renamed
from ds_trainer.arguments.enums import IntervalStrategy
from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError

# Old name, a value, and the fields that follow from it.
ACCEPTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("evaluation_strategy", "steps", {"eval_strategy": "steps"}),
    ("evaluation_strategy", IntervalStrategy.EPOCH, {"eval_strategy": "epoch"}),
    ("per_gpu_train_batch_size", 4, {"per_device_train_batch_size": 4}),
    ("per_gpu_eval_batch_size", "4", {"per_device_eval_batch_size": 4}),
    ("push_to_hub_token", "secret", {"hub_token": "secret"}),
    ("torchdynamo", "inductor", {"torch_compile_backend": "inductor"}),
    ("warmup_ratio", 0.1, {"warmup_steps": 0.1}),
    ("warmup_ratio", "1e-2", {"warmup_steps": 0.01}),
    ("no_cuda", True, {"use_cpu": True}),
    ("no_cuda", "true", {"use_cpu": True}),
    ("no_cuda", False, {}),
    ("adafactor", True, {"optim": "adafactor"}),
    ("adafactor", False, {}),
    ("group_by_length", True, {"train_sampling_strategy": "group_by_length"}),
    ("group_by_length", False, {}),
    ("include_inputs_for_metrics", True, {"include_for_metrics": ["inputs"]}),
    ("include_inputs_for_metrics", False, {}),
    ("push_to_hub_model_id", "model", {"hub_model_id": "model"}),
    ("push_to_hub_model_id", "me/model", {"hub_model_id": "me/model"}),
    ("push_to_hub_organization", "us", {"hub_model_id": "us/trainer_output"}),
    ("overwrite_output_dir", True, {}),
    ("overwrite_output_dir", False, {}),
    ("logging_dir", "logs", {}),
    ("logging_dir", Path("logs"), {}),
    ("include_tokens_per_second", True, {}),
    ("save_safetensors", True, {}),
    ("half_precision_backend", "cuda_amp", {}),
    ("half_precision_backend", "auto", {}),
    ("fp16_backend", "amp", {}),
    ("fp16_backend", "torch", {}),
    ("fp16_opt_level", "O1", {}),
    ("xpu_backend", None, {}),
    ("use_mps_device", False, {}),
    ("use_ipex", False, {}),
    ("jit_mode_eval", False, {}),
    ("tpu_num_cores", None, {}),
    ("tpu_metrics_debug", False, {}),
    ("mp_parameters", "", {}),
    ("model_parallel", False, {}),
    ("sharded_ddp", "", {}),
    ("sharded_ddp", False, {}),
    ("sharded_ddp", [], {}),
    ("fsdp_min_num_params", 0, {}),
    ("fsdp_transformer_layer_cls_to_wrap", None, {}),
    ("dispatch_batches", True, {}),
    ("split_batches", False, {}),
    ("split_batches", True, {"accelerator_config": {"split_batches": True}}),
    ("past_index", -1, {}),
    ("use_legacy_prediction_loop", False, {}),
    ("ray_scope", "last", {}),
]

# Old name, a value that is refused, and what the refusal points to.
REFUSED: list[tuple[str, Any, str]] = [
    ("warmup_ratio", 1.0, "warmup_steps"),
    ("warmup_ratio", -0.1, "warmup_steps"),
    ("save_safetensors", False, "safetensors"),
    ("half_precision_backend", "apex", "bf16=True"),
    ("fp16_backend", "apex", "bf16=True"),
    ("fp16_opt_level", "O2", "bf16=True"),
    ("xpu_backend", "ccl", "gloo"),
    ("use_mps_device", True, "use_cpu=True"),
    ("use_ipex", True, "use_cpu=True"),
    ("jit_mode_eval", True, "torch_compile=True"),
    ("tpu_num_cores", 8, "TPU"),
    ("tpu_metrics_debug", True, "TPU"),
    ("mp_parameters", "partitions=2", "tensor_parallel_size"),
    ("model_parallel", True, "tensor_parallel_size"),
    ("sharded_ddp", True, "zero_stage=2"),
    ("sharded_ddp", "zero_dp_3 offload", "zero_stage=3"),
    ("sharded_ddp", ["simple"], "zero_stage=2"),
    ("fsdp_min_num_params", 1000, "zero_stage=3"),
    ("fsdp_transformer_layer_cls_to_wrap", "Block", "zero_stage=3"),
    ("past_index", 2, "compute_loss"),
    ("use_legacy_prediction_loop", True, "one evaluation loop"),
    ("ray_scope", "all", "RAY_SCOPE"),
]

# Fields of TrainingArguments in one of the releases 4.0.1, 4.1.1, 4.2.2, 4.6.1, 4.11.3, 4.18.0, 4.25.1, 4.31.0, 4.40.2,
# 4.46.3 and 4.57.1 that 5.23 does not have.
REMOVED = [
    "overwrite_output_dir",
    "evaluation_strategy",
    "per_gpu_train_batch_size",
    "per_gpu_eval_batch_size",
    "logging_dir",
    "no_cuda",
    "fp16_opt_level",
    "tpu_num_cores",
    "tpu_metrics_debug",
    "past_index",
    "warmup_ratio",
    "fp16_backend",
    "xpu_backend",
    "sharded_ddp",
    "adafactor",
    "group_by_length",
    "use_legacy_prediction_loop",
    "push_to_hub_model_id",
    "push_to_hub_organization",
    "push_to_hub_token",
    "mp_parameters",
    "use_mps_device",
    "jit_mode_eval",
    "use_ipex",
    "half_precision_backend",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "include_inputs_for_metrics",
    "torchdynamo",
    "ray_scope",
    "save_safetensors",
    "dispatch_batches",
    "split_batches",
    "include_tokens_per_second",
    "model_parallel",
]


def names(cls: type) -> set[str]:
    return {item.name for item in fields(cls)}


def test_every_removed_name_has_a_row_and_a_case() -> None:
    assert set(RENAMED) == set(REMOVED)
    assert {name for name, _, _ in ACCEPTED} == set(REMOVED)
    # A row that can refuse a value must have a case that it refuses.
    free = {name for name, row in RENAMED.items() if row.accepts is Renamed.accepts}
    assert {name for name, _, _ in REFUSED} == set(REMOVED) - free


def test_no_row_hides_a_field() -> None:
    import transformers

    assert not set(RENAMED) & names(Seq2SeqTrainingArguments)
    assert not set(RENAMED) & names(transformers.Seq2SeqTrainingArguments)


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED)
def test_accepted(name: str, value: Any, expected: dict[str, Any]) -> None:
    new, deprecations, problems = translate({name: value, "seed": 1})
    assert new == {"seed": 1, **expected}
    assert set(expected) <= names(TrainingArguments)
    assert not problems
    (line,) = deprecations
    assert "\n" not in line and line.startswith(f"{name}=") and line.endswith(".")
    for field in expected:
        assert f"write {field}=" in line
    assert expected or "has no effect" in line
    assert "secret" not in line


@pytest.mark.parametrize(("name", "value", "remedy"), REFUSED)
def test_removed_names_are_rejected_with_a_remedy(name: str, value: Any, remedy: str) -> None:
    new, deprecations, problems = translate({name: value, "seed": 1})
    assert (new, deprecations) == ({"seed": 1}, [])
    (problem,) = problems
    assert problem.startswith(f"{name}={value!r} ") and remedy in problem


@pytest.mark.parametrize("name", REMOVED)
def test_none_is_ignored(name: str) -> None:
    if "None" in str(RENAMED[name].hint) or RENAMED[name].hint is Any:
        new, deprecations, problems = translate({name: None})
        assert (new, len(deprecations), problems) == ({}, 1, [])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("warmup_ratio", "much", "float"),
        ("no_cuda", "maybe", "bool"),
        ("per_gpu_train_batch_size", 1.5, "int"),
        ("logging_dir", 3, "str"),
        ("adafactor", 1, "bool"),
        ("past_index", None, "int"),
        ("push_to_hub_token", 12345, "str"),
    ],
)
def test_a_value_of_the_wrong_type(name: str, value: Any, expected: str) -> None:
    new, deprecations, problems = translate({name: value})
    assert (new, deprecations) == ({}, [])
    (problem,) = problems
    assert problem.startswith(f"{name}=") and f"must be {expected}" in problem
    assert "12345" not in problem


@pytest.mark.parametrize(
    ("keywords", "message_parts"),
    [
        ({"evaluation_strategy": "steps", "eval_strategy": "epoch"}, ["'steps'", "'epoch'"]),
        ({"per_gpu_train_batch_size": 4, "per_device_train_batch_size": 8}, ["=4", "=8"]),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, ["=0.1", "=5"]),
        ({"no_cuda": True, "use_cpu": False}, ["no_cuda=True", "use_cpu=False"]),
        ({"adafactor": True, "optim": "sgd"}, ["'adafactor'", "'sgd'"]),
        ({"group_by_length": True, "train_sampling_strategy": "random"}, ["group_by_length", "'random'"]),
        ({"include_inputs_for_metrics": True, "include_for_metrics": ["loss"]}, ["['inputs']", "['loss']"]),
        ({"push_to_hub_token": "one", "hub_token": "two"}, ["push_to_hub_token", "hub_token"]),
        ({"push_to_hub_model_id": "me/a", "push_to_hub_organization": "us"}, ["'me/a'", "'us'", "hub_model_id"]),
    ],
)
def test_old_and_new_contradict(keywords: dict[str, Any], message_parts: list[str]) -> None:
    _, _, problems = translate(keywords)
    (problem,) = problems
    assert all(part in problem for part in [*message_parts, *list(keywords)]), problem
    assert "'one'" not in problem and "'two'" not in problem


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"evaluation_strategy": "steps", "eval_strategy": IntervalStrategy.STEPS}, {"eval_strategy": "steps"}),
        ({"evaluation_strategy": "no", "eval_strategy": None}, {"eval_strategy": "no"}),
        # transformers 4 used the ratio unless steps were positive, and wrote both into its JSON
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}),
        ({"warmup_ratio": 0.0, "warmup_steps": 5}, {"warmup_steps": 5}),
        ({"no_cuda": False, "use_cpu": True}, {"use_cpu": True}),
        ({"adafactor": False, "optim": "sgd"}, {"optim": "sgd"}),
        (
            {"include_inputs_for_metrics": True, "include_for_metrics": ["loss", "inputs"]},
            {"include_for_metrics": ["loss", "inputs"]},
        ),
        ({"push_to_hub_model_id": "a", "push_to_hub_organization": "us"}, {"hub_model_id": "us/a"}),
        (
            {"push_to_hub_organization": "us", "output_dir": "runs/first/"},
            {"hub_model_id": "us/first", "output_dir": "runs/first/"},
        ),
        ({"fp16_backend": "auto", "half_precision_backend": "cuda_amp"}, {}),
    ],
)
def test_old_and_new_agree(keywords: dict[str, Any], expected: dict[str, Any]) -> None:
    new, _, problems = translate(keywords)
    assert not problems
    assert {name: getattr(value, "value", value) for name, value in new.items()} == expected


def test_all_problems_are_reported_at_once_and_the_input_is_not_changed() -> None:
    keywords = {"use_ipex": True, "warmup_ratio": "x", "no_cuda": True, "use_cpu": False, "adafactor": True, "seed": 3}
    before = dict(keywords)
    new, deprecations, problems = translate(keywords)
    assert keywords == before
    assert len(problems) == 3 and len(deprecations) == 1
    assert new == {"use_cpu": False, "optim": "adafactor", "seed": 3}


def test_calls_share_no_state() -> None:
    translate({"include_inputs_for_metrics": True})[0]["include_for_metrics"].append("loss")
    assert translate({"include_inputs_for_metrics": True})[0] == {"include_for_metrics": ["inputs"]}


def test_names_of_version_5_are_not_changed() -> None:
    value = object()
    assert translate({"eval_strategy": value, "unknown": value}) == ({"eval_strategy": value, "unknown": value}, [], [])


def test_a_name_that_a_subclass_declares_is_not_translated() -> None:
    assert translate({"logging_dir": 3, "no_cuda": True}, {"logging_dir"})[0] == {"logging_dir": 3, "use_cpu": True}


def test_a_full_set_of_version_4_defaults_is_accepted() -> None:
    """A JSON that transformers 4 has written names every field."""
    new, deprecations, problems = translate({name: row.default for name, row in RENAMED.items()})
    assert (new, problems) == ({}, [])
    assert len(deprecations) == len(RENAMED)


def test_the_warning_points_at_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_renamed(["one", "two"])
    assert [(str(entry.message), entry.category, entry.filename) for entry in caught] == [
        ("one", FutureWarning, __file__),
        ("two", FutureWarning, __file__),
    ]


def test_real_arguments_take_old_names() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = TrainingArguments(evaluation_strategy="epoch", warmup_ratio=0.25, no_cuda=True)
    assert (str(args.eval_strategy), args.warmup_steps, args.use_cpu) == ("epoch", 0.25, True)
    assert [(entry.category, entry.filename) for entry in caught] == [(FutureWarning, __file__)] * 3
    with pytest.raises(ConfigError, match="use_ipex=True"):
        TrainingArguments(use_ipex=True)


def test_real_subclasses_take_old_names() -> None:
    @dataclass(repr=False)
    class Mine(TrainingArguments):
        extra: int = 1

    with pytest.warns(FutureWarning, match="eval_strategy='epoch'"):
        assert str(Mine(evaluation_strategy="epoch", extra=2).eval_strategy) == "epoch"
