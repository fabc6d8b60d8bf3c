"""How losses are computed: label smoothing, compute_loss_func, item counts, accumulation, NEFTune."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.behaviors.api import Api
from tests.parity.library import FullTokens
from tests.support.models import RaggedTokens, Regression, regression_rows


def _losses(trainer: Any) -> Any:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def language_model(api: Api) -> Any:
    trainer = api.text_trainer()
    trainer.train()
    return _losses(trainer)


def language_model_with_accumulation(api: Api) -> Any:
    trainer = api.text_trainer({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2})
    trainer.train()
    return _losses(trainer)


def label_smoothing(api: Api) -> Any:
    trainer = api.text_trainer({"label_smoothing_factor": 0.1}, train_dataset=FullTokens(20))
    trainer.train()
    return _losses(trainer)


def label_smoothing_of_ragged_tokens(api: Api) -> Any:
    trainer = api.text_trainer({"label_smoothing_factor": 0.1}, train_dataset=RaggedTokens(20))
    trainer.train()
    return _losses(trainer)


def compute_loss_func(api: Api) -> Any:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        flat = nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return flat / num_items_in_batch

    trainer = api.text_trainer(compute_loss_func=loss)
    trainer.train()
    return _losses(trainer)


def arguments_of_compute_loss_func(api: Api) -> Any:
    seen: list[Any] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append([list(labels.shape), int(num_items_in_batch), sorted(outputs)])
        return (outputs["prediction"] - labels).pow(2).sum() / num_items_in_batch

    class Own(Regression):
        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"prediction": self.layers(x).squeeze(-1)}

    trainer = api.plain_trainer({"max_steps": 2}, model=Own(), compute_loss_func=loss)
    trainer.train()
    return [seen, _losses(trainer)]


def item_count_of_compute_loss(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            seen.append(None if num_items_in_batch is None else int(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    trainer = api.text_trainer({"max_steps": 3}, base=lambda base: Mine)
    trainer.train()
    return seen


def models_that_return_tuples(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    return _losses(trainer)


def models_that_return_dicts(api: Api) -> Any:
    class Own(Regression):
        def forward(self, x: Any, labels: Any) -> Any:
            loss, prediction = super().forward(x, labels)
            return {"loss": loss, "prediction": prediction}

    trainer = api.plain_trainer(model=Own())
    trainer.train()
    return _losses(trainer)


def neftune(api: Api) -> Any:
    trainer = api.text_trainer({"neftune_noise_alpha": 5.0})
    before = len(trainer.model.get_input_embeddings()._forward_hooks)
    trainer.train()
    changed = _losses(trainer)
    plain = api.text_trainer()
    plain.train()
    after = len(trainer.model.get_input_embeddings()._forward_hooks)
    return [changed[0] != _losses(plain)[0], before, after]


def activation_checkpointing(api: Api) -> Any:
    trainer = api.text_trainer({"activation_checkpointing": True})
    trainer.train()
    return [_losses(trainer), trainer.model.is_gradient_checkpointing]


def accumulated_loss_is_a_mean(api: Api) -> Any:
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}
    trainer = api.plain_trainer(changes)
    trainer.train()
    return _losses(trainer)


def empty_cache_steps(api: Api) -> Any:
    trainer = api.plain_trainer({"torch_empty_cache_steps": 1, "max_steps": 2})
    return trainer.train().global_step


def shifted_labels_of_the_collator(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            seen.append(int(num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = api.text_trainer({"max_steps": 2}, base=lambda base: Mine, train_dataset=FullTokens(8))
    trainer.train()
    return seen


def current_accumulation_steps(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.current_gradient_accumulation_steps)
            return super().training_step(*args, **kwargs)

    changes = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 4}
    api.plain_trainer({**changes, "gradient_accumulation_steps": 3}, base=lambda base: Mine).train()
    return seen


def get_batch_samples_of_a_subclass(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            seen.append([len(batches), num_batches])
            return batches, count

    api.plain_trainer({"gradient_accumulation_steps": 2, "max_steps": 3}, base=lambda base: Mine).train()
    return seen


def inputs_inside_mappings(api: Api) -> Any:
    """As the collators of embedding models return them."""

    class Pairs(Regression):
        def forward(self, queries: Any, passages: Any, flag: bool = False) -> Any:
            scores = self.layers[0](queries["x"]) @ self.layers[0](passages["x"]).T
            return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(scores)))}

    def collate(rows: Any) -> Any:
        values = torch.stack([row["x"] for row in rows])
        return {"queries": {"x": values}, "passages": {"x": values * 2}, "flag": False}

    trainer = api.plain_trainer({"remove_unused_columns": False}, model=Pairs(), data_collator=collate)
    trainer.train()
    return [_losses(trainer), [e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]]


def bf16_on_the_cpu(api: Api) -> Any:
    trainer = api.plain_trainer({"bf16": True, "max_steps": 2}, train_dataset=regression_rows(8))
    trainer.train()
    return str(next(trainer.model.parameters()).dtype)


def parameters_change(api: Api) -> Any:
    model = Regression()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = api.plain_trainer(model=model)
    trainer.train()
    return [torch.equal(a, b.detach()) for a, b in zip(before, trainer.model.parameters(), strict=True)]


def final_weights(api: Api) -> Any:
    trainer = api.plain_trainer({"optim": "adamw_torch", "weight_decay": 0.01})
    trainer.train()
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
