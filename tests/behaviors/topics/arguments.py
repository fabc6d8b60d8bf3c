"""Values of TrainingArguments: defaults, what follows from others, properties."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from typing import Any

import torch

from tests.behaviors.api import Api, raised


def _fields_of_the_reference() -> list[str]:
    import transformers

    return [item.name for item in dataclasses.fields(transformers.TrainingArguments)]


def default_of_every_field(api: Api) -> Any:
    values = api.TrainingArguments("runs").to_dict()
    return {name: values[name] for name in _fields_of_the_reference() if name != "accelerator_config"}


def default_of_every_seq2seq_field(api: Api) -> Any:
    values = api.Seq2SeqTrainingArguments("runs").to_dict()
    names = ("sortish_sampler", "predict_with_generate", "generation_max_length", "generation_num_beams")
    return {name: values[name] for name in (*names, "generation_config")}


def type_of_every_default(api: Api) -> Any:
    args = api.TrainingArguments("runs", use_cpu=True)
    return {name: type(getattr(args, name)).__name__ for name in _fields_of_the_reference()}


def output_dir_has_a_default(api: Api) -> Any:
    return api.TrainingArguments(use_cpu=True).output_dir


def output_dir_is_expanded(api: Api) -> Any:
    return api.TrainingArguments("~/runs", use_cpu=True).output_dir == os.path.expanduser("~/runs")


def output_dir_is_not_created_by_the_arguments(api: Api) -> Any:
    api.TrainingArguments(str(api.directory / "new"), use_cpu=True)
    return api.files()


def output_dir_is_created_by_the_trainer(api: Api) -> Any:
    api.plain_trainer({"output_dir": str(api.directory / "new")})
    return api.files()


def strategies_become_enums(api: Api) -> Any:
    args = api.arguments(eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch")
    values = (args.eval_strategy, args.save_strategy, args.logging_strategy, args.hub_strategy)
    return [(type(value).__name__, value.value) for value in values]


def strategies_compare_with_strings(api: Api) -> Any:
    args = api.arguments(eval_strategy="steps")
    return [args.eval_strategy == "steps", args.eval_strategy != "no", args.save_strategy == "no"]


def strategies_compare_with_enum_members(api: Api) -> Any:
    args = api.arguments(eval_strategy="steps")
    return [args.eval_strategy == api.IntervalStrategy.STEPS, args.save_strategy == api.SaveStrategy.NO]


def enum_members_are_accepted(api: Api) -> Any:
    args = api.arguments(
        eval_strategy=api.IntervalStrategy.EPOCH,
        save_strategy=api.SaveStrategy.EPOCH,
        lr_scheduler_type=api.SchedulerType.COSINE,
        optim=api.OptimizerNames.ADAMW_TORCH,
    )
    return [args.eval_strategy, args.save_strategy, args.lr_scheduler_type, args.optim]


def strategies_as_text(api: Api) -> Any:
    args = api.arguments(eval_strategy="steps", lr_scheduler_type="cosine")
    return [str(args.eval_strategy), f"{args.lr_scheduler_type}", str(args.optim)]


def eval_steps_follow_logging_steps(api: Api) -> Any:
    return api.arguments(eval_strategy="steps", logging_steps=7).eval_steps


def eval_steps_are_unset_without_evaluation(api: Api) -> Any:
    return api.arguments(logging_steps=7).eval_steps


def do_eval_follows_eval_strategy(api: Api) -> Any:
    return [api.arguments().do_eval, api.arguments(eval_strategy="epoch").do_eval]


def steps_become_whole_numbers(api: Api) -> Any:
    args = api.arguments(
        logging_steps=10.0, save_strategy="steps", save_steps=20.0, eval_strategy="steps", eval_steps=5.0
    )
    return [args.logging_steps, args.save_steps, args.eval_steps]


def steps_below_one_stay_fractions(api: Api) -> Any:
    args = api.arguments(logging_steps=0.1, save_strategy="steps", save_steps=0.5)
    return [args.logging_steps, args.save_steps]


def metric_of_the_best_model_is_the_loss(api: Api) -> Any:
    args = api.arguments(load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", save_steps=1)
    return [args.metric_for_best_model, args.greater_is_better]


def greater_is_better_follows_the_name(api: Api) -> Any:
    names = ("loss", "eval_loss", "accuracy", "eval_f1", "eval_data_loss", "perplexity")
    return [api.arguments(metric_for_best_model=name).greater_is_better for name in names]


def greater_is_better_can_be_given(api: Api) -> Any:
    return api.arguments(metric_for_best_model="perplexity", greater_is_better=False).greater_is_better


def metric_for_reduce_on_plateau_is_the_loss(api: Api) -> Any:
    args = api.arguments(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps")
    return [args.metric_for_best_model, args.greater_is_better]


def report_to_becomes_a_list(api: Api) -> Any:
    values: list[Any] = ["none", ["none"], "tensorboard", ["tensorboard"], []]
    return [api.arguments(report_to=value).report_to for value in values]


def debug_becomes_a_list(api: Api) -> Any:
    return [api.arguments(debug="").debug, api.arguments(debug="underflow_overflow").debug]


def input_tokens_setting_becomes_text(api: Api) -> Any:
    values: list[Any] = [True, False, "all", "non_padding", "no"]
    return [api.arguments(include_num_input_tokens_seen=value).include_num_input_tokens_seen for value in values]


def batch_sizes_of_a_process(api: Api) -> Any:
    args = api.arguments(per_device_train_batch_size=3, per_device_eval_batch_size=5)
    return [args.train_batch_size, args.eval_batch_size]


def properties_of_one_process(api: Api) -> Any:
    args = api.arguments()
    return {
        "world_size": args.world_size,
        "n_gpu": args.n_gpu,
        "process_index": args.process_index,
        "local_process_index": args.local_process_index,
        "should_save": args.should_save,
        "should_log": args.should_log,
        "device": str(args.device),
        "device type": args.device.type,
        "timeout": args.ddp_timeout_delta.total_seconds(),
    }


def parallel_mode_can_be_compared(api: Api) -> Any:
    args = api.arguments()
    return [args.parallel_mode.value, args.parallel_mode == api.ParallelMode.DISTRIBUTED]


def local_rank_is_known(api: Api) -> Any:
    return getattr(api.arguments(), "local_rank", "missing")


def log_level_of_the_process(api: Api) -> Any:
    levels = ("debug", "info", "warning", "error", "critical")
    return [api.arguments(log_level=level).get_process_log_level() for level in levels]


def passive_log_level(api: Api) -> Any:
    return api.arguments().get_process_log_level()


def warmup_steps_of_a_run(api: Api) -> Any:
    values = (0, 1, 10, 0.1, 0.25, 0.999)
    return [api.arguments(warmup_steps=value).get_warmup_steps(37) for value in values]


def warmup_ratio_is_accepted(api: Api) -> Any:
    return raised(api.arguments, warmup_ratio=0.1)


def main_process_first_runs_the_block(api: Api) -> Any:
    ran = []
    args = api.arguments()
    with args.main_process_first(desc="dataset map pre-processing"):
        ran.append("outer")
        with args.main_process_first(local=False):
            ran.append("inner")
    return ran


def main_process_first_passes_errors_on(api: Api) -> Any:
    def body() -> None:
        with api.arguments().main_process_first():
            raise KeyError("in the block")

    return raised(body)


def pinned_memory_is_off_on_the_cpu(api: Api) -> Any:
    return api.arguments(dataloader_pin_memory=True).dataloader_pin_memory


def torch_compile_follows_its_backend(api: Api) -> Any:
    args = api.arguments(torch_compile_backend="eager")
    default = api.arguments(torch_compile=True)
    return [args.torch_compile, default.torch_compile_backend]


def json_text_becomes_a_mapping(api: Api) -> Any:
    args = api.arguments(
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs='{"min_lr": 0.001, "x": "true"}',
        activation_checkpointing_kwargs='{"use_reentrant": false}',
    )
    return [args.lr_scheduler_kwargs, args.activation_checkpointing_kwargs]


def old_name_of_activation_checkpointing(api: Api) -> Any:
    with api.messages() as messages:
        args = api.arguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    mirrored = [args.activation_checkpointing, args.activation_checkpointing_kwargs]
    return [args.gradient_checkpointing, args.gradient_checkpointing_kwargs, *mirrored, messages.warned("deprecated")]


def new_name_of_activation_checkpointing(api: Api) -> Any:
    args = api.arguments(activation_checkpointing=True)
    return [args.activation_checkpointing, args.gradient_checkpointing, api.arguments().gradient_checkpointing]


def mixed_precision_of_the_arguments(api: Api) -> Any:
    return [api.arguments().mixed_precision, api.arguments(bf16=True).mixed_precision]


def attributes_may_be_assigned(api: Api) -> Any:
    args = api.arguments()
    args.learning_rate, args.run_name, args.my_own = 0.5, "mine", [1]
    return [args.learning_rate, args.run_name, args.my_own]


def subclass_with_fields_of_its_own(api: Api) -> Any:
    @dataclasses.dataclass
    class Mine(api.TrainingArguments):  # type: ignore[misc, name-defined]
        model_max_length: int = dataclasses.field(default=512, metadata={"help": "Maximum length."})
        optim: str = dataclasses.field(default="adamw_torch")
        freeze_backbone: bool = False

    args = Mine(str(api.directory), freeze_backbone=True, use_cpu=True)
    values = args.to_dict()
    return [args.model_max_length, args.optim, values["freeze_backbone"], values["optim"], type(args).__name__]


def subclass_with_post_init(api: Api) -> Any:
    @dataclasses.dataclass
    class Mine(api.TrainingArguments):  # type: ignore[misc, name-defined]
        scale: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            self.learning_rate = self.learning_rate * self.scale
            self.remove_unused_columns = False

    args = Mine(str(api.directory), learning_rate=0.1, scale=0.5, use_cpu=True)
    return [args.learning_rate, args.remove_unused_columns]


def subclass_that_changes_the_output_dir_default(api: Api) -> Any:
    @dataclasses.dataclass
    class Mine(api.TrainingArguments):  # type: ignore[misc, name-defined]
        output_dir: str = dataclasses.field(default="./output", metadata={"help": "Where to write."})
        report_to: str = dataclasses.field(default="none")

    args = Mine(use_cpu=True)
    return [args.output_dir, args.report_to]


def replace_makes_a_changed_copy(api: Api) -> Any:
    args = api.arguments(learning_rate=0.1)
    other = dataclasses.replace(args, learning_rate=0.2, eval_strategy="epoch")
    return [args.learning_rate, other.learning_rate, other.do_eval, args.do_eval]


def copies_are_independent(api: Api) -> Any:
    args = api.arguments(lr_scheduler_kwargs={"a": [1]})
    deep, shallow = copy.deepcopy(args), copy.copy(args)
    deep.lr_scheduler_kwargs["a"].append(2)
    shallow.learning_rate = 9.0
    return [args.lr_scheduler_kwargs, deep.lr_scheduler_kwargs, args.learning_rate == shallow.learning_rate]


def equal_arguments_compare_equal(api: Api) -> Any:
    return [api.arguments() == api.arguments(), api.arguments() == api.arguments(seed=1)]


def pickle_round_trip(api: Api) -> Any:
    args = pickle.loads(pickle.dumps(api.arguments(eval_strategy="epoch", learning_rate=0.3)))
    return [args.learning_rate, args.eval_strategy, args.device.type]


def torch_save_round_trip(api: Api) -> Any:
    torch.save(api.arguments(seed=3), api.directory / "training_args.bin")
    args = torch.load(api.directory / "training_args.bin", weights_only=False)
    return [args.seed, type(args).__name__]


def fields_are_those_of_a_dataclass(api: Api) -> Any:
    names = {item.name for item in dataclasses.fields(api.TrainingArguments)}
    return [set(_fields_of_the_reference()) <= names, dataclasses.is_dataclass(api.TrainingArguments)]


def every_field_has_help(api: Api) -> Any:
    wanted = set(_fields_of_the_reference())
    return [
        f.name for f in dataclasses.fields(api.TrainingArguments) if f.name in wanted and not f.metadata.get("help")
    ]


def vars_hold_every_field(api: Api) -> Any:
    held = vars(api.arguments())
    return [name for name in _fields_of_the_reference() if name not in held]


def positional_output_dir(api: Api) -> Any:
    return api.TrainingArguments("somewhere", use_cpu=True).output_dir
