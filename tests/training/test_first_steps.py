"""A run that cannot learn says so in its first 20 steps, with the place and the remedy; a healthy run says nothing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import ConfigError, Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.loop.first_steps import FirstSteps
from tests.support.models import VOCABULARY, PlainLanguageModel, Regression, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights

Data = Sequence[dict[str, Any]]


def rows(count: int = 64, length: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of random tokens, all of them targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def train(folder: Any, model: nn.Module, data: Any = None, cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """A run of 20 steps; what is given more replaces its arguments."""
    options = {key: given.pop(key) for key in ("callbacks", "optimizers", "peft_config") if key in given}
    values = dict(use_cpu=True, max_steps=20, per_device_train_batch_size=4, save_strategy="no", report_to="none")
    values |= dict(disable_tqdm=True, learning_rate=1e-3)
    args = TrainingArguments(str(folder), **{**values, **given})
    trainer = cls(model, args, train_dataset=rows() if data is None else data, **options)
    trainer.train()
    return trainer


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far."""
    caplog.set_level(logging.WARNING, "ds_trainer")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Classes(nn.Module):
    """An encoder and a head of classes, with what a test inserts between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.ModuleList([nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.unused = nn.Linear(16, 3)
        self.head = nn.Linear(16, 3)
        self.between = between

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder[0](input_ids).mean(dim=1)
        hidden = torch.tanh(self.encoder[2](torch.tanh(self.encoder[1](hidden))))
        self.unused(hidden)
        return {"loss": F.cross_entropy(self.head(self.between(hidden)), labels % 3)}


def classes() -> list[dict[str, Any]]:
    """Samples for :class:`Classes`."""
    return [{"input_ids": row["input_ids"], "labels": int(row["input_ids"][0])} for row in rows()]


# -- gradients and movement -------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_part_that_is_cut_off_is_named(stage: int, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    train(tmp_path, Classes(lambda hidden: hidden.detach()), classes(), zero_stage=stage, max_steps=6)
    (found,) = warnings()
    assert "No gradient reaches encoder (5 tensors) in step 1" in found and "detach()" in found
    assert "unused" not in found


def test_rounding_cuts_off(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    train(tmp_path, Classes(lambda hidden: (hidden * 8).round() / 8), classes(), max_steps=3)
    (found,) = warnings()
    assert "encoder (5 tensors)" in found


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_tried_changes_nothing(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str) -> tuple[list[float], list[torch.Tensor]]:
        model = Classes(lambda hidden: F.dropout(hidden.detach(), 0.5))
        trainer = train(tmp_path / name, model, classes(), zero_stage=stage, max_steps=4, logging_steps=1)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, list(whole_weights(trainer).values())

    with_check = run("a")
    monkeypatch.setattr(FirstSteps, "_report_detached", lambda *given: None)
    without = run("b")
    assert with_check[0] == without[0]
    assert all(map(torch.equal, with_check[1], without[1]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_with_a_backward_pass_is_left_alone(
    stage: int, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    class Penalty(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            loss = super().compute_loss(model, inputs, **given)
            point = torch.ones(3, requires_grad=True)
            (point * loss.detach()).sum().backward()
            return loss

    train(tmp_path, Classes(lambda hidden: hidden.detach()), classes(), cls=Penalty, zero_stage=stage, max_steps=3)
    assert not any("No gradient reaches" in one for one in warnings())


def test_a_tensor_without_optimizer(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    model = Classes()
    optimizer = torch.optim.AdamW([*model.encoder.parameters()], lr=1e-3)
    train(tmp_path, model, classes(), optimizers=(optimizer, None), max_steps=3)
    assert any("no parameter group with" in one and "head (2 tensors)" in one for one in warnings())


def test_weights_that_are_put_back(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    class PutBack(TrainerCallback):
        """Restores the head after each step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.before = copy.deepcopy(kwargs["model"].head.state_dict())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].head.load_state_dict(self.before)

    train(tmp_path, Classes(), classes(), callbacks=[PutBack()], max_steps=8)
    (found,) = warnings()
    assert "head (2 tensors) did not change in the first 8 steps" in found and "callbacks" in found


