"""The Trainer's surface: hooks are really called, records are written, wrong use ends in one clear error."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.oracle import stack, token_loss, train_plainly
from tests.support.pool import pool
from tests.support.runs import compatibility_of, train_and_report


def arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=3,
        learning_rate=2e-3,
        weight_decay=0.1,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=16,
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def fail_with(job: Any) -> str:
    """The message of the ConfigError that ``job`` raises on this rank."""
    try:
        job()
    except ConfigError as error:
        return str(error)
    raise AssertionError("was not refused")


# -- hooks -------------------------------------------------------------------------------------------------------


class Everything(Trainer):
    """Overrides every hook, counts the calls, changes nothing."""

    calls: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls = {}
        super().__init__(*args, **kwargs)

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def create_optimizer(self) -> Any:
        self.count("create_optimizer")
        names = self.get_decay_parameter_names(self.model)
        decayed = [p for n, p in self.model.named_parameters() if n in names]
        rest = [p for n, p in self.model.named_parameters() if n not in names]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=2e-3)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.count("create_scheduler")
        return super().create_scheduler(num_training_steps, optimizer)

    def get_train_dataloader(self) -> Any:
        self.count("get_train_dataloader")
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self.count("get_eval_dataloader")
        return super().get_eval_dataloader(eval_dataset)

    def get_batch_samples(self, *args: Any) -> Any:
        self.count("get_batch_samples")
        return super().get_batch_samples(*args)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.count("training_step")
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):  # type: ignore[no-untyped-def]
        self.count("compute_loss")
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def log(self, logs: Any, start_time: Any = None) -> None:
        self.count("log")
        super().log(logs, start_time)


def run_everything(output_dir: str) -> tuple[Any, dict[str, int]]:
    args = arguments(output_dir, gradient_accumulation_steps=2, per_device_train_batch_size=8, eval_strategy="epoch")
    trainer = Everything(tiny_llama(), args, train_dataset=RaggedTokens(37), eval_dataset=RaggedTokens(5))
    trainer.train()
    return compatibility_of(trainer), trainer.calls


def test_every_hook_is_called_without_changing_the_losses(tmp_path: Path) -> None:
    found, calls = pool(1).run(run_everything, str(tmp_path))[0]
    assert_equal(found, train_plainly(tiny_llama(), RaggedTokens(37), learning_rate=2e-3, steps=3))
    assert calls["create_optimizer"] == calls["create_scheduler"] == calls["get_train_dataloader"] == 1
    assert calls["get_batch_samples"] == 3
    assert calls["training_step"] == 2 + 2 + 1  # the last window of the epoch has one micro-batch
    assert calls["get_eval_dataloader"] == 1
    assert calls["compute_loss"] == 5 + 1
    assert calls["log"] == 3 + 1 + 1


class OldStyle(Trainer):
    """The reference's oldest way to give a loss: no count, no outputs, the mean over the micro-batch."""

    def compute_loss(self, model: nn.Module, inputs: Any) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        logits = model(**inputs)[0]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ForgetsTheCount(Trainer):
    """Takes the count and ignores it: the gradient would silently be too large."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class DividesByTheCount(Trainer):
    """A sum over the count, written by a user who reads the number out of the tensor."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch.item()


@pytest.mark.parametrize("trainer_class", [OldStyle, ForgetsTheCount, DividesByTheCount])
def test_overridden_losses_of_every_style_give_the_exact_gradient(trainer_class: Any, tmp_path: Path) -> None:
    wanted = train_plainly(tiny_llama(), RaggedTokens(37), learning_rate=2e-3)
    changes = dict(learning_rate=2e-3, max_grad_norm=0.0, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    make_data = partial(RaggedTokens, 37)
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), trainer_class, **changes)
    for found in pool(2).run(job):
        assert_equal(found, wanted)


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"]
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def run_with(output_dir: str, make: Any, **changes: Any) -> Any:
    args = arguments(output_dir, **changes)
    trainer = make(args)
    trainer.train()
    return compatibility_of(trainer)


def test_compute_loss_func_and_given_optimizers(tmp_path: Path) -> None:
    def make(args: TrainingArguments) -> Trainer:
        model = tiny_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (3 - step) / 3)
        data = RaggedTokens(37)
        return Trainer(model, args, train_dataset=data, compute_loss_func=summed_loss, optimizers=(optimizer, schedule))

    found = run_with(str(tmp_path), make)
    wanted = train_plainly(
        tiny_llama(), RaggedTokens(37), optimizer="sgd", learning_rate=0.3, weight_decay=0.0, steps=3
    )
    assert_equal(found, wanted)
    assert "optimizer" not in json.loads((tmp_path / "ds_config.json").read_text())


