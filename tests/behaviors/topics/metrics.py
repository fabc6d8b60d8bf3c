"""log_metrics, save_metrics, metrics_format, save_state."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from tests.behaviors.api import Api

_METRICS = {
    "train_runtime": 3725.25,
    "train_loss": 1.23456789,
    "total_flos": 3.0e12,
    "epoch": 2.0,
    "train_samples": 17,
    "train_mem_cpu_alloc_delta": 5 * 2**20 + 3,
}


def format_of_values(api: Api) -> Any:
    from transformers.trainer_pt_utils import metrics_format

    trainer = api.plain_trainer()
    return (trainer.metrics_format if api.is_ours else metrics_format)(dict(_METRICS))


def printed_table(api: Api) -> Any:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        api.plain_trainer().log_metrics("train", dict(_METRICS))
    return text.getvalue()


def saved_file(api: Api) -> Any:
    api.plain_trainer().save_metrics("train", dict(_METRICS))
    return [api.files(), json.loads((api.directory / "train_results.json").read_text())]


def text_of_the_saved_file(api: Api) -> Any:
    api.plain_trainer().save_metrics("eval", {"b": 1.0, "a": 2})
    return (api.directory / "eval_results.json").read_text()


def combined_file(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.save_metrics("train", {"train_loss": 1.0, "epoch": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 2.0, "epoch": 2.0})
    return json.loads((api.directory / "all_results.json").read_text())


def not_combined(api: Api) -> Any:
    api.plain_trainer().save_metrics("train", {"train_loss": 1.0}, combined=False)
    return api.files()


def metrics_of_a_run_can_be_saved(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    trainer.save_metrics("train", trainer.train().metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    found = json.loads((api.directory / "all_results.json").read_text())
    return [found["train_loss"], found["eval_loss"], found["epoch"]]


def save_state_writes_a_file(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    trainer.save_state()
    values = json.loads((api.directory / "trainer_state.json").read_text())
    return [values["global_step"], values["epoch"], values["max_steps"], len(values["log_history"])]


def memory_metrics_are_off(api: Api) -> Any:
    found = api.evaluated_trainer().evaluate()
    return [key for key in found if "_mem_" in key]


def memory_metrics_of_an_evaluation(api: Api) -> Any:
    return {key for key in api.evaluated_trainer({"skip_memory_metrics": False}).evaluate() if "mem" in key}


def memory_metrics_of_a_training(api: Api) -> Any:
    found = api.plain_trainer({"skip_memory_metrics": False}).train().metrics
    return {key for key in found if "mem" in key}


def memory_metrics_of_a_prediction(api: Api) -> Any:
    trainer = api.evaluated_trainer({"skip_memory_metrics": False})
    return {key for key in trainer.predict(trainer.eval_dataset).metrics if "mem" in key}


def memory_metrics_are_whole_bytes(api: Api) -> Any:
    found = api.plain_trainer({"skip_memory_metrics": False}).train().metrics
    return sorted({type(value).__name__ for key, value in found.items() if "mem" in key})
