"""Attributes of the Trainer that tools, subclasses and callbacks read."""

from __future__ import annotations

from typing import Any

import torch

from tests.behaviors.api import Api
from tests.support.models import Regression, tiny_llama

_MISSING = "missing"


def constructor_arguments(api: Api) -> Any:
    import inspect

    names = list(inspect.signature(api.Trainer.__init__).parameters)
    return names[: names.index("preprocess_logits_for_metrics") + 1]


def tokenizer_keyword(api: Api) -> Any:
    from tests.behaviors.api import raised

    return raised(api.plain_trainer, tokenizer=None)


def given_objects(api: Api) -> Any:
    model, compute = Regression(), lambda prediction: {}
    trainer = api.evaluated_trainer(model=model, compute_metrics=compute)
    return [
        trainer.model is model,
        trainer.compute_metrics is compute,
        len(trainer.train_dataset),
        len(trainer.eval_dataset),
        trainer.processing_class,
        trainer.compute_loss_func,
        trainer.preprocess_logits_for_metrics,
        trainer.model_init,
        trainer.optimizer,
        trainer.lr_scheduler,
    ]


def flags_before_training(api: Api) -> Any:
    trainer = api.plain_trainer()
    names = ("is_in_train", "is_model_parallel", "is_fsdp_enabled", "can_return_loss", "hp_search_backend", "hp_name")
    return {name: getattr(trainer, name, _MISSING) for name in names}


def deepspeed_flag(api: Api) -> Any:
    return api.plain_trainer().is_deepspeed_enabled


def model_placement_flag(api: Api) -> Any:
    return api.plain_trainer().place_model_on_device


def less_known_attributes(api: Api) -> Any:
    trainer = api.plain_trainer({"neftune_noise_alpha": None})
    names = ("hub_model_id", "neftune_noise_alpha", "deepspeed", "optimizer_cls_and_kwargs")
    return {name: getattr(trainer, name, _MISSING) for name in names}


def private_attributes(api: Api) -> Any:
    trainer = api.plain_trainer()
    return [hasattr(trainer, name) for name in ("_signature_columns", "_train_batch_size")]


def memory_tracker(api: Api) -> Any:
    return hasattr(api.plain_trainer(), "_memory_tracker")


def is_in_train(api: Api) -> Any:
    seen: list[Any] = []
    trainer: Any = None

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(trainer.is_in_train)

    trainer = api.plain_trainer({"max_steps": 2}, callbacks=[Mine])
    trainer.train()
    return [*seen, trainer.is_in_train]


def label_names(api: Api) -> Any:
    text = api.text_trainer().label_names
    return [text, api.plain_trainer().label_names, api.plain_trainer({"label_names": ["x"]}).label_names]


def can_return_loss_of_clip_like_models(api: Api) -> Any:
    class Own(Regression):
        def forward(self, x: Any, return_loss: bool = True) -> Any:
            return {"loss": self.layers(x).mean()}

    return api.plain_trainer(model=Own()).can_return_loss


def label_names_of_a_model_without_labels(api: Api) -> Any:
    class Own(Regression):
        def forward(self, x: Any) -> Any:
            return {"prediction": self.layers(x)}

    return api.plain_trainer(model=Own()).label_names


def accepts_loss_keywords(api: Api) -> Any:
    return [api.text_trainer().model_accepts_loss_kwargs, api.plain_trainer().model_accepts_loss_kwargs]


def model_after_training(api: Api) -> Any:
    model = Regression()
    trainer = api.plain_trainer(model=model)
    trainer.train()
    return [trainer.model is model, type(trainer.model).__name__, trainer.model.training]


