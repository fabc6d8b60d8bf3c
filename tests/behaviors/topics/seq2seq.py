"""Seq2SeqTrainer and its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.behaviors.api import Api
from tests.support.saved_models import _model


def _rows(samples: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (samples, 6), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones(6, dtype=torch.long), "labels": row[:4]} for row in tokens]


def _trainer(api: Api, changes: Any = None, **given: Any) -> Any:
    values = {
        "output_dir": str(api.directory),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "generation_max_length": 5,
    }
    torch.manual_seed(0)
    args = api.Seq2SeqTrainingArguments(**{**values, **(changes or {})})
    given = {"train_dataset": _rows(8), "eval_dataset": _rows(6), **given}
    return api.Seq2SeqTrainer(model=_model("t5"), args=args, **given)


def losses(api: Api) -> Any:
    trainer = _trainer(api)
    trainer.train()
    return [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.evaluate()["eval_loss"]]


def generated_predictions(api: Api) -> Any:
    output = _trainer(api, {"predict_with_generate": True}).predict(_rows(6))
    return [output.predictions.shape, output.predictions, output.metrics["test_loss"]]


def metrics_of_generated_tokens(api: Api) -> Any:
    def metrics(prediction: Any) -> Any:
        tokens = np.where(prediction.predictions != -100, prediction.predictions, 0)
        return {"length": float(np.mean([np.count_nonzero(row) for row in tokens]))}

    found = _trainer(api, {"predict_with_generate": True}, compute_metrics=metrics).evaluate()
    return [found["eval_length"], found["eval_loss"]]


def generation_arguments_of_evaluate(api: Api) -> Any:
    shapes: list[Any] = []

    def metrics(prediction: Any) -> Any:
        shapes.append(prediction.predictions.shape)
        return {}

    trainer = _trainer(api, {"predict_with_generate": True}, compute_metrics=metrics)
    trainer.evaluate(max_length=7, num_beams=2)
    trainer.evaluate(max_new_tokens=3)
    return shapes


def generation_arguments_of_predict(api: Api) -> Any:
    trainer = _trainer(api, {"predict_with_generate": True})
    return trainer.predict(_rows(4), max_length=8, num_beams=1).predictions.shape


def without_generation(api: Api) -> Any:
    output = _trainer(api).predict(_rows(4))
    return [type(output.predictions).__name__, np.shape(output.predictions[0])]


def generation_config_in_the_arguments(api: Api) -> Any:
    from transformers import GenerationConfig

    config = GenerationConfig(max_length=6, num_beams=1, decoder_start_token_id=0, pad_token_id=0)
    trainer = _trainer(api, {"predict_with_generate": True, "generation_config": config, "generation_max_length": None})
    return [trainer.predict(_rows(4)).predictions.shape, trainer.model.generation_config.max_length]


def generation_config_as_plain_data(api: Api) -> Any:
    from transformers import GenerationConfig

    args = api.Seq2SeqTrainingArguments("runs", use_cpu=True, generation_config=GenerationConfig(max_length=6))
    return type(args.to_dict()["generation_config"]).__name__


def step_with_generation_arguments(api: Api) -> Any:
    """As LLaMA-Factory's trainer calls it."""

    class Mine(api.Seq2SeqTrainer):  # type: ignore[misc, name-defined]
        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
        ) -> Any:
            labels = inputs.pop("labels", None)
            loss, tokens, _ = super().prediction_step(
                model, inputs, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs
            )
            return loss, tokens, labels

    trainer = _trainer(api, {"predict_with_generate": True})
    mine = Mine(model=trainer.model, args=trainer.args, train_dataset=_rows(8), eval_dataset=_rows(4))
    output = mine.predict(_rows(4))
    return [output.predictions, output.label_ids, "test_loss" in output.metrics]
