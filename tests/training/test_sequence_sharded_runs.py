"""Runs with sharded sequences: losses of every kind, streams, custom loaders, hooks of a subclass, counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal, relative
from tests.support.layouts import PlainAttention
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.training.model.test_label_smoothing import FACTOR, smoothed_token_loss

SAMPLES = 37
make_data = partial(RaggedTokens, SAMPLES)
LAYOUTS = {
    "cp2": {"context_parallel_size": 2},
    "sp2": {"sequence_parallel_size": 2},
    "cp2 sp2": {"context_parallel_size": 2, "sequence_parallel_size": 2},
    "dp2 sp2": {"sequence_parallel_size": 2},
    "dp2 cp2": {"context_parallel_size": 2},
}
WORLD = {"cp2": 2, "sp2": 2, "cp2 sp2": 4, "dp2 sp2": 4, "dp2 cp2": 4}


def arguments(layout: str, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    replicas = 2 if layout.startswith("dp2") else 1
    sizes = {
        "per_device_train_batch_size": 16 // (replicas * accumulation),
        "gradient_accumulation_steps": accumulation,
    }
    return {"learning_rate": 2e-3, "max_grad_norm": 0.0, **sizes, **LAYOUTS[layout], **more}


@cache
def reference(smoothed: bool = False) -> Trajectory:
    loss = {"loss": smoothed_token_loss} if smoothed else {}
    return train_plainly(tiny_llama(), make_data(), learning_rate=2e-3, **loss)


def check(
    layout: str, output_dir: Path, trainer_class: type[Trainer] = Trainer, wanted: Any = None, **more: Any
) -> None:
    job = partial(train_and_report, tiny_llama, make_data, str(output_dir), trainer_class, **arguments(layout, **more))
    for found in pool(WORLD[layout]).run(job):
        # A ring sums in another order, Adam divides what is left of that by small moments: up to 1.5e-5 on some CPUs.
        assert_equal(found, reference() if wanted is None else wanted, tolerance=3e-5)


class IgnoresTheCount(PlainAttention):
    """Accepts the number of items and returns its mean all the same."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        return super().forward(input_ids, labels, attention_mask, position_ids, shift_labels)


class TargetsAtTheStart(RaggedTokens):
    """Only the first two tokens of a sequence have a target: the second rank of a ring has none at all."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = dict(super().__getitem__(index))
        row["labels"] = row["labels"].clone()
        row["labels"][3:] = -100
        return row


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_without_targets_uses_the_loss_of_the_others(stage: int, tmp_path: Path) -> None:
    data = partial(TargetsAtTheStart, SAMPLES)
    wanted = train_plainly(PlainAttention(), data(), learning_rate=2e-3)
    more = {"zero_stage": stage, "optim": "adamw_torch_fused"}
    job = partial(train_and_report, IgnoresTheCount, data, str(tmp_path), **arguments("cp2", **more))
    for found in pool(2).run(job):
        assert max(relative(found.losses, wanted.losses), relative(found.grad_norms, wanted.grad_norms)) < 1e-4


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smoothed_labels(layout: str, tmp_path: Path) -> None:
    check(layout, tmp_path, wanted=reference(smoothed=True), label_smoothing_factor=FACTOR)


class MeanLoss(Trainer):
    """Does not get the item count, like older scripts: a mean over the shard of this rank, weighted by its targets."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class WholeStep(Trainer):
    """A training step of its own, as it is written for transformers."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss, scale_wrt_gas=False)
        return loss.detach()


def loss_of_shifted(
    outputs: Any, labels: Any, num_items_in_batch: Any = None, shift_labels: Any = None
) -> torch.Tensor:
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    total = F.cross_entropy(outputs["logits"].float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class WithFunction(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, compute_loss_func=loss_of_shifted)


class InOrder(torch.utils.data.Sampler[int]):
    """The reference's order on the first rank, another one elsewhere."""

    epoch = 0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if self.rank:
            return iter(range(SAMPLES))
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(42 + self.epoch)).tolist())


class ForeignLoader(Trainer):
    """Its loader has another order on every rank; that of a replica's first rank counts."""

    def get_train_dataloader(self) -> Any:
        size = self.args.per_device_train_batch_size
        sampler = InOrder(self.args.process_index)
        return DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=self.data_collator)


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", ["cp2 sp2", "dp2 sp2"])
@pytest.mark.parametrize("kind", [MeanLoss, WholeStep, WithFunction])
def test_custom_losses_and_steps(kind: type[Trainer], layout: str, tmp_path: Path) -> None:
    check(layout, tmp_path, kind)


