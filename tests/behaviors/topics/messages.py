"""Warnings and log messages that a user notices: whether there is one that names the matter."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from tests.behaviors.api import Api
from tests.support.models import Regression, regression_rows, tiny_llama

_SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def _train(api: Api, changes: Any = None, resume: Any = None, **given: Any) -> Any:
    trainer = api.plain_trainer(changes, **given)
    with api.messages() as messages:
        trainer.train(resume_from_checkpoint=resume)
    return messages


def a_callback_added_twice(api: Api) -> Any:
    trainer = api.plain_trainer()
    with api.messages() as messages:
        trainer.add_callback(api.DefaultFlowCallback)
    return messages.warned("DefaultFlowCallback")


def a_stateful_callback_that_the_checkpoint_lacks(api: Api) -> Any:
    class Counter(api.TrainerCallback, api.ExportableState):  # type: ignore[misc, name-defined]
        def state(self) -> Any:
            return {"args": {}, "attributes": {}}

    changes = {**_SAVING, "restore_callback_states_from_checkpoint": True}
    api.plain_trainer(changes, callbacks=[Counter()]).train()
    return _train(api, changes, str(api.directory / "checkpoint-2")).warned("Counter")


def other_arguments_than_the_checkpoint(api: Api) -> Any:
    api.plain_trainer(_SAVING).train()
    changes = {**_SAVING, "logging_steps": 2, "save_steps": 1}
    messages = _train(api, changes, str(api.directory / "checkpoint-2"))
    return [messages.warned("logging_steps"), messages.warned("save_steps")]


def another_batch_size_than_the_checkpoint(api: Api) -> Any:
    api.plain_trainer(_SAVING).train()
    changes = {**_SAVING, "per_device_train_batch_size": 2}
    return _train(api, changes, str(api.directory / "checkpoint-2")).warned("per_device_train_batch_size")


def equal_arguments_are_silent(api: Api) -> Any:
    api.plain_trainer(_SAVING).train()
    messages = _train(api, _SAVING, str(api.directory / "checkpoint-2"))
    return messages.warned("logging_steps") or messages.warned("save_steps")


def label_smoothing_with_several_labels(api: Api) -> Any:
    model = tiny_llama()
    model.config.problem_type = "multi_label_classification"
    with api.messages() as messages:
        trainer = api.text_trainer({"label_smoothing_factor": 0.1}, model=model)
    return [messages.warned("label", "smoothing"), trainer.label_smoother]


def early_stopping_without_the_best_model(api: Api) -> Any:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer = api.evaluated_trainer(changes, callbacks=[api.EarlyStoppingCallback()])
    with api.messages() as messages:
        trainer.train()
    return messages.warned("load_best_model_at_end")


def early_stopping_without_its_metric(api: Api) -> Any:
    callback = api.EarlyStoppingCallback()
    args = api.arguments(eval_strategy="steps", metric_for_best_model="accuracy")
    with api.messages() as messages:
        callback.on_evaluate(args, api.TrainerState(), api.TrainerControl(), metrics={"eval_loss": 1.0})
    return messages.warned("early stopping", "eval_accuracy")


def deprecated_gradient_checkpointing(api: Api) -> Any:
    with api.messages() as messages:
        api.arguments(gradient_checkpointing=True)
    return messages.warned("FutureWarning", "activation_checkpointing")


def ignored_columns(api: Api) -> Any:
    rows = [{**row, "unwanted": 1.0} for row in regression_rows(16)]
    return _train(api, {"max_steps": 1}, train_dataset=rows).said("unwanted")


def ignored_columns_of_a_datasets_dataset(api: Api) -> Any:
    import datasets

    data = datasets.Dataset.from_dict({"x": [[1.0] * 6] * 8, "labels": [1.0] * 8, "unwanted": ["a"] * 8})
    return _train(api, {"max_steps": 1}, train_dataset=data).said("unwanted")


def the_best_checkpoint_is_gone(api: Api) -> Any:
    import shutil

    values = iter([0.9, 0.2, 0.3, 0.1, 0.1])
    compute = lambda prediction: {"accuracy": next(values)}  # noqa: E731
    changes = {**_SAVING, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "accuracy"}
    api.evaluated_trainer({**changes, "load_best_model_at_end": True}, compute_metrics=compute).train()
    shutil.rmtree(api.directory / "checkpoint-2")
    trainer = api.evaluated_trainer({**changes, "max_steps": 6}, compute_metrics=compute)
    with api.messages() as messages:
        trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-4"))
    return [messages.warned("checkpoint-2"), trainer.state.best_metric]


def sampling_strategy_of_a_stream(api: Api) -> Any:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from regression_rows(8)

    with api.messages() as messages:
        trainer = api.plain_trainer(
            {"train_sampling_strategy": "group_by_length", "max_steps": 1}, train_dataset=Stream()
        )
        trainer.train()
    return messages.said("group_by_length")


def empty_stream(api: Api) -> Any:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield from ()

    from tests.behaviors.api import raised

    return raised(api.plain_trainer({"max_steps": 1}, train_dataset=Stream()).train)


def tokens_cannot_be_counted(api: Api) -> Any:
    return _train(api, {"include_num_input_tokens_seen": "all", "max_steps": 1}).warned("main_input_name")


def no_labels_for_a_loss_function(api: Api) -> Any:
    class Own(Regression):
        def forward(self, x: Any) -> Any:
            return {"prediction": self.layers(x).squeeze(-1)}

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs["prediction"].pow(2).mean()

    rows = [{"x": row["x"]} for row in regression_rows(16)]
    return _train(api, {"max_steps": 1}, model=Own(), train_dataset=rows, compute_loss_func=loss).warned("labels")


def non_blocking_without_pinned_memory(api: Api) -> Any:
    with api.messages() as messages:
        api.plain_trainer({"accelerator_config": {"non_blocking": True}, "dataloader_pin_memory": False})
    return messages.warned("non_blocking", "dataloader_pin_memory")


def no_arguments(api: Api) -> Any:
    import os

    before = os.getcwd()
    os.chdir(api.directory)
    try:
        with api.messages() as messages:
            trainer = api.Trainer(model=Regression())
        return [trainer.args.output_dir, messages.said("tmp_trainer")]
    finally:
        os.chdir(before)


def no_output_directory(api: Api) -> Any:
    with api.messages() as messages:
        api.TrainingArguments(use_cpu=True)
    return messages.said("trainer_output")


def max_steps_and_epochs(api: Api) -> Any:
    with api.messages() as messages:
        api.plain_trainer({"max_steps": 3, "num_train_epochs": 2})
    return messages.said("max_steps", "num_train_epochs")


def checkpoint_of_another_version(api: Api) -> Any:
    trainer = api.text_trainer(_SAVING)
    trainer.train()
    path = api.directory / "checkpoint-2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "transformers_version": "4.0.0"}))
    again = api.text_trainer(_SAVING)
    with api.messages() as messages:
        again.train(resume_from_checkpoint=str(path.parent))
    return messages.warned("4.0.0")


def special_tokens_are_aligned(api: Api) -> Any:
    from tests.behaviors.topics.files import _tokenizer

    tokenizer = _tokenizer()
    tokenizer.eos_token = "a"
    trainer = api.text_trainer({"max_steps": 1}, processing_class=tokenizer)
    with api.messages() as messages:
        trainer.train()
    return [messages.warned("eos_token_id"), trainer.model.config.eos_token_id]


def a_plain_run_has_no_warning(api: Api) -> Any:
    return [message.text for message in _train(api) if message.level == "WARNING"]


def level_of_the_library_loggers(api: Api) -> Any:
    name = "ds_trainer" if api.is_ours else "transformers"
    before = logging.getLogger(name).level
    try:
        api.plain_trainer({"log_level": "error"})
        return logging.getLogger(name).getEffectiveLevel()
    finally:
        logging.getLogger(name).setLevel(before)


def search_sets_an_unknown_argument(api: Api) -> Any:
    from tests.behaviors.api import raised

    trainer = api.evaluated_trainer({"max_steps": 1}, model_init=Regression)
    with api.messages() as messages:
        error = raised(
            trainer.hyperparameter_search, hp_space=lambda trial: {"nonsense": 1}, n_trials=1, backend="optuna"
        )
    return [messages.warned("nonsense"), error]
