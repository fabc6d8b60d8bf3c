"""The batches of each strategy of sampling, at the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from tests.behaviors.api import Api

SAMPLES = 20


def _rows() -> list[dict[str, Any]]:
    """Samples of several lengths that know their position."""
    lengths = torch.randint(1, 9, (SAMPLES,), generator=torch.Generator().manual_seed(5)).tolist()
    return [{"input_ids": [index] * length, "index": index} for index, length in enumerate(lengths)]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from _rows()


class Backwards(Sampler[int]):
    """From the last sample to the first."""

    def __init__(self, data: Any) -> None:
        self.samples = len(data)

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples - 1, -1, -1))


class Recorder:
    """A collator that writes down which samples are in each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.batches.append([sample["index"] for sample in samples])
        return {"x": torch.ones(len(samples), 6), "labels": torch.ones(len(samples))}


def _batches(api: Api, base: Any = None, data: Any = None, steps: int = -1, **changes: Any) -> Any:
    """The batches of two epochs, or of ``steps``: a loader may have read one more."""
    values: dict[str, Any] = dict(
        num_train_epochs=2,
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="no",
        remove_unused_columns=False,
    )
    recorder = Recorder()
    given: dict[str, Any] = {"train_dataset": _rows() if data is None else data, "data_collator": recorder}
    trainer = api.plain_trainer({**values, **changes}, None if base is None else lambda _: base, **given)
    trainer.train()
    found = recorder.batches
    return found if steps < 0 else found[: steps * changes.get("gradient_accumulation_steps", 1)]


def random(api: Api) -> Any:
    return _batches(api)


def another_seed(api: Api) -> Any:
    return _batches(api, seed=7)


def data_seed(api: Api) -> Any:
    return _batches(api, data_seed=11)


def incomplete_last_batch(api: Api) -> Any:
    return _batches(api, per_device_train_batch_size=3)


def drop_last(api: Api) -> Any:
    return _batches(api, per_device_train_batch_size=3, dataloader_drop_last=True)


def accumulation(api: Api) -> Any:
    return _batches(api, gradient_accumulation_steps=3)


def more_steps_than_an_epoch(api: Api) -> Any:
    return _batches(api, steps=8)


def more_steps_with_accumulation(api: Api) -> Any:
    return _batches(api, steps=4, gradient_accumulation_steps=2)[:7]


def sequential(api: Api) -> Any:
    return _batches(api, train_sampling_strategy="sequential")


def group_by_length(api: Api) -> Any:
    return _batches(api, train_sampling_strategy="group_by_length")


def group_by_length_column(api: Api) -> Any:
    from datasets import Dataset

    table = Dataset.from_list([{**row, "size": len(row["input_ids"])} for row in _rows()])
    return _batches(api, data=table, train_sampling_strategy="group_by_length", length_column_name="size")


def batch_rebalance(api: Api) -> Any:
    return _batches(api, train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=2)


def batch_rebalance_samples_of_a_step(api: Api) -> Any:
    found = _batches(api, train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=2)
    order = [index for batch in found for index in batch]
    epochs = [order[:SAMPLES], order[SAMPLES:]]
    return [sorted(epoch[start : start + 8]) for epoch in epochs for start in range(0, SAMPLES, 8)]


def stream(api: Api) -> Any:
    return _batches(api, data=Stream(), steps=7)


def stream_with_drop_last(api: Api) -> Any:
    return _batches(api, data=Stream(), steps=7, per_device_train_batch_size=3, dataloader_drop_last=True)


def split_batches(api: Api) -> Any:
    return _batches(api, accelerator_config={"split_batches": True})


def dispatch_batches(api: Api) -> Any:
    return _batches(api, accelerator_config={"dispatch_batches": True})


def dispatch_batches_of_a_stream(api: Api) -> Any:
    return _batches(api, data=Stream(), steps=7, accelerator_config={"dispatch_batches": True})


def uneven_batches(api: Api) -> Any:
    return _batches(api, per_device_train_batch_size=3, accelerator_config={"even_batches": False})


def without_seedable_sampler(api: Api) -> Any:
    return _batches(api, accelerator_config={"use_seedable_sampler": False})


def own_sampler(api: Api) -> Any:
    return _batches(api, api.subclass(api.Trainer, _get_train_sampler=lambda self, *_: Backwards(self.train_dataset)))


def own_weighted_sampler(api: Api) -> Any:
    weights = torch.arange(SAMPLES).float() + 1

    def sampler(self: Any, *_: Any) -> Any:
        return WeightedRandomSampler(weights.tolist(), SAMPLES, generator=torch.Generator().manual_seed(3))

    return _batches(api, api.subclass(api.Trainer, _get_train_sampler=sampler))


def _loader(prepare: bool, **options: Any) -> Any:
    def get_train_dataloader(self: Any) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=3, collate_fn=self.data_collator, **options)
        return self.accelerator.prepare(loader) if prepare else loader

    return get_train_dataloader


def own_loader(api: Api) -> Any:
    return _batches(api, api.subclass(api.Trainer, get_train_dataloader=_loader(False, sampler=Backwards(_rows()))))


def own_prepared_loader(api: Api) -> Any:
    return _batches(api, api.subclass(api.Trainer, get_train_dataloader=_loader(True, sampler=Backwards(_rows()))))


def own_shuffling_loader(api: Api) -> Any:
    generator = torch.Generator().manual_seed(9)
    loader = _loader(False, shuffle=True, generator=generator)
    return _batches(api, api.subclass(api.Trainer, get_train_dataloader=loader))


def own_loader_that_drops(api: Api) -> Any:
    loader = _loader(True, shuffle=False, drop_last=True)
    return _batches(api, api.subclass(api.Trainer, get_train_dataloader=loader))
