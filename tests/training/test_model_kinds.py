"""Models of every kind: with labels of one name, several or none; returning mappings, tuples or a tensor; headless."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model.preparation import loss_head_problems
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import relative
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.reference_run import OURS, reference_run
from tests.support.runs import train_and_report

_BERT: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def bert(head: str, **changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, head)(transformers.BertConfig(**{**_BERT, **changes}))
    return made


def tokens(samples: int, **labels: Any) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens; each of ``labels`` makes a row's label of its index."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(3, 61, (8,), generator=generator), **{n: f(i) for n, f in labels.items()}}
        for i in range(samples)
    ]


def span_rows(samples: int) -> list[dict[str, torch.Tensor]]:
    return tokens(
        samples, start_positions=lambda i: torch.tensor(i % 4), end_positions=lambda i: torch.tensor(4 + i % 4)
    )


def sentence_pair_rows(samples: int) -> list[dict[str, torch.Tensor]]:
    rows = tokens(samples, next_sentence_label=lambda i: torch.tensor(i % 2))
    return [{**row, "labels": row["input_ids"].clone()} for row in rows]


def score_rows(samples: int) -> list[dict[str, torch.Tensor]]:
    return tokens(samples, labels=lambda i: torch.tensor(float(i % 5)))


class Plain(Regression):
    """Returns only a tensor."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, labels)[0]


class Mapping(Regression):
    """Returns a dict, and calls its target by a name of its own."""

    def forward(self, x: torch.Tensor, score: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        loss, prediction = super().forward(x, score)
        return {"prediction": prediction, "loss": loss}


class Itself(nn.Module):
    """Needs no label: it compares its input with what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        again = self.layer(x)
        return (again - x).square().mean(), again


def scored(samples: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": row["x"], "score": row["labels"]} for row in regression_rows(samples)]


def unlabelled(samples: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": row["x"]} for row in regression_rows(samples)]


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "question answering, two labels": (partial(bert, "BertForQuestionAnswering"), span_rows, {}),
    "two labels, named": (
        partial(bert, "BertForQuestionAnswering"),
        span_rows,
        {"label_names": ["start_positions", "end_positions"]},
    ),
    "two losses in one": (partial(bert, "BertForPreTraining"), sentence_pair_rows, {}),
    "float labels": (partial(bert, "BertForSequenceClassification", num_labels=1), score_rows, {}),
    "tuples": (partial(bert, "BertForSequenceClassification", num_labels=1, return_dict=False), score_rows, {}),
    "a tuple of one's own": (Regression, regression_rows, {}),
    "a dict and a name of one's own": (Mapping, scored, {"label_names": ["score"]}),
    "no label": (Itself, unlabelled, {}),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Without accumulation: there the reference trusts a signature, and doubles a loss that ignores the count."""
    make_model, make_rows, changes = CASES[case]
    changes = {**changes, "per_device_train_batch_size": 8, "max_steps": 2}
    losses, norms = reference_run(make_model(), make_rows(32), tmp_path / "theirs", **changes)
    job = partial(train_and_report, make_model, partial(make_rows, 32), str(tmp_path / "ours"), **OURS, **changes)
    (found,) = pool(1).run(job)
    (accumulated,) = pool(1).run(partial(job, per_device_train_batch_size=4, gradient_accumulation_steps=2))
    for trajectory in (found, accumulated):
        assert relative(trajectory.losses, losses) < 1e-5
        assert relative(trajectory.grad_norms, norms) < 1e-4


def test_a_single_tensor_is_the_loss(tmp_path: Path) -> None:
    """The reference wants it in a tuple; the numbers are the tuple's."""
    data = partial(regression_rows, 32)
    changes = {**OURS, "per_device_train_batch_size": 4}
    (wanted,) = pool(1).run(partial(train_and_report, Regression, data, str(tmp_path), **changes))
    (found,) = pool(1).run(partial(train_and_report, Plain, data, str(tmp_path), **changes))
    assert found.losses == wanted.losses


def squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.last_hidden_state.square().sum() / num_items_in_batch


class OwnLoss(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        return model(**inputs).last_hidden_state.square().mean()


def test_a_model_without_a_head_is_rejected(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    llama_body = tiny_llama().model
    for body in (bert("BertModel"), llama_body):
        name = type(body).__name__
        with pytest.raises(ConfigError, match=f"{name} returns hidden states: it takes no labels and returns no loss"):
            Trainer(body, args)
        assert Trainer(body, args, compute_loss_func=squares) is not None  # somebody else computes it
        assert OwnLoss(body, args) is not None
    assert loss_head_problems(tiny_llama()) == loss_head_problems(PlainLanguageModel()) == []


def outcome(make_model: Any, rows: Any, output_dir: Path) -> str:
    args = TrainingArguments(str(output_dir), use_cpu=True, max_steps=1, disable_tqdm=True, save_strategy="no")
    job = Trainer(make_model(), args, train_dataset=rows)
    try:
        job.train()
    except ConfigError as error:
        return str(error)
    finally:
        job.engine.close()
    raise AssertionError("was not refused")


def test_a_missing_loss_is_reported(tmp_path: Path) -> None:
    without = [{"input_ids": row["input_ids"]} for row in RaggedTokens(4).rows]
    (message,) = pool(1).run(partial(outcome, tiny_llama, without, tmp_path))
    assert message.startswith("LlamaForCausalLM returned no scalar loss for a batch of input_ids; it returned only")
    assert "Add labels to the batch" in message