def test_every_rank_works_on_the_batch_of_the_replica_leader(tmp_path: Path) -> None:
    check("sp2", tmp_path, ForeignLoader)


class Stream(torch.utils.data.IterableDataset[Any]):
    """The rows in the order of the reference's epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(42 + self.epoch))
        return iter([make_data()[index] for index in order.tolist()])


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", ["cp2", "dp2 sp2"])
def test_streams(layout: str, tmp_path: Path) -> None:
    job = partial(train_and_report, tiny_llama, Stream, str(tmp_path), **arguments(layout))
    for found in pool(WORLD[layout]).run(job):
        assert_equal(found, reference())


# -- counts -----------------------------------------------------------------------------------------------------------


def counts(output_dir: str, **values: Any) -> dict[str, float]:
    args = TrainingArguments(
        output_dir,
        use_cpu=True,
        max_steps=3,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        **values,
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=make_data(), eval_dataset=RaggedTokens(11, 3))
    seen: list[int] = []
    step = trainer.training_step

    def watched(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(int(num_items_in_batch))
        return step(model, inputs, num_items_in_batch)

    trainer.training_step = watched  # type: ignore[method-assign]
    trainer._ds_trainer.losses.overlap_count = False
    output = trainer.train()
    evaluated = trainer.evaluate()
    return {
        "tokens": output.metrics["num_input_tokens_seen"],
        "flos": output.metrics["total_flos"],
        "samples": trainer.get_total_train_batch_size(),
        "items": seen[::2] if len(seen) > 3 else seen,
        "eval_loss": round(evaluated["eval_loss"], 4),
        "eval_items": evaluated["eval_items"],
    }  # type: ignore[dict-item]


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", ["cp2", "dp2 sp2"])
def test_a_batch_counts_once_for_its_replica(layout: str, tmp_path: Path) -> None:
    whole = {"per_device_train_batch_size": 16, "learning_rate": 2e-3, "max_grad_norm": 0.0}
    (wanted,) = pool(1).run(partial(counts, str(tmp_path), **whole))
    for found in pool(WORLD[layout]).run(partial(counts, str(tmp_path), **arguments(layout))):
        assert relative([found["flos"]], [wanted["flos"]]) < 1e-9
        assert found == {**wanted, "flos": found["flos"]}


# -- refusals ---------------------------------------------------------------------------------------------------------


def refusal(make_model: Any, make_rows: Any, output_dir: str, **values: Any) -> str:
    function = values.pop("function", None)
    try:
        args = TrainingArguments(output_dir, use_cpu=True, max_steps=1, disable_tqdm=True, save_strategy="no", **values)
        trainer = Trainer(make_model(), args, train_dataset=make_rows(), compute_loss_func=function)
    except ConfigError as error:
        return f"at construction: {error}"
    try:
        trainer.train()
    except ConfigError as error:
        return f"at the first batch: {error}"
    return "not at all"


def shifts_by_itself(outputs: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("never called")


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    return T5ForConditionalGeneration(T5Config(vocab_size=61, decoder_start_token_id=0, **shape))


class NoPlaces(PlainLanguageModel):
    shifts_labels = False


def classes() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=61, pad_token_id=0, **shape))


def classified() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(3, 11), "labels": torch.tensor(i % 2)} for i in range(8)]


REFUSALS = {
    "shifting function": (tiny_llama, make_data, {"function": shifts_by_itself}, "construction", "shift_labels"),
    "encoder-decoder": (encoder_decoder, make_data, {}, "construction", "encoder-decoder"),
    "no positions": (NoPlaces, make_data, {}, "construction", "position_ids"),
    "no shifted labels": (PlainLanguageModel, make_data, {}, "construction", "shift_labels"),
    "no sequences": (Regression, partial(regression_rows, 8), {}, "construction", "position_ids"),
    "a class for each sequence": (classes, classified, {}, "construction", "one prediction per sequence"),
    "a label for each sample": (tiny_llama, classified, {}, "the first batch", "Only one class per token"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, tmp_path: Path) -> None:
    make_model, rows, more, when, message = REFUSALS[name]
    job = partial(refusal, make_model, rows, str(tmp_path), sequence_parallel_size=2, **more)
    for text in pool(2).run(job):
        assert text.startswith(f"at {when}") and message in text, text


def test_without_sequence_sharding_the_same_models_train(tmp_path: Path) -> None:
    """Negative control: nothing of this is asked of a model whose sequences stay whole."""
    for name in ("encoder-decoder", "no positions", "no shifted labels"):
        make_model, rows, more, *_ = REFUSALS[name]
        assert pool(1).run(partial(refusal, make_model, rows, str(tmp_path), **more)) == ["not at all"]
