"""The directory in which the commands of the pages run: small files with the names that the pages use."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.examples.conftest import ROOT
from tests.support.chat_model import save_adapters, save_chat_model, save_moe
from tests.support.shell import Shell

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_RECIPE = """\
model: {path: NAME}
data: {train: [chats.jsonl, faq.jsonl], held_out: 2, max_length: 64}
arguments: {output_dir: runs/my, max_steps: 2, per_device_train_batch_size: 2, save_steps: 1, learning_rate: 1.0e-3}
"""
_RUNS = """\
ds-trainer train recipe.yaml --arguments.output_dir OUTPUT_DIR
mkdir -p runs && cp -r OUTPUT_DIR runs/chat-8b && cp -r OUTPUT_DIR runs/chat-8b-lora
ds-trainer checkpoint convert OUTPUT_DIR/checkpoint-2 --to universal --format universal && mv universal/global_step2 SRC
ds-trainer checkpoint convert SRC --to converted && mv converted/checkpoint-2 CONVERTED
"""
_SCRIPT = """\
import torch
from MODULE import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": ((self.layer(x)[:, 0] - labels) ** 2).mean()}


class TwoSteps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 2


if __name__ == "__main__":
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(output_dir="out")
    (args,) = parser.parse_args_into_dataclasses()
    rows = [{"x": [float(n), 1.0], "labels": float(n)} for n in range(16)]
    Trainer(Model(), args, train_dataset=rows, callbacks=[TwoSteps()]).train()
"""


def make_workshop(path: Path, shell: Shell) -> Path:
    """Write the files to ``path``, which does not exist, and the runs that pages name with ``shell``; returns it."""
    path.mkdir()
    for name in ("chats.jsonl", "conversations.jsonl", "faq.jsonl"):
        rows = [
            {"messages": [{"role": "user", "content": f"{n}{name[0]}?"}, {"role": "assistant", "content": f"{n}!"}]}
            for n in range(240)
        ]
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "question.txt").write_text("What is ZeRO?\n")
    for name, sizes in (("Llama-3.1-8B", _8B), ("Llama-3.1-70B", _70B)):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps({**_LLAMA, **sizes}))
    shutil.copy(path / "Llama-3.1-8B" / "config.json", path)
    save_chat_model(path / "NAME")
    for name in ("MODEL", "meta-llama/Llama-3.1-8B-Instruct"):
        shutil.copytree(path / "NAME", path / name)
    for name in ("RECIPE", "recipe.yaml"):
        (path / name).write_text(_RECIPE)
    save_moe(path / "moe")
    page = (ROOT / "docs" / "how-to" / "train-moe.md").read_text(encoding="utf-8")
    (path / "moe.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    (path / "train.py").write_text(_SCRIPT.replace("MODULE", "ds_trainer"))
    (path / "script.py").write_text(_SCRIPT.replace("MODULE", "transformers"))
    (path / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    save_adapters(path / "runs" / "lora", path / "NAME")
    for name in ("examples", "launch", "ds_configs", "benchmarks"):
        os.symlink(ROOT / name, path / name)
    for line in _RUNS.splitlines():
        done = shell.run(line, path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return path
