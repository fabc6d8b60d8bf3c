"""Subclasses of the Trainer as public projects write them, and what they override and call."""

from __future__ import annotations

import math
import os
import time
from typing import Any, ClassVar

import torch
from torch import nn

from tests.behaviors.api import Api
from tests.behaviors.topics.evaluation import _accuracy
from tests.support.models import Regression, regression_rows, tiny_llama
from tests.support.saved_models import Labelled, _model


def _losses(trainer: Any) -> Any:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weighted_loss(api: Api) -> Any:
    """As classification examples with class weights."""

    class Weighted(api.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 3.0])
            loss = nn.CrossEntropyLoss(weight=weights)(outputs.logits.view(-1, 3), labels.view(-1))
            return (loss, outputs) if return_outputs else loss

    torch.manual_seed(0)
    given = {"train_dataset": Labelled(16), "eval_dataset": Labelled(8), "compute_metrics": _accuracy}
    trainer = api.trainer(model=_model("bert classifier"), base=lambda base: Weighted, **given)
    trainer.train()
    return [_losses(trainer), trainer.evaluate()["eval_loss"]]


def loss_without_the_item_count(api: Api) -> Any:
    """The signature of transformers 4."""

    class Old(api.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs[0], outputs) if return_outputs else outputs[0]

    from tests.behaviors.api import raised

    trainer = api.plain_trainer(base=lambda base: Old)
    return raised(trainer.train)


