"""Runs that are stopped and resumed, and the results that must equal those of an uninterrupted run."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils.seeds import random_state
from tests.support.layouts import Packed, pad
from tests.support.models import RaggedTokens, tiny_llama

SAMPLES = 37


@dataclass
class RunRecord:
    """What one rank saw in a run, and its final state.

    Attributes:
        batches: tokens of every micro-batch that reached the model.
        logs: loss, gradient norm and learning rate of every step of the whole run.
        state: digests of all weights, master weights and optimizer states that this rank holds at the end.
        random: digest of the state of its random generators at the end.
        step, epoch: where it ended.
    """

    batches: list[list[int]]
    logs: list[tuple[float, float, float]]
    state: dict[str, str]
    random: str
    step: int
    epoch: float


class StopAt(TrainerCallback):
    """Ends training at a step, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Tokens(RaggedTokens):
    """Rows with positions."""

    def __init__(self) -> None:
        super().__init__(SAMPLES)


class Augmented(Tokens):
    """Draws from all global generators whenever a sample is read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = dict(super().__getitem__(index))
        noise = int(torch.randint(3, 60, ())) + int(np.random.randint(3, 60)) + random.randint(3, 60)
        row["input_ids"] = row["input_ids"].clone()
        row["input_ids"][0] = noise % 61
        return row


class Stream(IterableDataset[Any]):
    """The rows in an order that its generator draws, which is seeded for every epoch. It has no state."""

    def __init__(self) -> None:
        self.rows = Tokens().rows
        self.generator = torch.Generator()
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self.rows), generator=self.generator).tolist():
            self.read += 1
            yield self.rows[index]


class AugmentedStream(Stream):
    """Draws from the global generators at every sample."""

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            changed = row["input_ids"].clone()
            changed[0] = int(torch.randint(3, 60, ()))
            yield {**row, "input_ids": changed}


class StatefulStream(Stream):
    """Has a position that can be saved and restored."""

    def __init__(self) -> None:
        super().__init__()
        self._next, self._epoch_state = 0, torch.zeros(0, dtype=torch.uint8)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.rows), generator=self.generator).tolist()
        for index in range(self._next, len(order)):
            self.read += 1
            self._next = index + 1
            yield self.rows[order[index]]
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def table_stream(shuffled: bool = False) -> Any:
    """The rows as a stream of ``datasets`` with four shards; it has a state unless it is shuffled."""
    import datasets

    rows = [{name: value.tolist() for name, value in row.items()} for row in Tokens().rows]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
    return (stream.shuffle(seed=3, buffer_size=5) if shuffled else stream).with_format("torch")


DATA: dict[str, Callable[[], Any]] = {
    "tokens": Tokens,
    "augmented": Augmented,
    "stream": Stream,
    "augmented_stream": AugmentedStream,
    "stateful_stream": StatefulStream,
    "table_stream": table_stream,
    "shuffled_table_stream": lambda: table_stream(shuffled=True),
    "packed": lambda: Packed(SAMPLES, 1),
}


def make(
    output_dir: str,
    data: str | Dataset[Any] = "tokens",
    stop_at: int | None = None,
    trainer_class: type[Trainer] = Trainer,
    callbacks: list[Any] | None = None,
    seed: int = 0,
    dropout: float = 0.2,
    **arguments: Any,
) -> Trainer:
    """A trainer of a tiny Llama with dropout, four samples to a step and ten steps to an epoch."""
    values: dict[str, Any] = dict(
        max_steps=8,
        learning_rate=2e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="steps",
        save_steps=4,
        disable_tqdm=True,
        use_cpu=True,
    )
    values.update(arguments)
    if values.get("dataloader_num_workers"):
        # The pool's ranks are daemons of a fork server, which may have no children and start them strangely.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        values["dataloader_multiprocessing_context"] = "fork"
    args = TrainingArguments(output_dir, **values)
    dataset = DATA[data]() if isinstance(data, str) else data
    stops = [] if stop_at is None else [StopAt(stop_at)]
    model = tiny_llama(seed, attention_dropout=dropout)
    options: dict[str, Any] = {"data_collator": pad} if data == "packed" else {}
    return trainer_class(model, args, train_dataset=dataset, callbacks=[*(callbacks or []), *stops], **options)


def record_batches(trainer: Trainer) -> list[list[int]]:
    """A list that fills with the tokens of every micro-batch."""
    batches: list[list[int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        batches.append(kwargs["input_ids"].flatten().tolist())

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    return batches


def digest_of(shard: Any) -> str:
    return digest(shard.tensor.detach().contiguous().view(torch.uint8).numpy())


def run_record(trainer: Trainer, batches: list[list[int]]) -> RunRecord:
    """The record of a run that has ended; closes its engine."""
    from ds_trainer.engine.state.state_shards import read_state_shards

    state: dict[str, str] = {}
    for shards in read_state_shards(trainer.engine):
        for shard in shards.tensors:
            state[f"{shard.name}/{shard.kind}"] = digest_of(shard)
        for name, scalars in shards.scalars.items():
            state[f"{name}/scalars"] = str(sorted((key, float(value)) for key, value in scalars.items()))
    logs = [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    record = RunRecord(batches, logs, state, random_digest(), trainer.state.global_step, trainer.state.epoch)
    trainer.engine.close()
    return record


def digest(data: Any) -> str:
    return hashlib.sha256(bytes(data)).hexdigest()[:16]


def random_digest() -> str:
    """Of the state of all generators of this process."""
    state = random_state()
    name, keys, *rest = state["numpy"]
    return digest(repr((state["python"], name, keys.tolist(), rest, state["torch"].tolist())).encode())


def run(output_dir: str, resume: str | bool | None = None, **more: Any) -> RunRecord:
    """Train on this rank; what came of it."""
    trainer = make(output_dir, **more)
    batches = record_batches(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return run_record(trainer, batches)


def differences(found: RunRecord, wanted: RunRecord, trained: int | None = None) -> list[str]:
    """What is not bit for bit the same in a run that went on and one that was never stopped."""
    names = ("logs", "state", "random", "step", "epoch")
    different = [name for name in names if getattr(found, name) != getattr(wanted, name)]
    # Before the first step of a run with sharded sequences, its first batch goes through the model in other forms too.
    had = found.batches if trained is None else found.batches[len(found.batches) - trained :]
    if (not had and trained != 0) or had != wanted.batches[len(wanted.batches) - len(had) :]:
        different.append("batches")
    return different
