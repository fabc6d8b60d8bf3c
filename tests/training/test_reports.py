"""Cases of public reports that no other test has; docs/reference/reports-tried.md lists all that were tried."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool


def _arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        seed=7,
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def _numbers(trainer: Trainer) -> list[tuple[float, float, float]]:
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in logs]


def _row(number: int) -> dict[str, list[int]]:
    return {"input_ids": [number % 50 + 3] * 4, "labels": [number % 50 + 3] * 4}


def _short_stream() -> Any:
    """10 samples for 20 steps: huggingface/transformers#26413."""
    import datasets

    return datasets.IterableDataset.from_generator(lambda: map(_row, range(10)))


def _interleaved_streams() -> Any:
    import datasets

    streams = [
        datasets.Dataset.from_list([_row(n) for n in range(first, last)]).to_iterable_dataset(num_shards=shards)
        for first, last, shards in [(0, 24, 2), (20, 39, 3)]
    ]
    mixed = datasets.interleave_datasets(streams, [0.7, 0.3], seed=3, stopping_strategy="all_exhausted")
    return mixed.shuffle(seed=5, buffer_size=4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [_short_stream, _interleaved_streams])
def test_a_stream_continues_where_it_was(make: Callable[[], Any], tmp_path: Path) -> None:
    values = dict(max_steps=20, per_device_train_batch_size=1, save_strategy="steps", save_steps=13)

    def train(resume: bool) -> list[tuple[float, float, float]]:
        trainer = Trainer(tiny_llama(), _arguments(tmp_path, **values), train_dataset=make())
        trainer.train(resume_from_checkpoint=resume)
        return _numbers(trainer)

    wanted = train(resume=False)
    shutil.rmtree(tmp_path / "checkpoint-20")
    found = train(resume=True)
    assert len(found) == 20
    assert found == wanted


class _WholeBatches(IterableDataset[Any]):
    """Yields batches of other lengths: huggingface/accelerate#3788."""

    lengths = (3, 7, 5, 4)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for length in self.lengths:
            tokens = torch.randint(3, 60, (4, length), generator=generator)
            yield {"input_ids": tokens, "labels": tokens}


class _OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None)


def test_a_loader_of_whole_batches(tmp_path: Path) -> None:
    arguments = _arguments(tmp_path, max_steps=6, learning_rate=1e-3, weight_decay=0.0, lr_scheduler_type="constant")
    trainer = _OwnLoader(tiny_llama(), arguments, train_dataset=_WholeBatches())
    trainer.train()
    model, wanted = tiny_llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for batch in [*_WholeBatches(), *_WholeBatches()][:6]:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert [numbers[0] for numbers in _numbers(trainer)] == pytest.approx(wanted, rel=1e-5)


class _MetricsByMode(Trainer):
    """Keeps metrics by mode until they are logged: Tencent/AngelSlim#302, and TRL."""

    kept: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        self.kept = self.kept or {"train": defaultdict(list), "eval": defaultdict(list)}
        self.kept["train" if model.training else "eval"]["calls"].append(1.0)
        return super().compute_loss(model, inputs, return_outputs, **keywords)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        logs["calls"] = len(self.kept[mode].pop("calls", []))
        super().log(logs, start_time)


@pytest.mark.parametrize("model", [tiny_llama, Regression])
def test_metrics_of_training_and_evaluation_are_kept_apart(model: Callable[[], Any], tmp_path: Path) -> None:
    data: Callable[[int], Any] = regression_rows if model is Regression else RaggedTokens
    arguments = _arguments(
        tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2
    )
    trainer = _MetricsByMode(model(), arguments, train_dataset=data(16), eval_dataset=data(6))
    trainer.train()
    assert [log["calls"] for log in trainer.state.log_history] == [2, 2, 3, 2, 3, 0]


class _Meter:
    """A running mean, as scripts write it."""

    def __init__(self) -> None:
        self.count, self.total = 0, torch.zeros(())
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.count += 1
        self.values.append(value)
        self.total += 1