def model_wrapped_holds_the_model(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model


def model_can_be_used_after_training(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    trainer.model.eval()
    with torch.no_grad():
        return trainer.model(torch.ones(2, 6), torch.ones(2))[1]


def cache_of_the_model_is_off(api: Api) -> Any:
    trainer = api.text_trainer()
    before = trainer.model.config.use_cache
    trainer.train()
    return [before, trainer.model.config.use_cache]


def world_and_local_process(api: Api) -> Any:
    trainer = api.plain_trainer()
    return [trainer.is_world_process_zero(), trainer.is_local_process_zero()]


def device_of_the_model(api: Api) -> Any:
    trainer = api.plain_trainer()
    return [str(next(trainer.model.parameters()).device), str(trainer.args.device)]


def label_smoother(api: Api) -> Any:
    smoothed = api.text_trainer({"label_smoothing_factor": 0.2}).label_smoother
    return [api.plain_trainer().label_smoother, smoothed is not None, smoothed.epsilon]


def label_smoother_can_be_called(api: Api) -> Any:
    """As a compute_loss copied from older versions calls it."""
    smoother = api.text_trainer({"label_smoothing_factor": 0.2}).label_smoother
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 5, 7, generator=generator), torch.tensor([[1, 2, 3, -100, 4], [0, 6, 5, 4, 3]])
    return [smoother({"logits": logits}, labels), smoother({"logits": logits}, labels, shift_labels=True)]


def call_model_init(api: Api) -> Any:
    trainer = api.plain_trainer(model_init=lambda: Regression(3))
    taking = api.plain_trainer(model_init=lambda trial: Regression(4 if trial is None else 5))
    values = [next(model.parameters())[0, 0] for model in (trainer.call_model_init(), taking.model)]
    return [*values, next(Regression(3).parameters())[0, 0], next(Regression(4).parameters())[0, 0]]


def model_init_makes_a_new_model(api: Api) -> Any:
    trainer = api.plain_trainer(model_init=Regression)
    before = trainer.model
    trainer.train()
    return before is trainer.model


def seed_before_model_init(api: Api) -> Any:
    def build() -> Any:
        return torch.nn.Linear(2, 2)

    trainers = [api.plain_trainer({"seed": seed}, model_init=build) for seed in (7, 7, 8)]
    weights = [trainer.model.weight.detach() for trainer in trainers]
    return [torch.equal(weights[0], weights[1]), torch.equal(weights[0], weights[2]), weights[0]]


def seed_of_the_constructor(api: Api) -> Any:
    api.plain_trainer({"seed": 11})
    return torch.rand(3)


def arguments_are_left_as_they_are(api: Api) -> Any:
    args = api.arguments()
    before = args.to_dict()
    trainer = api.Trainer(model=Regression(), args=args, train_dataset=api.plain_trainer().train_dataset)
    trainer.train()
    return [trainer.args is args, args.to_dict() == before]


def arguments_changed_after_construction(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.args.max_steps = 2
    trainer.args.learning_rate = 0.5
    output = trainer.train()
    return [output.global_step, trainer.state.log_history[0]["learning_rate"]]


def datasets_changed_after_construction(api: Api) -> Any:
    from tests.support.models import regression_rows

    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 1})
    trainer.train_dataset = regression_rows(8)
    trainer.eval_dataset = regression_rows(3)
    return [trainer.train().global_step, trainer.evaluate()["eval_loss"]]


def collator_changed_after_construction(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.data_collator = lambda rows: {"x": torch.ones(4, 6), "labels": torch.ones(4)}
    return trainer.train().training_loss


def a_method_replaced_on_the_object(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": 2})
    calls: list[int] = []
    original = trainer.compute_loss

    def compute_loss(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*arguments, **keywords)

    trainer.compute_loss = compute_loss
    trainer.train()
    return len(calls)


def floating_point_operations(api: Api) -> Any:
    trainer = api.text_trainer()
    batch = next(iter(trainer.get_train_dataloader()))
    return [trainer.floating_point_ops(batch) > 0, trainer.floating_point_ops({"x": torch.ones(2)})]


def end_of_a_script(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": 1})
    return callable(getattr(trainer, "end", None))


def model_on_a_generation_task(api: Api) -> Any:
    trainer = api.text_trainer(model=tiny_llama())
    trainer.train()
    trainer.model.eval()
    found = trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    return list(found.shape)
