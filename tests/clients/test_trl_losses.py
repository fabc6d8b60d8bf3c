"""A recipe on a file of conversations has the losses of TRL's SFTTrainer on the same conversations and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.recipes.jobs import job_of
from ds_trainer.recipes.recipe import load_recipe
from tests.samples.chat.families import FAMILIES, make_tokenizer

# Every step has all samples, so that their order does not matter.
SAMPLES, STEPS, RATE = 12, 5, 5e-3
RECIPE = f"""\
model:
  path: model
data:
  train: conversations.jsonl
  max_length: 256
arguments:
  output_dir: out
  per_device_train_batch_size: {SAMPLES}
  max_steps: {STEPS}
  learning_rate: {RATE}
  lr_scheduler_type: constant
  logging_steps: 1
  save_strategy: "no"
  use_cpu: true
  report_to: none
"""


def conversations() -> list[list[dict[str, str]]]:
    """Conversations of one to three turns."""
    return [
        [
            message
            for turn in range(1 + number % 3)
            for message in (
                {"role": "user", "content": f"What is {number} plus {turn}? " * (1 + number % 2)},
                {"role": "assistant", "content": f"It is {number + turn}. " + "Sure. " * (number % 4)},
            )
        ]
        for number in range(SAMPLES)
    ]


def save_model(directory: Path) -> Any:
    """A small Llama with the template of Llama 3 in TRL, which has generation markers."""
    import trl
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(FAMILIES["llama-3.1"])
    path = Path(trl.__file__).parent / "chat_templates" / "llama3_training.jinja"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, pad_token_id=tokenizer.pad_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


def losses_of_trl(directory: Path, tokenizer: Any, folder: Path) -> list[float]:
    """The logged losses of SFTTrainer on transformers' Trainer."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    arguments = trl.SFTConfig(
        output_dir=str(folder),
        assistant_only_loss=True,
        per_device_train_batch_size=SAMPLES,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        max_length=256,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    dataset = Dataset.from_list([{"messages": messages} for messages in conversations()])
    trainer = trl.SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_a_recipe(folder: Path, *overrides: str) -> list[float]:
    """The logged losses of the recipe."""
    job_of(load_recipe("r.yaml", overrides)).run()
    lines = (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.parametrize("packing", [False, True])
def test_the_losses_are_those_of_trl(packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = save_model(tmp_path / "model")
    rows = [json.dumps({"messages": messages}) for messages in conversations()]
    (tmp_path / "conversations.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    theirs = losses_of_trl(tmp_path / "model", tokenizer, tmp_path / "trl")
    own = losses_of_a_recipe(tmp_path, *(["--arguments.packing", "true"] if packing else []))
    assert theirs[-1] < 0.8 * theirs[0] and len(theirs) == STEPS
    assert own == pytest.approx(theirs, rel=1e-4)
    everything = losses_of_a_recipe(tmp_path, "--data.train_on", "all")  # control: another mask shows
    assert abs(everything[0] - theirs[0]) > 1e-3
