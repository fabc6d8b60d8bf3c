"""Data loaders: length, batches, order, columns, attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.behaviors.api import Api
from tests.support.models import Regression, regression_rows


class _Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples that know their position and write down when they are read."""

    def __init__(self, samples: int = 16) -> None:
        self.rows = regression_rows(samples)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read.append(int(index))
        return self.rows[index]


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, samples: int = 10) -> None:
        self.rows = regression_rows(samples)

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


def lengths(api: Api) -> Any:
    trainer = api.evaluated_trainer({"per_device_eval_batch_size": 3})
    test = trainer.get_test_dataloader(regression_rows(7))
    return [len(trainer.get_train_dataloader()), len(trainer.get_eval_dataloader()), len(test)]


def lengths_with_drop_last(api: Api) -> Any:
    trainer = api.plain_trainer({"dataloader_drop_last": True}, train_dataset=regression_rows(18))
    return [len(trainer.get_train_dataloader()), [len(b["labels"]) for b in trainer.get_train_dataloader()]]


def batches_are_tensors(api: Api) -> Any:
    batch = next(iter(api.plain_trainer().get_train_dataloader()))
    return {name: [type(value).__name__, list(value.shape), value.dtype.__str__()] for name, value in batch.items()}


def evaluation_is_in_order(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    return torch.cat([batch["labels"] for batch in trainer.get_eval_dataloader()])


def training_reads_every_sample_once(api: Api) -> Any:
    data = _Numbers()
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 1}, train_dataset=data)
    trainer.train()
    return sorted(data.read)


def training_order_differs_between_epochs(api: Api) -> Any:
    data = _Numbers()
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 2}, train_dataset=data)
    trainer.train()
    return [data.read[:16] != data.read[16:32], data.read[:16] != list(range(16))]


def order_of_the_first_epoch(api: Api) -> Any:
    data = _Numbers()
    api.plain_trainer({"max_steps": -1, "num_train_epochs": 1}, train_dataset=data).train()
    return data.read


def the_order_follows_the_seed(api: Api) -> Any:
    orders = []
    for seed in (1, 1, 2):
        data = _Numbers()
        api.plain_trainer({"max_steps": 4, "seed": seed}, train_dataset=data).train()
        orders.append(data.read[:16])
    return [orders[0] == orders[1], orders[0] == orders[2]]


def the_order_follows_the_data_seed(api: Api) -> Any:
    orders = []
    for seed in (1, 1, 2):
        data = _Numbers()
        api.plain_trainer({"max_steps": 4, "data_seed": seed}, train_dataset=data).train()
        orders.append(data.read[:16])
    return [orders[0] == orders[1], orders[0] == orders[2]]


def sequential_order(api: Api) -> Any:
    data = _Numbers()
    api.plain_trainer({"train_sampling_strategy": "sequential", "max_steps": 4}, train_dataset=data).train()
    return data.read[:16]


def group_by_length_makes_even_batches(api: Api) -> Any:
    rows = [{"input_ids": [3] * (1 + index % 8), "labels": [3] * (1 + index % 8)} for index in range(32)]
    trainer = api.text_trainer(
        {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 4},
        train_dataset=rows,
        data_collator=lambda batch: {"input_ids": torch.tensor([[len(row["input_ids"]) for row in batch]])},
    )
    sizes = [batch["input_ids"][0] for batch in trainer.get_train_dataloader()]
    return [len(sizes), int(max(max(size) for size in sizes)) == int(max(sizes[0]))]


def old_name_of_group_by_length(api: Api) -> Any:
    from tests.behaviors.api import raised

    return raised(api.arguments, group_by_length=True)


