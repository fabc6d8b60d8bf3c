"""Scripts as they are: models of ``from_pretrained`` around and in a training at ZeRO 3."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.engine.loading.creation_memory import return_freed_memory
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

OPTIONS: dict[str, Any] = dict(max_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True, optim="sgd")


def private_bytes() -> int:
    """Memory of this process that no file backs and no other process shares."""
    gc.collect()
    return_freed_memory()  # else what an earlier test has freed would be used again unseen
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_Dirty:"))


class Loads(TrainerCallback):
    """Loads another model in the middle of training, on the main process alone, as a callback for samples does."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.found: dict[str, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.integrations import is_deepspeed_zero3_enabled

        self.found["enabled"] = is_deepspeed_zero3_enabled()
        if state.is_world_process_zero:
            loaded = AutoModelForCausalLM.from_pretrained(self.directory)
            fresh = AutoModelForCausalLM.from_config(loaded.config)
            self.found["plain"] = not any(hasattr(p, "ds_id") for m in (loaded, fresh) for p in m.parameters())
            self.found["weights"] = {name: p.detach().clone() for name, p in loaded.named_parameters()}
            loaded.generate(torch.tensor([[3, 4]]), max_new_tokens=1, synced_gpus=False)


def what_transformers_believes(directory: str, output_dir: str, stage: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.integrations import is_deepspeed_zero3_enabled

    gc.collect()
    found: dict[str, Any] = {}
    args = TrainingArguments(output_dir, zero_stage=stage, **OPTIONS)
    found["before"] = is_deepspeed_zero3_enabled()
    model = AutoModelForCausalLM.from_pretrained(directory)  # after the arguments, as transformers wants it
    loads = Loads(directory)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(16), callbacks=[loads])
    trainer.evaluate(RaggedTokens(8))
    found["evaluated"] = is_deepspeed_zero3_enabled()
    trainer.train()
    found["trained"] = is_deepspeed_zero3_enabled()
    # With what transformers chooses by itself: ranks that end at different lengths would hang if it chose wrong.
    length = 3 + torch.distributed.get_rank()
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=length, min_new_tokens=length, do_sample=False)
    trainer.engine.close()
    found["closed"] = is_deepspeed_zero3_enabled()
    return {**found, **loads.found}


def test_transformers_sees_zero_3_only_while_a_model_is_sharded(tmp_path: Path) -> None:
    saved = tiny_llama(seed=5)
    saved.save_pretrained(tmp_path / "model")
    job = partial(what_transformers_believes, str(tmp_path / "model"), str(tmp_path / "out"))
    first, second = pool(2).run(job, 3)
    for found in (first, second):
        asked = ("before", "evaluated", "enabled", "trained", "closed")
        assert [found[name] for name in asked] == [False, True, True, True, False]
    assert first["plain"]
    for name, weight in saved.named_parameters():
        assert torch.equal(first["weights"][name], weight)
    assert not any(pool(2).run(job, 2)[0][name] for name in ("evaluated", "enabled", "trained"))


WIDE: dict[str, Any] = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, vocab_size=4096)


def memory_of_a_script(directory: str, output_dir: str) -> dict[str, Any]:
    """Private bytes beyond those before the model was loaded: when it is loaded, sharded, and where it is copied."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from transformers import AutoModelForCausalLM

    def more() -> int:
        return private_bytes() - before

    before = private_bytes()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory)
    found: dict[str, Any] = {"size": sum(p.nbytes for p in model.parameters()), "loaded": more()}
    found["largest"] = max(p.nbytes for p in model.parameters())
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    found["copied"] = more() - found["loaded"]
    del copies
    args = TrainingArguments(output_dir, zero_stage=3, **OPTIONS)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(16))
    before, configure = private_bytes(), DeepSpeedEngine._configure_distributed_model

    def configured(engine: Any, module: Any) -> None:
        found["sharded"] = more()
        configure(engine, module)

    DeepSpeedEngine._configure_distributed_model = configured
    try:
        trainer.train()
    finally:
        DeepSpeedEngine._configure_distributed_model = configure
    trainer.engine.close()
    return found


@pytest.mark.extended
def test_a_memory_mapped_model_takes_the_memory_of_one_shard(tmp_path: Path) -> None:
    """Two ranks, a model of about 200 MB: loaded it is mapped, sharded it is half of it in each rank."""
    tiny_llama(**WIDE).save_pretrained(tmp_path / "model")
    for found in pool(2).run(memory_of_a_script, str(tmp_path / "model"), str(tmp_path / "out"), timeout=600):
        assert found["size"] > 180e6
        assert found["loaded"] < 0.1 * found["size"]
        assert found["copied"] > 0.9 * found["size"]  # the control: this is what a copy looks like
        assert found["sharded"] < 0.5 * found["size"] + 2 * found["largest"]


def believed_by_the_next_run(output_dir: str) -> list[bool]:
    """What transformers believes in a run without sharded weights, while an earlier Trainer is still there."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    found, trainers = [], []
    for stage in (3, 1):
        args = TrainingArguments(f"{output_dir}/{stage}", zero_stage=stage, **OPTIONS)
        trainers.append(Trainer(tiny_llama(seed=5), args, train_dataset=RaggedTokens(16)))
        trainers[-1].train()
        found.append(is_deepspeed_zero3_enabled())
    for trainer in reversed(trainers):
        trainer.engine.close()
    return [*found, is_deepspeed_zero3_enabled()]


def test_the_newest_engine_says_whether_weights_are_sharded(tmp_path: Path) -> None:
    assert pool(1).run(believed_by_the_next_run, str(tmp_path)) == [[True, False, False]]