class _ModuleMeter(nn.Module):
    """A metric that is a module, as those of torchmetrics."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def update(self, value: float) -> None:
        self.total += 1


class _MetricsInObjects(Trainer):
    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given, **keywords)
        self.meter, self.module, self.tensor = _Meter(), _ModuleMeter(), torch.zeros(2)
        self.by_name: dict[str, _Meter] = defaultdict(_Meter)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        self.meter.update(1.0)
        self.by_name["loss"].update(1.0)
        self.module.update(1.0)
        self.tensor += 1
        loss = model(**inputs)["loss"]
        return (loss, None) if return_outputs else loss

    def counts(self) -> set[float]:
        meters = (self.meter, self.by_name["loss"])
        found = [number for meter in meters for number in (meter.count, len(meter.values), meter.total.item())]
        return {*found, self.module.total.item(), *self.tensor.tolist()}


def test_metrics_in_objects_count_micro_batches_only(tmp_path: Path) -> None:
    """The passes that measure what the loss is a mean of are not among them."""
    arguments = _arguments(tmp_path, gradient_accumulation_steps=2)
    trainer = _MetricsInObjects(PlainLanguageModel(), arguments, train_dataset=RaggedTokens(16))
    trainer.train()
    assert trainer.counts() == {6}


class _RatesByName(Trainer):
    """Groups of parameters from ``get_optimizer_cls_and_kwargs``, as sentence-transformers makes them."""

    extra: Any = ()

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:  # type: ignore[override]
        cls, keywords = super().get_optimizer_cls_and_kwargs(args, model)
        slow = [p for name, p in self.model.named_parameters() if "bias" in name]
        rest = [p for name, p in self.model.named_parameters() if "bias" not in name]
        groups = [{"params": []}, {"params": [*rest, *self.extra]}, {"params": slow, "lr": 1e-4, "weight_decay": 0.0}]
        return cls, {**keywords, "optimizer_dict": groups}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_groups_of_an_overridden_optimizer_method(world: int, stage: int, tmp_path: Path) -> None:
    """huggingface/sentence-transformers: ``learning_rate_mapping`` and weights of losses (#2872)."""
    model, rows = Regression(), regression_rows(8)
    slow = [p for name, p in model.named_parameters() if "bias" in name]
    rest = [p for name, p in model.named_parameters() if "bias" not in name]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": slow, "lr": 1e-4}], lr=1e-2, weight_decay=0.0)
    wanted = []
    for _ in range(3):
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = model(**batch)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for losses in pool(world).run(_losses_by_name, str(tmp_path), world, stage):
        assert losses == pytest.approx(wanted, rel=1e-4)


def _losses_by_name(output_dir: str, world: int, stage: int) -> list[float]:
    arguments = _arguments(
        output_dir,
        zero_stage=stage,
        per_device_train_batch_size=8 // world,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="steps",
        save_steps=2,
    )
    trainer = _RatesByName(Regression(), arguments, train_dataset=regression_rows(8))
    trainer.train()
    again = _RatesByName(Regression(), arguments, train_dataset=regression_rows(8))
    again.train(resume_from_checkpoint=f"{output_dir}/checkpoint-2")
    assert _numbers(again) == _numbers(trainer)
    return [numbers[0] for numbers in _numbers(trainer)]


def test_weights_of_a_loss_that_the_model_does_not_have(tmp_path: Path) -> None:
    """They were left as they are, without a word: the engine trains the parameters of the model."""
    trainer = _RatesByName(Regression(), _arguments(tmp_path), train_dataset=regression_rows(8))
    trainer.extra = list(nn.Linear(3, 2).parameters())
    with pytest.raises(ConfigError, match=r"(?s)2 of the \d+ tensors.*\(2, 3\), \(2,\).*model.extra = loss_module"):
        trainer.train()


class _Shared(nn.Module):
    """A tied head, and buffers that are views of others: hiyouga/LlamaFactory#10137, TIGER-AI-Lab/VLM2Vec#32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(61, 8)
        self.head = nn.Linear(8, 61, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(6.0))
        self.register_buffer("last_steps", self.steps[3:])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> Any:
        logits = self.head(self.embedding(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class _Empty(_Shared):
    """Its last parameter has no elements: deepspeedai/DeepSpeed#8279."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> Any:
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["loss"] + self.empty.sum()}


def _resumed(output_dir: str, model: Callable[[], Any], stage: int, batch: int) -> tuple[Any, Any]:
    values = dict(zero_stage=stage, save_strategy="steps", save_steps=2, per_device_train_batch_size=batch)
    trainer = Trainer(model(), _arguments(output_dir, **values), train_dataset=RaggedTokens(16))
    trainer.train()
    again = Trainer(model(), _arguments(output_dir, **values), train_dataset=RaggedTokens(16))
    again.train(resume_from_checkpoint=f"{output_dir}/checkpoint-2")
    return _numbers(trainer), _numbers(again)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [_Shared, _Empty])
def test_shared_and_empty_tensors(model: Callable[[], Any], stage: int, tmp_path: Path) -> None:
    ((wanted, _),) = pool(1).run(_resumed, str(tmp_path / "one"), _Shared, 0, 4)
    for found, again in pool(2).run(_resumed, str(tmp_path / "two"), model, stage, 2):
        assert found == again
        assert [pytest.approx(numbers, rel=1e-4) for numbers in wanted] == found


def _classifier() -> Any:
    """Takes ``num_items_in_batch``, and ignores it: huggingface/transformers#47836."""
    from transformers import GPTNeoXConfig, GPTNeoXForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = GPTNeoXConfig(**sizes, num_labels=3, pad_token_id=0, hidden_dropout=0.0, attention_dropout=0.0)
    return GPTNeoXForSequenceClassification(config)


def test_heads_that_ignore_the_count(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (8, 6), generator=generator)
    rows = [{"input_ids": row, "labels": torch.tensor(number % 3)} for number, row in enumerate(tokens)]

    def numbers(batch: int) -> tuple[float, ...]:
        values = dict(max_steps=1, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch)
        trainer = Trainer(_classifier(), _arguments(tmp_path, **values), train_dataset=rows)
        trainer.train()
        return _numbers(trainer)[0]

    model = _classifier()
    loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    for batch in (8, 2):
        assert numbers(batch)[:2] == pytest.approx((loss.item(), norm.item()), rel=1e-4)
