"""The same script with two libraries: ``transformers`` and this package.

A script is a function of a :class:`Library`; it builds a Trainer, does something with it and returns what is to be
compared. :func:`both` runs it twice, in directories of its own, and returns both results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ds_trainer
from tests.support.models import RaggedTokens, tiny_llama

COMPARED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")


@dataclass(frozen=True)
class Library:
    """Where the names of a script come from, and where it may write."""

    module: Any
    directory: Path

    def arguments(self, **changes: Any) -> Any:
        """Arguments for a small run on the CPU in which every step is logged."""
        values: dict[str, Any] = dict(
            output_dir=str(self.directory),
            max_steps=4,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        if self.is_ours:
            values["save_async"] = False  # events of saves then come at the steps where the reference has them
        return self.module.TrainingArguments(**{**values, **changes})

    def trainer(self, changes: dict[str, Any] | None = None, base: Any = None, **given: Any) -> Any:
        """A Trainer (or a subclass of it, made by ``base(Trainer)``) of a small Llama over ragged tokens."""
        cls = self.module.Trainer if base is None else base(self.module.Trainer)
        if "model" not in given and "model_init" not in given:
            given["model"] = tiny_llama()
        given.setdefault("train_dataset", RaggedTokens(20))
        return cls(args=self.arguments(**(changes or {})), **given)

    @property
    def is_ours(self) -> bool:
        """Whether it is this package."""
        return bool(self.module is ds_trainer)


Script = Callable[[Library], Any]


class FullTokens(RaggedTokens):
    """Tokens without padding: every sample has as many targets, so that any way to average their losses agrees."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        super().__init__(samples, seed)
        for row in self.rows:
            row["input_ids"] = torch.where(row["attention_mask"] == 0, 5, row["input_ids"])
            row["labels"] = row["input_ids"].clone()
            row["attention_mask"] = torch.ones_like(row["attention_mask"])


def both(script: Script, directory: Path) -> tuple[Any, Any]:
    """The script's results: ours, transformers'."""
    import transformers

    results = []
    for module in (ds_trainer, transformers):
        output_dir = directory / module.__name__
        output_dir.mkdir()
        results.append(script(Library(module, output_dir)))
    ours, reference = results
    if isinstance(reference, dict) and "logs" in reference:
        _drop_log_of_last_step(ours, reference)
    return ours, reference


def _drop_log_of_last_step(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """A deliberate difference: we log the last step also where ``logging_steps`` does not divide it."""

    def is_last(entry: dict[str, Any]) -> bool:
        return "loss" in entry and entry["step"] == (ours["steps"] if "steps" in ours else ours["step"])

    if not any(map(is_last, reference["logs"])) and any("loss" in entry for entry in reference["logs"]):
        assert sum(map(is_last, ours["logs"])) == 1
        ours["logs"] = [entry for entry in ours["logs"] if not is_last(entry)]


def logs(trainer: Any, *keys: str) -> list[dict[str, Any]]:
    """The history, reduced to ``keys`` (default: those that mean the same everywhere)."""
    wanted = keys or COMPARED
    history = [{key: entry[key] for key in wanted if key in entry} for entry in trainer.state.log_history]
    return [entry for entry in history if set(entry) - {"step", "epoch"}]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the trained weights."""
    return {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()}


def trained(trainer: Any, **keywords: Any) -> dict[str, Any]:
    """Train, and report what a run leaves behind."""
    output = trainer.train(**keywords)
    return {
        "logs": logs(trainer),
        "steps": output.global_step,
        "training_loss": output.training_loss,
        "max_steps": trainer.state.max_steps,
        "epochs": trainer.state.num_train_epochs,
        "epoch": trainer.state.epoch,
        "weights": weights(trainer),
    }


def assert_same(ours: Any, reference: Any, tolerance: float = 2e-5, path: str = "result") -> None:
    """Everything agrees: numbers to ``tolerance`` (relative, and absolute below 1), all else exactly."""
    if isinstance(reference, dict):
        assert set(ours) == set(reference), f"{path}: {sorted(ours)} and {sorted(reference)}"
        for key in reference:
            assert_same(ours[key], reference[key], tolerance, f"{path}.{key}")
    elif isinstance(reference, (list, tuple)):
        assert len(ours) == len(reference), f"{path}: {ours} and {reference}"
        for index, (mine, other) in enumerate(zip(ours, reference, strict=True)):
            assert_same(mine, other, tolerance, f"{path}[{index}]")
    elif isinstance(reference, float) or hasattr(reference, "shape"):
        mine, other = torch.as_tensor(ours).double(), torch.as_tensor(reference).double()
        assert mine.shape == other.shape, f"{path}: {mine.shape} and {other.shape}"
        difference = f"{path}: {mine} and {other}"
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True, msg=difference)
    else:
        assert ours == reference, f"{path}: {ours!r} and {reference!r}"
