"""Wrong values and combinations: where an exception is raised, and which `except` clause catches it."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api, raised
from tests.support.models import Regression, regression_rows, tiny_llama


def logging_steps_of_zero(api: Api) -> Any:
    return raised(api.arguments, logging_steps=0)


def steps_that_are_not_whole(api: Api) -> Any:
    return [
        raised(api.arguments, logging_steps=1.5),
        raised(api.arguments, eval_strategy="steps", eval_steps=2.5),
        raised(api.arguments, save_strategy="steps", save_steps=2.5),
    ]


def fp16_with_bf16(api: Api) -> Any:
    return raised(api.arguments, fp16=True, bf16=True)


def both_kinds_of_half_evaluation(api: Api) -> Any:
    return raised(api.arguments, fp16_full_eval=True, bf16_full_eval=True)


def negative_warmup(api: Api) -> Any:
    return raised(api.arguments, warmup_steps=-1)


def unknown_names(api: Api) -> Any:
    return {
        name: raised(api.arguments, **{name: "nonsense"})
        for name in ("optim", "lr_scheduler_type", "eval_strategy", "save_strategy", "logging_strategy", "hub_strategy")
    }


def unknown_debug_option(api: Api) -> Any:
    return raised(api.arguments, debug="nonsense")


def unknown_keyword(api: Api) -> Any:
    return raised(api.arguments, learning_rat=0.1)


def prefetch_without_workers(api: Api) -> Any:
    return raised(api.arguments, dataloader_prefetch_factor=2)


def torch_empty_cache_steps(api: Api) -> Any:
    return [raised(api.arguments, torch_empty_cache_steps=value) for value in (0, -1, 1.5, 1, 3)]


def torch_empty_cache_steps_as_a_float(api: Api) -> Any:
    return raised(api.arguments, torch_empty_cache_steps=1.0)


def accelerator_state_that_does_not_exist(api: Api) -> Any:
    from accelerate.state import PartialState

    kept, PartialState._shared_state = PartialState._shared_state, {}
    try:
        return raised(api.arguments, accelerator_config={"use_configured_state": True})
    finally:
        PartialState._shared_state = kept


def accelerator_config_as_a_class(api: Api) -> Any:
    from transformers.trainer_pt_utils import AcceleratorConfig

    return raised(api.arguments, accelerator_config=AcceleratorConfig)


def best_model_needs_equal_strategies(api: Api) -> Any:
    return raised(api.arguments, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps")


def best_model_needs_multiples(api: Api) -> Any:
    given = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    pairs: tuple[tuple[float, float], ...] = ((3, 2), (2, 4), (0.1, 0.2), (0.1, 0.25), (0.1, 4), (2, 5))
    return [raised(api.arguments, **given, eval_steps=every, save_steps=save) for every, save in pairs]


def plateau_without_evaluation(api: Api) -> Any:
    return raised(api.arguments, lr_scheduler_type="reduce_lr_on_plateau")


def evaluation_without_dataset(api: Api) -> Any:
    return raised(api.plain_trainer, {"eval_strategy": "steps"})


def neither_model_nor_model_init(api: Api) -> Any:
    return raised(api.Trainer, args=api.arguments())


def both_model_and_model_init(api: Api) -> Any:
    return raised(api.Trainer, model=Regression(), model_init=Regression, args=api.arguments())


def model_init_with_optimizers(api: Api) -> Any:
    import torch

    optimizer = torch.optim.SGD(Regression().parameters(), lr=0.1)
    return raised(api.Trainer, model_init=Regression, args=api.arguments(), optimizers=(optimizer, None))


def model_init_with_two_arguments(api: Api) -> Any:
    return raised(api.Trainer, model_init=lambda a, b: Regression(), args=api.arguments())


def model_init_that_returns_nothing(api: Api) -> Any:
    return raised(api.Trainer, model_init=lambda: None, args=api.arguments())


def both_kinds_of_optimizers(api: Api) -> Any:
    import torch

    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = (torch.optim.SGD, {"lr": 0.1})
    return raised(api.plain_trainer, model=model, optimizers=(optimizer, None), optimizer_cls_and_kwargs=given)


def model_without_a_head(api: Api) -> Any:
    def train() -> None:
        api.text_trainer(model=tiny_llama().model).train()

    return raised(train)


def training_without_data(api: Api) -> Any:
    return raised(api.plain_trainer(train_dataset=None).train)


def loader_without_data(api: Api) -> Any:
    trainer = api.plain_trainer(train_dataset=None)
    return [raised(trainer.get_train_dataloader), raised(trainer.get_eval_dataloader), raised(trainer.evaluate)]


def resuming_without_a_checkpoint(api: Api) -> Any:
    trainer = api.plain_trainer()
    return [
        raised(trainer.train, resume_from_checkpoint=True),
        raised(trainer.train, resume_from_checkpoint=str(api.directory / "checkpoint-9")),
    ]


def iterable_data_without_max_steps(api: Api) -> Any:
    def rows() -> Any:
        yield from regression_rows(8)

    import torch

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return rows()

    return raised(api.plain_trainer, {"max_steps": -1}, train_dataset=Stream())


def batch_metrics_without_compute_result(api: Api) -> Any:
    return raised(api.evaluated_trainer, {"batch_eval_metrics": True}, compute_metrics=lambda prediction: {})


def best_model_by_a_metric_that_is_not_there(api: Api) -> Any:
    changes = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "metric_for_best_model": "accuracy",
    }
    return raised(api.evaluated_trainer(changes).train)


def best_strategy_without_a_metric(api: Api) -> Any:
    return raised(api.evaluated_trainer, {"save_strategy": "best", "eval_strategy": "steps"})


def model_without_a_loss(api: Api) -> Any:
    import torch

    class NoLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 1)

        def forward(self, x: Any, labels: Any = None) -> Any:
            return {"logits": self.layer(x)}

    return raised(api.plain_trainer(model=NoLoss()).train)


def search_without_model_init(api: Api) -> Any:
    return raised(api.evaluated_trainer().hyperparameter_search, n_trials=1, backend="optuna")


def collator_that_cannot_be_called(api: Api) -> Any:
    collator = type("Old", (), {"collate_batch": lambda self, rows: rows})()
    return raised(api.plain_trainer, data_collator=collator)


def removing_a_callback_that_is_not_there(api: Api) -> Any:
    trainer = api.plain_trainer()
    mine = api.subclass(api.TrainerCallback)
    return [raised(trainer.remove_callback, mine), raised(trainer.remove_callback, mine())]


def accelerator_config_with_an_unknown_key(api: Api) -> Any:
    return raised(api.arguments, accelerator_config={"nonsense": True})


def two_numbers_of_accumulation_steps(api: Api) -> Any:
    config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    return raised(api.plain_trainer, {"accelerator_config": config, "gradient_accumulation_steps": 2})


def unused_columns_that_leave_nothing(api: Api) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c", "d"] * 4})
    return raised(api.plain_trainer(train_dataset=rows).train)