def test_a_schedule_given_twice_is_rejected(tmp_path: Path) -> None:
    class OwnSchedule(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            raise AssertionError("refused before")

    file = tmp_path / "ds.json"
    file.write_text('{\n"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}\n}')
    args = arguments(tmp_path, deepspeed=str(file))
    model = Regression()
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1))
    handed = fail_with(lambda: Trainer(model, args, optimizers=(None, schedule)))
    assert handed.startswith(f"{file}:2 has a scheduler, but optimizers=(..., ConstantLR) passed to the Trainer.")
    overridden = fail_with(lambda: OwnSchedule(model, args))
    assert overridden.startswith(f"{file}:2 has a scheduler, but OwnSchedule.create_scheduler builds another")
    assert "scheduler" in Trainer(model, args)._ds_trainer.compiled


def test_a_custom_loader_is_used(tmp_path: Path) -> None:
    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            order = torch.randperm(37, generator=torch.Generator().manual_seed(42)).tolist()
            rows = [self.train_dataset[index] for index in order]
            return DataLoader(rows, batch_size=16, collate_fn=stack)

    found = run_with(str(tmp_path), lambda args: OwnLoader(tiny_llama(), args, train_dataset=RaggedTokens(37)))
    assert_equal(found, train_plainly(tiny_llama(), RaggedTokens(37), learning_rate=2e-3, steps=3))


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    make = partial(Trainer, tiny_llama(), train_dataset=RaggedTokens(37))
    found = run_with(str(tmp_path), lambda args: make(args=args), gradient_checkpointing=True)
    assert_equal(found, train_plainly(tiny_llama(), RaggedTokens(37), learning_rate=2e-3, steps=3))
    with pytest.raises(ConfigError, match="PlainLanguageModel has no activation_checkpointing_enable"):
        run_with(
            str(tmp_path),
            lambda args: Trainer(PlainLanguageModel(), args, train_dataset=RaggedTokens(9)),
            gradient_checkpointing=True,
        )


def train_twice(output_dir: str, stage: int) -> tuple[Any, Any]:
    # SGD: a fresh Adam turns the last digit of a tiny gradient into a full step
    args = arguments(output_dir, per_device_train_batch_size=8, zero_stage=stage, optim="sgd", learning_rate=0.3)
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(37))
    trainer.save_model(f"{output_dir}/before")
    trainer.evaluate(RaggedTokens(5))
    trainer.train()
    first = compatibility_of(trainer)
    trainer.train()
    return first, compatibility_of(trainer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_again_continues_from_the_weights(stage: int, tmp_path: Path) -> None:
    """Save and evaluate before training, train, train again: a second engine over the first one's weights."""
    model = tiny_llama()
    data = RaggedTokens(37)
    wanted = [train_plainly(model, data, optimizer="sgd", learning_rate=0.3, steps=3) for _ in range(2)]
    for found in pool(2).run(train_twice, str(tmp_path), stage):
        assert_equal(found[0], wanted[0])
        assert_equal(found[1], wanted[1])
    assert (tmp_path / "before" / "model.safetensors").is_file()


# -- evaluation ----------------------------------------------------------------------------------------------------


def evaluate_everywhere(output_dir: str, make_model: Any, make_data: Any, stage: int, train: bool) -> dict[str, float]:
    args = arguments(output_dir, per_device_eval_batch_size=3, zero_stage=stage, learning_rate=0.0, weight_decay=0.0)
    trainer = Trainer(make_model(), args, train_dataset=make_data(), eval_dataset=make_data())
    if train:
        trainer.train()
    return trainer.evaluate()


@pytest.mark.cases(3)
@pytest.mark.parametrize("train", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 2), (4, 3)])
def test_evaluation_loss_is_the_exact_token_mean(world: int, stage: int, train: bool, tmp_path: Path) -> None:
    data = RaggedTokens(13)
    with torch.no_grad():
        wanted = token_loss(tiny_llama(), stack(data.rows)).item()
    items = sum(int((row["labels"][1:] != -100).sum()) for row in data.rows)
    job = partial(evaluate_everywhere, str(tmp_path), tiny_llama, partial(RaggedTokens, 13), stage, train)
    for metrics in pool(world).run(job):
        assert metrics["eval_loss"] == pytest.approx(wanted, rel=1e-5)
        assert metrics["eval_items"] == items
    plain = partial(evaluate_everywhere, str(tmp_path), PlainLanguageModel, partial(RaggedTokens, 13), stage, train)
    with torch.no_grad():
        wanted = token_loss(PlainLanguageModel(), stack(data.rows)).item()
    assert pool(world).run(plain)[0]["eval_loss"] == pytest.approx(wanted, rel=1e-5)


