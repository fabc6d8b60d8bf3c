"""TrainingArguments: the reference's names and defaults, everything wrong reported at once."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.seq2seq_training_arguments import Seq2SeqTrainingArguments
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.transformers_version import needs_the_reference

OWN = {
    "torch_autocast",
    "communication_data_type",
    "grad_accum_dtype",
    "zero_stage",
    "parallelism",
    "memory_check",
    "activation_offload",
    "tiled_mlp",
    "long_context",
    "calibrate_planner",
    "offload_optimizer",
    "offload_param",
    "nvme_path",
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_size",
    "expert_parallel_size",
    "global_router_aux_loss",
    "max_shard_size",
    "save_async",
    "save_model_in_checkpoints",
    "save_failure_policy",
    "hang_timeout",
    "hang_factor",
    "hang_policy",
    "straggler_steps",
    "stream_shards",
    "replica_specific_rng",
    "run_report",
    "report_device_hour_price",
    "profile_steps",
    "torch_compile_regional",
    "max_length",
    "packing",
    "packing_strategy",
    "eval_packing",
    "fp8",
    "length_buckets",
    "loss_chunk_tokens",
    "loss_per_source",
    "z_loss_factor",
    "save_keep_every",
    "self_test",
    "verify_weights",
    "strict_resume",
    "generation_gather",
    "allow_changed_on_resume",
    "start_from_weights",
    "model_init_kwargs",
    "allow_new_weights",
    "trust_checkpoint",
    "time_limit_margin",
    "auto_resume",
    "nonfinite_policy",
    "loss_spike_factor",
    "loss_spike_window",
    "loss_spike_policy",
    "divergence_limit",
    "divergence_window",
}


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return getattr(field.default, "value", field.default)


@needs_the_reference
@pytest.mark.parametrize("name", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_names_and_defaults_are_those_of_transformers(name: str) -> None:
    import transformers

    own_class = {"TrainingArguments": TrainingArguments, "Seq2SeqTrainingArguments": Seq2SeqTrainingArguments}[name]
    reference = {f.name: default_of(f) for f in dataclasses.fields(getattr(transformers, name))}
    ours = {f.name: default_of(f) for f in dataclasses.fields(own_class)}
    assert ours.keys() - reference.keys() == OWN
    assert reference.keys() - ours.keys() == set()
    assert {name: (ours[name], reference[name]) for name in reference if ours[name] != reference[name]} == {}


def test_every_field_has_help_and_a_topic() -> None:
    fields = dataclasses.fields(Seq2SeqTrainingArguments)
    topics = Seq2SeqTrainingArguments.topics()
    assert all(f.metadata["help"].endswith(".") for f in fields)
    assert list(topics) == [f.name for f in fields]
    assert 10 <= len(set(topics.values())) <= 20


def test_methods_of_the_reference_are_there() -> None:
    import transformers

    public = {name for name in dir(transformers.TrainingArguments) if not name.startswith("_")}
    assert public - set(dir(TrainingArguments("out"))) <= {"default_optim", "is_torch_greater_or_equal_than_2_8"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be a positive integer"),
    ({"per_device_eval_batch_size": -4}, "per_device_eval_batch_size=-4 must be a positive integer"),
    ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps=1.5: expected int, got 1.5"),
    ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps='4': expected int"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0 must be a number that is not negative"),
    ({"learning_rate": "fast"}, "learning_rate='fast': expected float"),
    ({"learning_rate": float("nan")}, "learning_rate=nan must be"),
    ({"learning_rate": float("inf")}, "learning_rate=inf must be"),
    ({"weight_decay": None}, "weight_decay=None: expected float, got null"),
    ({"adam_beta1": 1.0}, "adam_beta1=1.0 must be a number of at least 0"),
    ({"adam_beta2": -0.1}, "adam_beta2=-0.1 must be"),
    ({"bf16": "yes"}, "bf16='yes': expected bool"),
    ({"fp16": 1}, "fp16=1: expected bool"),
    ({"optim": "adamw_troch"}, "optim='adamw_troch' is not one of .*Did you mean 'adamw_torch'"),
    ({"optim": None}, "optim=None is not one of"),
    ({"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'"),
    ({"save_strategy": "step"}, "Did you mean 'steps'"),
    ({"logging_strategy": "epochs"}, "Did you mean 'epoch'"),
    ({"hub_strategy": "always"}, "hub_strategy='always' is not one of end, every_save"),
    ({"log_level": "verbose"}, "log_level='verbose' is not one of"),
    ({"torch_autocast": "bfloat16"}, "torch_autocast='bfloat16' is not one of none, bf16, fp16"),
    ({"offload_optimizer": "disk"}, "offload_optimizer='disk' is not one of none, cpu, nvme"),
    ({"offload_param": True}, "offload_param=True is not one of none, cpu, nvme"),
    ({"max_steps": -5}, "max_steps=-5 must be a number of optimizer steps, or -1 for num_train_epochs"),
    ({"max_steps": 0, "num_train_epochs": 0}, "num_train_epochs=0 must be a positive number"),
    ({"max_steps": 2.5}, "max_steps=2.5: expected int"),
    ({"seed": -1}, "seed=-1 must be an integer"),
    ({"seed": None}, "seed=None: expected int"),
    ({"data_seed": -2}, "data_seed=-2 must be"),
    ({"save_total_limit": 0}, "save_total_limit=0 must be a positive integer or None"),
    ({"save_total_limit": "3"}, "save_total_limit='3' must be .* or a size such as '500GB'"),
    ({"save_total_limit": "a lot"}, "save_total_limit='a lot' must be .* or a size such as '500GB'"),
    ({"save_total_limit": 2.5}, "save_total_limit=2.5: expected"),
    ({"logging_steps": 1.5}, "logging_steps=1.5 must be a whole number of steps"),
    ({"logging_steps": 0}, "logging_steps=0 must be positive"),
    ({"save_steps": 0}, "save_steps=0 must be positive"),
    ({"eval_strategy": "steps", "eval_steps": -5}, "eval_steps=-5 must be positive"),
    ({"warmup_steps": 10.5}, "warmup_steps=10.5 must be a whole number"),
    ({"warmup_steps": -1}, "warmup_steps=-1 must be a number that is not negative"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are different precisions"),
    ({"bf16": True, "torch_autocast": "bf16"}, "bf16 and torch_autocast=bf16 are different"),
    ({"zero_stage": 4}, "zero_stage=4 must be 0, 1, 2, 3"),
    ({"zero_stage": "3"}, "zero_stage='3': expected int or null"),
    ({"optim_args": "momentum"}, "'momentum' is not of the form name=value"),
    ({"lr_scheduler_kwargs": "{num_cycles: 2}"}, "lr_scheduler_kwargs=.* is not valid JSON"),
    ({"lr_scheduler_kwargs": "[1]"}, "lr_scheduler_kwargs=.* must be a mapping in JSON"),
    ({"model_init_kwargs": "{auto_class: AutoModel}"}, "model_init_kwargs=.* is not valid JSON"),
    ({"model_init_kwargs": "AutoModel"}, "model_init_kwargs=.* is not valid JSON"),
    ({"max_shard_size": "5 apples"}, "max_shard_size='5 apples'"),
    ({"label_names": 3}, "label_names=3: expected a list of str or null"),
    ({"ddp_timeout": 0}, "ddp_timeout=0 must be a positive integer"),
    ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1 must be"),
    ({"dataloader_num_workers": 100_000}, "dataloader_num_workers=100,000 is more than the 1,024 of a rank"),
    ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor=2 configures data loading workers"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers=True configures data loading workers"),
    (
        {"dataloader_multiprocessing_context": "thread", "dataloader_num_workers": 1},
        "dataloader_multiprocessing_context='thread' is not one of",
    ),
    ({"torch_empty_cache_steps": 0}, "torch_empty_cache_steps=0 must be .* leave it out to keep the cache"),
    ({"torch_empty_cache_steps": -1}, "torch_empty_cache_steps=-1 must be .* leave it out to keep the cache"),
    ({"debug": "overflow"}, "'overflow' is not one of underflow_overflow"),
    ({"include_num_input_tokens_seen": "some"}, "include_num_input_tokens_seen='some' is not one of no, all"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a positive integer"),
    ({"parallelism_config": 3}, "parallelism_config=3 is neither"),
    ({"parallelism_config": {"tp": 2}}, "parallelism_config: unknown key 'tp'"),
    ({"parallelism_config": {"tp_size": "two"}}, "parallelism_config: tp_size='two' must be a positive integer"),
    (
        {"parallelism_config": {"tp_size": 2}, "tensor_parallel_size": 4},
        "tensor_parallel_size=4 and parallelism_config.tp_size=2 contradict each other",
    ),
    (
        {"activation_checkpointing": True, "gradient_checkpointing": False},
        "gradient_checkpointing=False and activation_checkpointing=True are two names of one argument",
    ),
    ({"local_rank": 3}, "local_rank=3, but the environment"),
    ({"learning_rte": 1e-3}, "learning_rte is not an argument of TrainingArguments. Did you mean 'learning_rate'"),
    ({"evaluation_strategy": "steps", "eval_strategy": "epoch"}, "evaluation_strategy.*eval_strategy"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_each_wrong_value_gives_one_message(changes: dict[str, Any], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.raises(ConfigError, match=message) as error:
            TrainingArguments("out", **changes)
    assert len(error.value.problems) == 1


def test_all_wrong_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments("out", seed=-1, optim="x", learning_rate=-1, zero_stage=9)
    assert len(error.value.problems) == 4


NUMBERS = (math.inf, -math.inf, math.nan, 10**400, 2**63, 1e300, "5", "\u00b2", "9" * 5000, "1e999", "", True, -1, 0.5)
NESTED = '{"x":' + "[" * 100_000


@pytest.mark.parametrize("name", sorted(field.name for field in dataclasses.fields(TrainingArguments)))
@pytest.mark.cases("logging_steps", "max_steps", "seed", "save_total_limit", "lr_scheduler_kwargs", rest="extended")
def test_any_number_and_any_text_of_an_argument_is_taken_or_is_one_short_error(name: str) -> None:
    for value in (*NUMBERS, NESTED):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                TrainingArguments("out", **({} if name == "output_dir" else {name: value}))
        except ConfigError as error:
            assert len(str(error)) < 9000 and name.split("_")[0] in str(error)


def test_texts_of_numbers_are_numbers() -> None:
    assert TrainingArguments("out", include_for_metrics="loss").include_for_metrics == ["loss"]  # type: ignore[arg-type]
    args = TrainingArguments("out", save_steps="1e3", eval_steps="5", warmup_steps="0.1", num_train_epochs="2")  # type: ignore[arg-type]
    assert (args.save_steps, args.eval_steps, args.warmup_steps, args.num_train_epochs) == (1000, 5, 0.1, 2)


def test_secrets_are_not_shown_in_errors() -> None:
    for value in (["hf_verysecret"], 12345):  # no text
        with pytest.raises(ConfigError) as error:
            TrainingArguments("out", hub_token=value)  # type: ignore[arg-type]
        assert str(value) not in str(error.value) and "<HUB_TOKEN>" in str(error.value)


def test_derived_values() -> None:
    args = TrainingArguments("~/runs", eval_strategy="steps", logging_steps=7, warmup_steps=0.1, learning_rate="1e-3")  # type: ignore[arg-type]
    assert not str(args.output_dir).startswith("~")
    assert args.eval_steps == 7 and args.do_eval
    assert args.get_warmup_steps(95) == 10
    assert TrainingArguments("out", warmup_steps=5).get_warmup_steps(95) == 5
    assert args.learning_rate == 1e-3
    assert json.loads(args.to_json_string())["lr_scheduler_type"] == "linear"
    assert TrainingArguments("o", optim_args="a=1, b=True,c=x").optimizer_arguments() == {"a": 1, "b": True, "c": "x"}
    assert TrainingArguments().output_dir == "trainer_output"
    assert TrainingArguments(Path("a") / "b").output_dir == "a/b"  # type: ignore[arg-type]
    assert TrainingArguments("o", label_names="y").label_names == ["y"]  # type: ignore[arg-type]
    assert TrainingArguments("o", gradient_checkpointing=True).activation_checkpointing is True
    assert TrainingArguments("o", report_to="none").report_to == []
    assert TrainingArguments("o", use_cpu=True).dataloader_pin_memory is False


def test_parallelism_config_of_accelerate_is_understood() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    args = TrainingArguments("o", parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))
    assert (args.tensor_parallel_size, args.context_parallel_size, args.sequence_parallel_size) == (2, 1, 1)
    assert TrainingArguments("o", parallelism_config={"cp_size": 4}).context_parallel_size == 4


# -- where values come from --------------------------------------------------------------------------------------


def test_given_values_are_distinguished_from_defaults() -> None:
    args = TrainingArguments("out", learning_rate=5e-5)
    assert args.given("learning_rate") and args.where("learning_rate") == "argument"
    assert not args.given("weight_decay") and args.where("weight_decay") == "default"
    args.set_optimizer(name="sgd", learning_rate=5e-5)
    assert args.given("optim") and not args.given("adam_beta1")


def test_old_names_are_accepted_and_count_as_given() -> None:
    with pytest.warns(FutureWarning, match="eval_strategy"):
        args = TrainingArguments("out", evaluation_strategy="epoch")  # type: ignore[call-arg]
    assert args.eval_strategy == "epoch" and args.given("eval_strategy")


def test_copies_keep_everything() -> None:
    args = TrainingArguments("out", learning_rate=1e-3, bf16=True)
    for twin in (copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args, seed=1)):
        assert twin.learning_rate == 1e-3 and twin.bf16 and twin.given("learning_rate")


@dataclass(repr=False)
class Own(TrainingArguments):
    """A user's subclass that redefines the batch size and adds a field."""

    learning_rate: float = 0.5
    beta: float = 0.1

    @property
    def place_model_on_device(self) -> bool:
        return True


def test_subclasses_of_users() -> None:
    args = Own("out", beta=0.2)
    assert (args.learning_rate, args.beta, args.place_model_on_device) == (0.5, 0.2, True)
    with pytest.raises(ConfigError, match="Did you mean 'beta'"):
        Own("out", betta=0.2)  # type: ignore[call-arg]


def test_a_failed_change_changes_nothing() -> None:
    args = TrainingArguments("out")
    before = args.to_dict()
    with pytest.raises(ConfigError, match="per_device_train_batch_size=0"):
        args.set_training(batch_size=0, learning_rate=1.0)
    assert args.to_dict() == before
