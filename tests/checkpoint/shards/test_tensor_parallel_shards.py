"""Tensor parallelism: weights are saved as one process saves them, and runs resume bit for bit."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights
from tests.support.tensor_models import FAMILIES

UNEVEN = partial(tiny_llama, tied=True, num_attention_heads=3, num_key_value_heads=3, hidden_size=48, head_dim=16)


def make(make_model: Any, output_dir: str, stage: int, tp: int, **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    args = TrainingArguments(output_dir, **{**values, **arguments}, zero_stage=stage, tensor_parallel_size=tp, seed=3)
    return Trainer(make_model(), args, train_dataset=RaggedTokens(37), eval_dataset=RaggedTokens(5, seed=1))


def saved(make_model: Any, output_dir: str, stage: int, tp: int) -> tuple[str, bool]:
    """Digest of the file after a step that changes nothing, and whether the trained file matches the ranks' weights."""
    from safetensors.torch import load_file

    untouched = make(make_model, output_dir, stage, tp, learning_rate=0.0, weight_decay=0.0, max_steps=1)
    untouched.train()
    untouched.save_model(f"{output_dir}/untouched")
    digest = hashlib.sha256(Path(f"{output_dir}/untouched/model.safetensors").read_bytes()).hexdigest()
    untouched.engine.close()
    trainer = make(make_model, output_dir, stage, tp)
    trainer.train()
    trainer.save_model(f"{output_dir}/trained")
    live, written = whole_weights(trainer), load_file(f"{output_dir}/trained/model.safetensors")
    trainer.engine.close()
    assert len(written) > 10
    return digest, all(torch.equal(live[name], tensor) for name, tensor in written.items() if name in live)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "stage"),
    [("uneven", 0), ("uneven", 1), ("uneven", 2), ("uneven", 3), ("kv", 0), ("kv", 3), ("t5", 0), ("opt", 3)],
)
def test_the_file_matches_that_of_one_process(family: str, stage: int, tmp_path: Path) -> None:
    model = {"uneven": UNEVEN, "kv": FAMILIES["llama with 1 key-value head"]}.get(family) or FAMILIES[family]
    ((wanted, _),) = pool(1).run(saved, model, str(tmp_path / "one"), 0, 1)
    for digest, matches in pool(2).run(saved, model, str(tmp_path / "two"), stage, 2):
        assert digest == wanted
        assert matches


def trained(output_dir: str, stage: int, steps: list[int], **arguments: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a run that is stopped at each of ``steps`` and resumed."""
    for count in steps:
        trainer = make(
            UNEVEN,
            output_dir,
            stage,
            2,
            max_steps=count,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=2,
            **arguments,
        )
        trainer.train(resume_from_checkpoint=count != steps[0])
        weights = whole_weights(trainer)
        trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_resumes_bit_for_bit(stage: int, tmp_path: Path) -> None:
    through = pool(2).run(trained, str(tmp_path / "through"), stage, [4])
    halves = pool(2).run(trained, str(tmp_path / "halves"), stage, [2, 4])
    for (losses, weights), (resumed_losses, same) in zip(through, halves, strict=True):
        assert len(losses) == 4
        assert losses == resumed_losses
        assert all(torch.equal(weights[name], same[name]) for name in weights)


def best(output_dir: str, stage: int) -> tuple[bool, bool]:
    """Whether the final weights are those of the best checkpoint, and whether they are those of the last step."""
    evaluated: list[dict[str, torch.Tensor]] = []

    class Recording(Trainer):
        def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
            evaluated.append(whole_weights(self))
            return {"eval_loss": float(len(evaluated))}  # gets worse

    trainer = make(UNEVEN, output_dir, stage, 2)
    trainer = Recording(
        UNEVEN(),
        TrainingArguments(
            **{
                **{
                    name: getattr(trainer.args, name)
                    for name in ("output_dir", "max_steps", "learning_rate", "use_cpu")
                },
                "zero_stage": stage,
                "tensor_parallel_size": 2,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "save_steps": 2,
                "load_best_model_at_end": True,
                "disable_tqdm": True,
                "per_device_train_batch_size": 8,
            }
        ),
        train_dataset=RaggedTokens(37),
        eval_dataset=RaggedTokens(5),
    )
    trainer.train()
    now = whole_weights(trainer)
    trainer.engine.close()
    first, last = (all(torch.equal(now[name], then[name]) for name in now) for then in (evaluated[0], evaluated[-1]))
    return first, last


@pytest.mark.parametrize("stage", [0, 3])
def test_the_best_model_is_loaded(stage: int, tmp_path: Path) -> None:
    assert pool(2).run(best, str(tmp_path), stage) == [(True, False)] * 2


def adapters(output_dir: str, stage: int, tp: int) -> str:
    """Digest of the adapters' file after a step that changes nothing."""
    import peft

    def model() -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        return peft.get_peft_model(FAMILIES["qwen2"](), config)

    trainer = make(model, output_dir, stage, tp, learning_rate=0.0, weight_decay=0.0, max_steps=1)
    trainer.train()
    trainer.save_model(f"{output_dir}/adapters")
    trainer.engine.close()
    return hashlib.sha256(Path(f"{output_dir}/adapters/adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_are_saved_completely(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    wanted = pool(1).run(adapters, str(tmp_path / "one"), 0, 1)
    assert pool(2).run(adapters, str(tmp_path / "two"), stage, 2) == wanted * 2
