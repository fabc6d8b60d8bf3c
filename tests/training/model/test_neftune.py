"""NEFTune: the losses of transformers.Trainer; noise in training only, removed afterwards, the same after a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.model.preparation import noisy_embeddings
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import relative
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.reference_run import OURS, reference_run
from tests.support.runs import compatibility_of, train_and_report

ALPHA = 5.0


class SeedEachStep:
    """The same random numbers at the start of a step in both trainers."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(1000 + state.global_step)


class Seeded(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[type("Seed", (SeedEachStep, TrainerCallback), {})()], **kwargs)


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_are_those_of_transformers(stage: int, tmp_path: Path) -> None:
    import transformers

    callback = type("Seed", (SeedEachStep, transformers.TrainerCallback), {})()
    changes = {"per_device_train_batch_size": 8, "neftune_noise_alpha": ALPHA}
    data = partial(RaggedTokens, 64)
    losses, norms = reference_run(tiny_llama(), data(), tmp_path, trainer_callbacks=[callback], **changes)
    job = partial(train_and_report, tiny_llama, data, str(tmp_path), Seeded, **OURS, zero_stage=stage, **changes)
    (found,) = pool(1).run(job)
    assert relative(found.losses, losses) < 1e-5
    assert relative(found.grad_norms, norms) < 1e-4
    (without,) = pool(1).run(partial(job, neftune_noise_alpha=None))  # negative control
    assert relative(without.losses, losses) > 1e-3


def test_noise_has_the_right_size() -> None:
    model = PlainLanguageModel()
    model.get_input_embeddings = lambda: model.embedding  # type: ignore[assignment]
    tokens = torch.randint(3, 61, (64, 10))
    for shards in (1, 4):
        bound = ALPHA / (10 * shards * 24) ** 0.5
        with noisy_embeddings(model, ALPHA, sequence_shards=shards):
            noise = (model.embedding(tokens) - model.embedding.weight[tokens]).detach()
            assert bound * 0.99 < noise.abs().max() <= bound * 1.0001
            assert noise.var().item() == pytest.approx(bound**2 / 3, rel=0.05)  # uniform
            model.eval()
            assert torch.equal(model.embedding(tokens), model.embedding.weight[tokens])
            model.train()
        assert torch.equal(model.embedding(tokens), model.embedding.weight[tokens])


class Failing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")


def arguments(output_dir: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=4,
        neftune_noise_alpha=ALPHA,
    )
    return TrainingArguments(str(output_dir), **{**values, **changes})


def evaluate_around_training(output_dir: Path, fails: bool) -> tuple[int, list[float], float]:
    """Hooks left on the embeddings, losses of two evaluations inside training, and of one after."""
    model, data = tiny_llama(), RaggedTokens(16)
    args = arguments(output_dir, max_steps=2, learning_rate=0.0, eval_strategy="steps", eval_steps=1)
    callbacks = [Failing] if fails else None
    job = Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    embeddings = model.get_input_embeddings()
    before = len(embeddings._forward_hooks)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            job.train()
    else:
        job.train()
    losses = [entry["eval_loss"] for entry in job.state.log_history if "eval_loss" in entry]
    after = job.evaluate()["eval_loss"]
    job.engine.close()
    return len(embeddings._forward_hooks) - before, losses, after


def test_evaluation_has_no_noise_and_the_hook_is_removed(tmp_path: Path) -> None:
    ((left, losses, after),) = pool(1).run(partial(evaluate_around_training, tmp_path, False))
    assert left == 0
    assert losses == [after, after]  # nothing was learned, and there was no noise
    ((left, _, _),) = pool(1).run(partial(evaluate_around_training, tmp_path, True))
    assert left == 0


def interrupted(output_dir: Path, stage: int) -> tuple[list[float], list[float]]:
    data = RaggedTokens(32)
    args = arguments(output_dir, save_strategy="steps", save_steps=2, zero_stage=stage)
    uninterrupted = Trainer(tiny_llama(), args, train_dataset=data)
    uninterrupted.train()
    losses = compatibility_of(uninterrupted).losses
    uninterrupted.engine.close()
    torch.rand(77)  # elsewhere in the random sequence
    resumed = Trainer(tiny_llama(seed=9), args, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(output_dir / "checkpoint-2"))
    resumed_losses = compatibility_of(resumed).losses
    resumed.engine.close()
    return losses, resumed_losses


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_draws_the_same_noise(stage: int, tmp_path: Path) -> None:
    for losses, resumed_losses in pool(2).run(partial(interrupted, tmp_path, stage)):
        assert resumed_losses == pytest.approx(losses, rel=1e-6)
        assert len(set(resumed_losses)) == 4


class NoEmbeddings(nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (x - labels).square().mean()


def test_models_without_known_embeddings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the input embeddings of NoEmbeddings are unknown"):
        Trainer(NoEmbeddings(), arguments(tmp_path))