def test_evaluation_of_several_sets_and_of_samples(tmp_path: Path) -> None:
    rows = regression_rows(7)
    trainer = Trainer(Regression(), arguments(tmp_path), eval_dataset={"a": rows, "b": rows[:2]})
    metrics = trainer.evaluate()
    with torch.no_grad():
        wanted = Regression()(**stack(rows[:2]))[0].item()
    assert metrics["eval_b_loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["eval_a_items"] == 7
    assert trainer.evaluate("b", metric_key_prefix="test")["test_loss"] == pytest.approx(wanted, rel=1e-5)


# -- records and callbacks -----------------------------------------------------------------------------------------


@pytest.mark.extended
def test_records_in_the_output_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = RaggedTokens(40)
    trainer = Trainer(tiny_llama(), arguments(tmp_path, zero_stage=1), train_dataset=data, eval_dataset=data)
    output = trainer.train()
    trainer.evaluate()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"metrics.jsonl", "report.html", "trainer_state.json", "ds_config.json"} <= names
    assert not [name for name in names if name.endswith((".png", ".svg"))]  # drawn where they are asked for
    assert json.loads((tmp_path / "ds_config.json").read_text()) == trainer._ds_trainer.compiled.to_dict()
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == output.global_step == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_gb", "epoch"} <= steps[0].keys()
    assert output.training_loss == pytest.approx(sum(line["loss"] for line in steps) / 3)
    assert state["num_input_tokens_seen"] == 0  # counted where include_num_input_tokens_seen asks for it
    header = capsys.readouterr().out
    assert "16 = 16 per device x 1 accumulation x 1 data parallel" in header
    assert "ZeRO 1, fp32, AdamW" in header and str(tmp_path) in header


class StopsOnRankOne(TrainerCallback):
    """Decides on one rank only, as a callback that looks at its own clock would."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.decide)

    def decide(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step == 2:
            control.should_training_stop = control.should_epoch_stop = True
            control.should_save = True


def stop_on_one_rank(output_dir: str, everywhere: bool, event: str) -> int:
    args = arguments(output_dir, max_steps=6, per_device_train_batch_size=4, logging_steps=1)
    callbacks = [StopsOnRankOne(event)] if everywhere or args.process_index == 1 else None
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(32), callbacks=callbacks)
    return trainer.train().global_step


@pytest.mark.parametrize(("everywhere", "event"), [(True, "on_step_end"), (False, "on_step_end"), (True, "on_log")])
def test_ranks_stop_and_save_together(everywhere: bool, event: str, tmp_path: Path) -> None:
    """Also where the other rank does not even have the callback."""
    assert pool(2).run(stop_on_one_rank, str(tmp_path), everywhere, event, timeout=60.0) == [2, 2]
    run = json.loads((tmp_path / "checkpoint-2" / "run.json").read_text())
    assert run["data"]["ended"] or event == "on_log"


def test_total_batch_size_is_that_of_the_batch_plan(tmp_path: Path) -> None:
    trainer = Trainer(tiny_llama(), arguments(tmp_path, gradient_accumulation_steps=3))
    assert trainer.get_total_train_batch_size() == 48


# -- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda args: Trainer(tiny_llama(), args), "train() needs a train_dataset"),
        (lambda args: Trainer(tiny_llama(), args, train_dataset=[]), "train_dataset is empty: it has 0 samples"),
        (lambda args: Trainer(tiny_llama(), args, train_dataset=object()), "has no length or no items"),
        (lambda args: Trainer(tiny_llama(), args, train_dataset=[(1, 2)]), "a sample of the dataset is a tuple"),
        (
            lambda args: Trainer(tiny_llama(), args, train_dataset=[{"input_ids": [1]}, {"input_ids": [1, 2]}]),
            "The samples of a batch differ in 'input_ids': shapes (1,), (2,)",
        ),
        (
            lambda args: Trainer(tiny_llama(), args, train_dataset=[{"input_ids": [1, 2]}]),
            "LlamaForCausalLM returned no scalar loss for a batch of input_ids; it returned only logits",
        ),
        (
            lambda args: Trainer(tiny_llama(), args, data_collator=lambda rows: rows, train_dataset=RaggedTokens(4)),
            "A batch is a list, but models are called with keyword arguments",
        ),
        (
            lambda args: Trainer(tiny_llama(), dataclasses.replace(args, eval_strategy="epoch")),
            "eval_strategy=epoch, but there is no eval_dataset",
        ),
        (lambda args: Trainer(args=args), "Pass either a model or a model_init"),
    ],
)
def test_wrong_use_is_rejected_with_a_message(make: Any, message: str, tmp_path: Path) -> None:
    found = fail_with(lambda: make(arguments(tmp_path)).train())
    assert message.lower() in found.lower()


def test_loaders_of_different_lengths_are_rejected_on_all_ranks(tmp_path: Path) -> None:
    messages = pool(2).run(uneven_loaders, str(tmp_path))
    assert all("the lengths of the loaders, by rank, are [1, 2]" in message for message in messages)


def uneven_loaders(output_dir: str) -> str:
    class Uneven(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(RaggedTokens(4 * (1 + self.args.process_index)), batch_size=4, collate_fn=stack)

    return fail_with(lambda: Uneven(tiny_llama(), arguments(output_dir)).train())