def loss_with_accumulation(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            return (outputs[0] * 2, outputs) if return_outputs else outputs[0] * 2

    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = api.plain_trainer(changes, base=lambda base: Mine)
    trainer.train()
    return _losses(trainer)


def distillation(api: Api) -> Any:
    """A teacher beside the student, as in distillation notebooks."""

    class Distilling(api.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, teacher: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = teacher
            self.teacher.eval()

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                wanted = self.teacher(**inputs)[1]
            loss = 0.5 * outputs[0] + 0.5 * nn.functional.mse_loss(outputs[1], wanted)
            return (loss, outputs) if return_outputs else loss

    trainer = api.plain_trainer(base=lambda base: Distilling, teacher=Regression(5))
    trainer.train()
    return _losses(trainer)


def extra_values_in_the_log(api: Api) -> Any:
    """Metrics collected in compute_loss and added in log, as preference trainers do."""

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        collected: ClassVar[list[float]] = []

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            self.collected.append(float(outputs[1].detach().mean()))
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: Any, start_time: Any = None) -> None:
            if "loss" in logs:
                logs["rewards/mean"] = sum(self.collected) / len(self.collected)
                self.collected.clear()
            return super().log(logs, start_time)

    trainer = api.plain_trainer({"logging_steps": 2}, base=lambda base: Mine)
    trainer.train()
    return [entry["rewards/mean"] for entry in trainer.state.log_history if "rewards/mean" in entry]


def metrics_logged_from_compute_loss(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            found = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
            if self.model.training:
                self.log({"inner": 1.0})
            return found

    trainer = api.plain_trainer({"max_steps": 2}, base=lambda base: Mine)
    trainer.train()
    return [[entry["step"], "inner" in entry] for entry in trainer.state.log_history]


def own_training_step(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs["x"] = inputs["x"] * 2
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return _losses(trainer)


def adversarial_training_step(api: Api) -> Any:
    """Two backward passes in a step."""

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            noisy = self.compute_loss(model, {**inputs, "x": inputs["x"] + 0.1})
            self.accelerator.backward(noisy)
            return (loss + noisy).detach()

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return _losses(trainer)


def own_prediction_step(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                loss, prediction = model(**inputs)
            return loss, prediction * 10, inputs["labels"]

    trainer = api.evaluated_trainer(base=lambda base: Mine)
    return [trainer.predict(trainer.eval_dataset).predictions, trainer.evaluate()["eval_loss"]]


def question_answering_evaluate(api: Api) -> Any:
    """evaluate() as in the examples for question answering."""

    class Answering(api.Trainer):  # type: ignore[misc, name-defined]
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            from transformers.trainer_utils import speed_metrics

            loader = self.get_eval_dataloader(eval_dataset)
            compute, self.compute_metrics = self.compute_metrics, None
            start = time.time()
            try:
                output = self.evaluation_loop(
                    loader,
                    description="Evaluation",
                    prediction_loss_only=True if compute is None else None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
            finally:
                self.compute_metrics = compute
            size = self.args.eval_batch_size * self.args.world_size
            steps = math.ceil(output.num_samples / size)
            output.metrics.update(
                speed_metrics(metric_key_prefix, start, num_samples=output.num_samples, num_steps=steps)
            )
            metrics = {f"{metric_key_prefix}_f1": float(output.predictions.mean()), **output.metrics}
            if self.args.should_log:
                self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    given = {"base": lambda base: Answering, "compute_metrics": lambda prediction: {}}
    changes = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "f1", "save_strategy": "best"}
    trainer = api.evaluated_trainer(changes, **given)
    trainer.train()
    found = [[e["step"], e["eval_f1"]] for e in trainer.state.log_history if "eval_f1" in e]
    return [found, trainer.state.best_metric, [name for name in api.files() if name.startswith("checkpoint")]]


def save_of_a_subclass(api: Api) -> Any:
    """As embedding trainers save."""

    class Embedding(api.Trainer):  # type: ignore[misc, name-defined]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            output_dir = output_dir if output_dir is not None else self.args.output_dir
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.model.state_dict(), os.path.join(output_dir, "mine.bin"))
            torch.save(self.args, os.path.join(output_dir, "training_args.bin"))

    trainer = api.plain_trainer({"save_strategy": "steps", "save_steps": 2}, base=lambda base: Embedding)
    trainer.train()
    trainer.save_model(str(api.directory / "last"))
    return [api.files("last"), "mine.bin" in api.files("checkpoint-2")]


def save_checkpoint_of_a_subclass(api: Api) -> Any:
    """As LLaVA's trainer adds files to a checkpoint."""

    class Adding(api.Trainer):  # type: ignore[misc, name-defined]
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            super()._save_checkpoint(model, trial)
            folder = f"checkpoint-{self.state.global_step}"
            path = os.path.join(self._get_output_dir(trial=trial), folder, "projector.bin")
            torch.save({"w": 1}, path)

    trainer = api.plain_trainer({"save_strategy": "steps", "save_steps": 2}, base=lambda base: Adding)
    trainer.train()
    return ["projector.bin" in api.files("checkpoint-2"), "projector.bin" in api.files("checkpoint-4")]


def save_model_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            with open(os.path.join(output_dir or self.args.output_dir, "extra.txt"), "w") as file:
                file.write("x")

    trainer = api.plain_trainer({"save_strategy": "steps", "save_steps": 2}, base=lambda base: Mine)
    trainer.train()
    trainer.save_model()
    return ["extra.txt" in api.files("checkpoint-2"), "extra.txt" in api.files()]


def adapter_callback(api: Api) -> Any:
    """As QLoRA's script saves adapters."""

    class SaveAdapter(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            kwargs["model"].save_pretrained(os.path.join(folder, "adapter_model"))
            return control

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            open(os.path.join(args.output_dir, "completed"), "a").close()

    trainer = api.text_trainer({"save_strategy": "steps", "save_steps": 2}, callbacks=[SaveAdapter])
    trainer.train()
    return [api.files("checkpoint-2/adapter_model"), "completed" in api.files()]


def lora_adapters(api: Api) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    from tests.parity.library import FullTokens

    trainer = api.text_trainer({"save_strategy": "steps", "save_steps": 2}, model=model, train_dataset=FullTokens(16))
    trainer.train()
    trainer.save_model(str(api.directory / "last"))
    names = {"adapter_config.json", "adapter_model.safetensors", "model.safetensors"}
    return [_losses(trainer), sorted(names & set(api.files("last"))), sorted(names & set(api.files("checkpoint-2")))]


def watchdog_callback(api: Api) -> Any:
    """As axolotl's watchdog stops on high losses."""

    class Watchdog(api.TrainerCallback):  # type: ignore[misc, name-defined]
        violations = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.log_history and "loss" in state.log_history[-1] and state.log_history[-1]["loss"] > 0:
                self.violations += 1
                control.should_training_stop = control.should_training_stop or self.violations >= 2
            return control

    trainer = api.plain_trainer({"max_steps": 8}, callbacks=[Watchdog])
    return trainer.train().global_step


def progress_file_callback(api: Api) -> Any:
    """As LLaMA-Factory writes its log."""
    import json

    class LogFile(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            last = state.log_history[-1]
            line = {"current_steps": state.global_step, "total_steps": state.max_steps, "loss": last.get("loss")}
            with open(os.path.join(args.output_dir, "trainer_log.jsonl"), "a") as file:
                file.write(json.dumps({**line, "lr": last.get("learning_rate"), "epoch": last.get("epoch")}) + "\n")

    api.plain_trainer(callbacks=[LogFile]).train()
    return [json.loads(line) for line in (api.directory / "trainer_log.jsonl").read_text().splitlines()]


def perplexity_callback(api: Api) -> Any:
    """A callback that evaluates with the Trainer, as course notebooks do."""
    trainer: Any = None
    found: list[float] = []

    class Evaluate(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.append(trainer.evaluate(regression_rows(4, seed=3), metric_key_prefix="train")["train_loss"])

    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 2}, callbacks=[Evaluate])
    trainer.train()
    return [found, _losses(trainer)]


def reading_callback(api: Api) -> Any:
    """A callback that reads the length of the loader and the learning rate from its keywords."""
    seen: list[Any] = []

    class Reading(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([len(kwargs["train_dataloader"]), kwargs["lr_scheduler"].get_last_lr()[0]])

    api.plain_trainer({"max_steps": 2}, callbacks=[Reading]).train()
    return seen


def custom_sampler_with_lengths(api: Api) -> Any:
    """The sampler that LLaVA's trainer returns, of its own class."""

    class ByLength(torch.utils.data.Sampler):  # type: ignore[type-arg]
        def __init__(self, batch_size: int, lengths: list[int]) -> None:
            self.batch_size, self.lengths = batch_size, lengths

        def __len__(self) -> int:
            return len(self.lengths)

        def __iter__(self) -> Any:
            return iter(sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index]))

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return ByLength(self.args.train_batch_size, [index % 5 for index in range(len(self.train_dataset))])

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return _losses(trainer)


def constructor_with_more_arguments(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, extra: int = 0, **kwargs: Any) -> None:
            self.extra = extra
            self._signature_columns = None
            super().__init__(*args, **kwargs)

    return api.plain_trainer(base=lambda base: Mine, extra=3).extra


def abstract_subclass(api: Api) -> Any:
    from abc import ABC, abstractmethod

    class Abstract(ABC, api.Trainer):  # type: ignore[misc, name-defined]
        @abstractmethod
        def name(self) -> str: ...

    class Mine(Abstract):
        def name(self) -> str:
            return "mine"

    return api.plain_trainer(base=lambda base: Mine).name()


def mixin_before_the_trainer(api: Api) -> Any:
    class Mixin:
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.seen_steps = num_training_steps
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    trainer = api.plain_trainer(base=lambda base: type("Mine", (Mixin, api.Trainer), {}))
    trainer.train()
    return trainer.seen_steps


def signature_columns_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["x", "labels", "mine"]

    rows = [{**row, "mine": 1.0, "other": 2.0} for row in regression_rows(8)]
    trainer = api.plain_trainer(base=lambda base: Mine, train_dataset=rows)
    return sorted(next(iter(trainer.get_train_dataloader())))
