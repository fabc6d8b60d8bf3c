"""Training from a name gives the losses and the weights of a model that is handed in, with every layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.engine.weights import host_copies, saved_tensors
from tests.support.models import RaggedTokens
from tests.support.pool import pool
from tests.support.saved_models import CLASSES, Labelled, saved

Result = tuple[list[float], dict[str, torch.Tensor]]
NAMES = ("llama", "tied llama", "t5", "bert classifier", "lora")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank, ZeRO 0": (1, {"zero_stage": 0}),
    "1 rank, ZeRO 3": (1, {"zero_stage": 3}),
    "2 ranks, ZeRO 0": (2, {"zero_stage": 0}),
    "2 ranks, ZeRO 2": (2, {"zero_stage": 2}),
    "2 ranks, ZeRO 3": (2, {"zero_stage": 3}),
}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", modules_to_save=["lm_head"])


def train(name: str, model: Any, output_dir: str, ranks: int, arguments: dict[str, Any]) -> Result:
    """Three steps over global batches of four; losses and whole weights."""
    args = TrainingArguments(
        output_dir,
        use_cpu=True,
        max_steps=3,
        logging_steps=1,
        optim="sgd",  # Adam makes a step of the rounding of a gradient that is nearly zero
        learning_rate=0.3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4 // ranks,
        save_strategy="no",
        self_test="never",
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    data: Any = Labelled(16) if "classifier" in name else RaggedTokens(16)
    trainer = Trainer(model, args, train_dataset=data, peft_config=lora() if name == "lora" else None)
    metrics = trainer.train().metrics
    tensors = saved_tensors(trainer.model)
    (weights,) = host_copies(tensors, [list(tensors)], keep=True)
    trainer.engine.close()
    named = isinstance(model, str)
    assert ("load_seconds" in metrics) == named and (not named or metrics["load_bytes_read"] > 0)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights


def train_all(directory: str, ranks: int, arguments: dict[str, Any]) -> dict[str, Result]:
    return {name: train(name, f"{directory}/{base(name)}", f"{directory}/out", ranks, arguments) for name in NAMES}


def base(name: str) -> str:
    return "llama" if name == "lora" else name


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in CLASSES:
        saved(name, root / name)
    return root


@functools.cache
def handed_in(directory: Path, name: str) -> Result:
    """One process, a model of transformers."""
    import transformers

    model = getattr(transformers, CLASSES[base(name)]).from_pretrained(directory / base(name))
    return train(name, model, str(directory / "out"), 1, {"zero_stage": 0})


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_weights_are_those_of_one_process(layout: str, directory: Path) -> None:
    ranks, arguments = LAYOUTS[layout]
    found = pool(ranks).run(train_all, str(directory), ranks, arguments)[0]
    for name in NAMES:
        losses, weights = found[name]
        expected_losses, expected = handed_in(directory, name)
        assert losses == pytest.approx(expected_losses, abs=2e-6), name
        assert weights.keys() == expected.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(
                tensor,
                expected[key],
                rtol=1e-4,
                atol=3e-6,
                msg=lambda text, key=key, name=name: f"{name}: {key}: {text}",
            )


def test_other_weights_give_other_losses(directory: Path) -> None:
    """The negative control of the comparison above."""
    assert handed_in(directory, "llama")[0] != pytest.approx(handed_in(directory, "tied llama")[0], abs=1e-3)