def test_updates_too_small_for_the_weights(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    train(tmp_path, tiny_llama(), optim="sgd", learning_rate=1e-8, lr_scheduler_type="constant")
    (found,) = warnings()
    assert "did not change in the first 20 steps" in found and "model.norm" in found
    assert "too small for float32" in found and "Raise learning_rate" in found


def test_bfloat16_without_masters(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {"bf16": low, "zero_optimization": {"stage": 1}}
    given: dict[str, Any] = dict(optim="sgd", learning_rate=1e-3, lr_scheduler_type="constant")
    train(tmp_path, tiny_llama(), deepspeed=config, bf16=True, **given)
    (found,) = (one for one in warnings() if "bfloat16" in one)
    assert "32-bit masters" in found


def test_steps_larger_than_the_weights(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    train(tmp_path, tiny_llama(), learning_rate=0.09, max_steps=4)
    assert any("times their size" in one and "Lower learning_rate" in one for one in warnings())


def test_an_adapter_that_is_not_used(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    model.get_parameter("lm_head.weight").requires_grad_(False)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    wrapped.base_model.disable_adapter_layers()
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_("lora_" in name or "lm_head" in name)
    train(tmp_path, wrapped, max_steps=3)
    assert any("The adapter (4 tensors) had no gradient" in one and "set_adapter" in one for one in warnings())


def test_a_loss_that_does_not_depend_on_the_weights(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    class Constant(Classes):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(input_ids, labels)["loss"] * 0 + 1.5}

    train(tmp_path, Constant(), classes(), max_steps=6)
    assert any("gradient was 0 in each of the first 6 steps" in one for one in warnings())


# -- labels and samples -----------------------------------------------------------------------------------------------


def changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
    """All samples after ``change``."""
    return [change(row) for row in rows()]


def masked(row: dict[str, Any]) -> dict[str, Any]:
    """Without a target in three of four samples."""
    some = int(row["input_ids"].sum()) % 4 == 0
    return row if some else {**row, "labels": torch.full_like(row["labels"], -100)}


def padded(row: dict[str, Any]) -> dict[str, Any]:
    """The last four tokens are padding, and targets."""
    mask = torch.ones_like(row["input_ids"])
    mask[-4:] = 0
    tokens = row["input_ids"] * mask
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": mask}


def shifted(row: dict[str, Any]) -> dict[str, Any]:
    """Label t is token t + 1."""
    return {**row, "labels": torch.cat([row["input_ids"][1:], row["input_ids"].new_tensor([-100])])}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed(masked), ("of the samples in the first 20 steps have no target", "max_length")),
        (changed(lambda row: {**row, "labels": row["labels"] * 0 - 100}), ("There is no target", "data_collator")),
        (changed(lambda row: {key: value[:1] for key, value in row.items()}), ("There is no target", "one token")),
        (changed(padded), ("of the targets in the first 20 steps are padding", "attention_mask is 0")),
        (changed(shifted), ("the model shifts labels itself", "input_ids")),
        ([rows()[0]] * 64, ("All samples in the first 20 steps have the same tokens", "max_length")),
    ],
    ids=["masked", "none", "one token", "padding", "shifted", "same"],
)
def test_labels(data: Data, words: tuple[str, ...], tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    train(tmp_path, PlainLanguageModel(), data)
    (found,) = (one for one in warnings() if "Rank 0 has no target" not in one)
    assert all(word in found for word in words)


def test_the_source_without_targets_is_named(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    class Mixture(list[Any]):
        source_names = ("books", "chat")

    data = Mixture()
    for number, row in enumerate(rows()):
        labels = row["labels"] if number % 2 else torch.full_like(row["labels"], -100)
        data.append({"input_ids": row["input_ids"], "labels": labels, "source_ids": torch.full((12,), 1 - number % 2)})
    train(tmp_path, PlainLanguageModel(), data, zero_stage=2, gradient_accumulation_steps=2, loss_per_source=True)
    (found,) = warnings()
    assert "Source 'chat': none of its" in found and "template" in found


# -- losses, norms, rates ---------------------------------------------------------------------------------------------


def test_a_sum_instead_of_a_mean(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    class Sum(PlainLanguageModel):
        config = type("Config", (), {"vocab_size": VOCABULARY})

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> Any:
            return {"loss": super().forward(input_ids, labels)["loss"] * 1e5}

    own = type(
        "Own", (Trainer,), {"compute_loss": lambda self, *args, **more: Trainer.compute_loss(self, *args, **more)}
    )
    assert train(tmp_path, Sum(), cls=own) and "guessing" not in "".join(warnings())  # whatever a script computes
    train(tmp_path, Sum(), max_grad_norm=1.0)
    found = "\n".join(warnings())
    assert "above that of guessing each token of the vocabulary alike, 4.111" in found
    assert "max_grad_norm=1 divided it by more than 1,000" in found


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rate": 0.0}, "no weight changes"),
        ({"learning_rate": 1e-12}, "too small for any weight"),
        ({"learning_rate": 0.5}, "far above"),
        ({"warmup_steps": 500}, "warmup_steps=500 is not below the 4 steps"),
    ],
)
def test_rates(given: dict[str, Any], words: str, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    train(tmp_path, tiny_llama(), max_steps=4, **given)
    assert any(words in one for one in warnings())


def test_rates_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate=200000\.0 is a mistake"):
        train(tmp_path, tiny_llama(), learning_rate=2e5)
    with pytest.raises(ConfigError, match=r"learning rate 30 of AdamW is a mistake.*Did you mean 0.3\?"):
        train(tmp_path, tiny_llama(), learning_rate=30.0)

    def negative(schedule: Callable[[Any], Any], words: str) -> None:
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with pytest.raises(ConfigError, match=words):
            train(tmp_path, model, optimizers=(optimizer, schedule(optimizer)), max_steps=20)

    lambdas = torch.optim.lr_scheduler
    negative(lambda one: lambdas.LambdaLR(one, lambda step: 1 - step / 10), "factor -0.9 in step 20 of 20")
    negative(lambda one: lambdas.OneCycleLR(one, 1e-3, total_steps=5), r"total_steps=5, but the run has 20")


def test_small_rate_of_adapters(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    train(tmp_path, tiny_llama(), peft_config=config, learning_rate=5e-7, max_steps=2)
    assert any("very small for adapters" in one for one in warnings())


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_that_is_empty_or_not_all_after_a_save(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped: Any = peft.get_peft_model(tiny_llama(), config)
    wrapped.base_model.model.model.norm.weight.requires_grad_(True)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # stays zero
            parameter.register_hook(torch.zeros_like)
    trainer = train(tmp_path, wrapped, weight_decay=0.1, max_steps=3, save_strategy="steps", save_steps=3)
    trainer.save_model(str(tmp_path / "saved"))
    empty = [one for one in warnings() if "changes nothing" in one and "lora_B" in one]
    lost = [one for one in warnings() if "does not hold" in one and "model.norm.weight" in one]
    assert len(empty) == 2 and len(lost) == 2 and "modules_to_save" in lost[0]


# -- several ranks ----------------------------------------------------------------------------------------------------


class Records(logging.Handler):
    """Keeps the warnings of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def of_rank(kind: str, folder: str, given: dict[str, Any]) -> list[str]:
    """Train on this rank in one of several ways, and return the warnings."""
    records, logger = Records(), logging.getLogger("ds_trainer")
    logger.addHandler(records)
    rank = torch.distributed.get_rank()
    try:
        model: nn.Module = tiny_llama()
        data: Any = rows()
        cls: type[Trainer] = Trainer
        if kind == "copies":
            given["callbacks"] = [OnRankOne()]
        elif kind == "buffers":
            model.register_buffer("mine", torch.full((3,), float(rank)), persistent=False)
        elif kind == "samples":
            cls = SameForAll
            model, data = (Regression(), regression_rows(40)) if given.pop("vectors", False) else (model, data)
        elif kind == "cut":
            model, data = Classes(lambda hidden: hidden.detach()), classes()
        train(folder, model, data, cls=cls, **given).engine.close()
    finally:
        logger.removeHandler(records)
    return records.texts


class OnRankOne(TrainerCallback):
    """Changes a weight on one rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank() == 1 and state.global_step == 2:
            with torch.no_grad():
                kwargs["model"].model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3


class SameForAll(Trainer):
    """A loader that forgets that there are ranks."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("copies", {"zero_stage": 0}, "different copies of model.layers.*.mlp.up_proj after step 6 (rank 1"),
        ("copies", {"tensor_parallel_size": 2, "zero_stage": 1}, ""),  # a slice has no copy
        ("buffers", {"zero_stage": 3}, "different copies of mine before the first step (rank 1"),
        ("samples", {}, "All 2 data-parallel replicas had the same samples in the first 6 steps"),
        (
            "samples",
            {"vectors": True},
            "the same samples in the first 6 steps, so the batch is not larger",
        ),
        ("cut", {"zero_stage": 3}, "No gradient reaches encoder (5 tensors)"),
        ("healthy", {"zero_stage": 2, "gradient_accumulation_steps": 2}, ""),
        ("healthy", {"zero_stage": 3, "bf16": True}, ""),
        ("healthy", {"tensor_parallel_size": 2, "zero_stage": 1}, ""),
        ("healthy", {"sequence_parallel_size": 2, "zero_stage": 1}, ""),
        ("healthy", {"context_parallel_size": 2, "zero_stage": 2}, ""),
    ],
)
def test_two_ranks(kind: str, given: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = pool(2).run(of_rank, kind, str(tmp_path), {"max_steps": 6, **given}, timeout=300)
    assert words in "\n".join(found[0]) and len(found[0]) == int(bool(words)) and not found[1], found