def dataset_of_the_loader(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    return [
        trainer.get_train_dataloader().dataset is trainer.train_dataset,
        trainer.get_eval_dataloader().dataset is trainer.eval_dataset,
    ]


def attributes_of_the_loader(api: Api) -> Any:
    loader = api.plain_trainer().get_train_dataloader()
    sampler = loader.batch_sampler
    return [
        loader.num_workers,
        sampler is not None,
        loader.drop_last,
        loader.total_batch_size,
        loader.collate_fn is None,
    ]


def loaders_are_torch_loaders(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    loaders = (trainer.get_train_dataloader(), trainer.get_eval_dataloader())
    return [isinstance(loader, torch.utils.data.DataLoader) for loader in loaders]


def num_examples(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    return [trainer.num_examples(trainer.get_train_dataloader()), trainer.num_examples(trainer.get_eval_dataloader())]


def evaluation_dataset_by_name(api: Api) -> Any:
    data = {"a": regression_rows(6), "b": regression_rows(3)}
    trainer = api.plain_trainer(eval_dataset=data)
    return [len(trainer.get_eval_dataloader("a")), len(trainer.get_eval_dataloader("b"))]


def given_evaluation_dataset(api: Api) -> Any:
    return len(api.evaluated_trainer().get_eval_dataloader(regression_rows(5)))


def columns_that_the_model_does_not_take(api: Api) -> Any:
    rows = [{**row, "text": "hello", "length": 3} for row in regression_rows(8)]
    return sorted(next(iter(api.plain_trainer(train_dataset=rows).get_train_dataloader())))


def columns_are_kept_on_request(api: Api) -> Any:
    rows = [{**row, "length": 3} for row in regression_rows(8)]
    trainer = api.plain_trainer({"remove_unused_columns": False}, train_dataset=rows)
    return sorted(next(iter(trainer.get_train_dataloader())))


def columns_of_a_datasets_dataset(api: Api) -> Any:
    import datasets

    rows = regression_rows(8)
    data = datasets.Dataset.from_dict({"x": [r["x"].tolist() for r in rows], "labels": [1.0] * 8, "text": ["a"] * 8})
    trainer = api.plain_trainer(train_dataset=data)
    return sorted(next(iter(trainer.get_train_dataloader())))


def label_columns_are_kept(api: Api) -> Any:
    rows = [{"x": row["x"], "label": row["labels"]} for row in regression_rows(8)]
    return sorted(next(iter(api.plain_trainer(train_dataset=rows).get_train_dataloader())))


def iterable_dataset(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": 5}, train_dataset=_Stream())
    output = trainer.train()
    return [output.global_step, trainer.state.epoch, [e["loss"] for e in trainer.state.log_history if "loss" in e]]


def iterable_evaluation(api: Api) -> Any:
    trainer = api.plain_trainer(eval_dataset=_Stream(7))
    found = trainer.evaluate()
    return [found["eval_loss"], len(trainer.predict(_Stream(7)).predictions)]


def a_list_is_a_dataset(api: Api) -> Any:
    return api.plain_trainer(train_dataset=regression_rows(8)).train().global_step


def loader_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=False)

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sampler_of_a_subclass(api: Api) -> Any:
    data = _Numbers()

    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    api.plain_trainer(base=lambda base: Mine, train_dataset=data).train()
    return data.read[:16]


def one_sample_less_than_a_batch(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 1}, train_dataset=regression_rows(7))
    output = trainer.train()
    return [output.global_step, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]]


def persistent_evaluation_loader(api: Api) -> Any:
    trainer = api.evaluated_trainer({"dataloader_persistent_workers": True, "dataloader_num_workers": 1})
    return trainer.get_eval_dataloader() is trainer.get_eval_dataloader()


def total_train_batch_size(api: Api) -> Any:
    trainer = api.plain_trainer({"gradient_accumulation_steps": 3})
    return trainer.get_total_train_batch_size(trainer.args)


def initial_training_values(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 2.5, "gradient_accumulation_steps": 3})
    return [int(value) for value in trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())]


def model_that_takes_any_keywords(api: Api) -> Any:
    class Any_(Regression):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(inputs["x"], inputs["labels"])

    trainer = api.plain_trainer({"remove_unused_columns": False}, model=Any_())
    return trainer.train().training_loss
