"""Checkpoints of transformers.Trainer without DeepSpeed resume here: the losses and weights of its own run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.converters.checkpoint_import import import_checkpoint, import_hidden
from ds_trainer.checkpoint.converters.conversion import ConversionResult, other_format_at
from ds_trainer.checkpoint.converters.transformers_reader import RunningModel
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.protocol.other_formats import CheckpointFormat, detect_format
from ds_trainer.utils.errors import ConfigError
from tests.support.models import VOCABULARY, RaggedTokens, tiny_llama
from tests.support.plain_deepspeed import grouped
from tests.support.pool import pool

GLOBAL_BATCH, STEPS, SAVED = 8, 6, 3
CLOSE: Any = {"rel": 0, "abs": 1e-5}


def tied() -> Any:
    return tiny_llama(tied=True)


def with_frozen_layer() -> Any:
    model = tiny_llama()
    model.get_submodule("model.layers.0").requires_grad_(False)
    return model


def with_dropout() -> Any:
    return tiny_llama(attention_dropout=0.2)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    )


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return get_peft_model(tiny_llama(), config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "tied": tied,
    "frozen layer": with_frozen_layer,
    "dropout": with_dropout,
    "t5": t5,
    "lora": lora,
}


def settings(world: int, **changes: Any) -> dict[str, Any]:
    values = dict(
        per_device_train_batch_size=GLOBAL_BATCH // world,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        warmup_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=42,
    )
    return {**values, **changes}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_transformers(name: str, directory: Path) -> list[float]:
    """An uninterrupted run of transformers; a checkpoint in the middle, and ``last`` with the weights of the end."""
    import transformers

    args = transformers.TrainingArguments(str(directory), **settings(1, save_steps=SAVED))
    trainer = transformers.Trainer(MODELS[name](), args, train_dataset=RaggedTokens(64, seed=3))
    trainer.train()
    trainer.save_model(str(directory / "last"))
    return losses_of(trainer)


def resume(name: str, checkpoint: str, output_dir: str, stage: int, changes: dict[str, Any] | None = None) -> Any:
    """Losses and learning rates of ours from ``checkpoint`` on; ``last`` has the weights of the end."""
    world = torch.distributed.get_world_size()
    values = settings(world, save_strategy="no", zero_stage=stage, **(changes or {}))
    trainer = Trainer(MODELS[name](), TrainingArguments(output_dir, **values), train_dataset=RaggedTokens(64, seed=3))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(output_dir + "/last")
    trainer.engine.close()
    return losses_of(trainer), [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[float], Path]]:
    found: dict[str, tuple[list[float], Path]] = {}

    def run(name: str) -> tuple[list[float], Path]:
        if name not in found:
            directory = tmp_path_factory.mktemp(name.replace(" ", "_"))
            found[name] = train_with_transformers(name, directory), directory
        return found[name]

    return run


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


# the model; ranks; ZeRO stage
CASES = [
    ("llama", 1, 0),
    ("llama", 2, 0),
    ("llama", 2, 2),
    ("llama", 2, 3),
    ("tied", 2, 3),
    ("frozen layer", 1, 2),
    ("dropout", 1, 0),  # the random state continues
    ("t5", 1, 3),
    ("lora", 1, 0),
    ("lora", 2, 2),
    ("lora", 2, 3),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "world", "stage"), CASES)
def test_a_transformers_run_resumes(name: str, world: int, stage: int, runs: Any, tmp_path: Path) -> None:
    wanted, directory = runs(name)
    checkpoint = directory / f"checkpoint-{SAVED}"
    assert detect_format(checkpoint).format is CheckpointFormat.HF_TRAINER  # type: ignore[union-attr]
    output = tmp_path / "ours"
    state = json.loads((directory / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    for losses, learning_rates in pool(world).run(resume, name, str(checkpoint), str(output), stage):
        assert losses == pytest.approx(wanted, **CLOSE)
        assert learning_rates == pytest.approx(rates, abs=1e-12)
    found, last = weights_in(output / "last"), weights_in(directory / "last")
    assert found.keys() == last.keys()
    for key, tensor in last.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5)
    assert not list(output.glob(".checkpoint*"))  # the converted files are removed again


def test_control_without_optimizer_states_the_losses_differ(runs: Any, tmp_path: Path) -> None:
    """Negative control: without them, the steps after the first are others."""
    wanted, directory = runs("llama")
    checkpoint = copied(directory, tmp_path)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    torch.save({**saved, "state": {}}, checkpoint / "optimizer.pt")
    ((losses, _),) = pool(1).run(resume, "llama", str(checkpoint), str(tmp_path / "ours"), 0)
    assert losses[: SAVED + 1] == pytest.approx(wanted[: SAVED + 1], **CLOSE)
    assert losses[SAVED + 1 :] != pytest.approx(wanted[SAVED + 1 :], rel=0, abs=1e-3)


# -- what is refused, and what is said --------------------------------------------------------------------------------


def copied(directory: Path, tmp_path: Path) -> Path:
    shutil.copytree(directory / f"checkpoint-{SAVED}", tmp_path / "theirs")
    return tmp_path / "theirs"


def convert(
    checkpoint: Path, to: Path, model: Any = None, optimizer: str = "AdamW", follows_metric: bool = False
) -> ConversionResult:
    model = tiny_llama() if model is None else model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in grouped(model)]
    here = RunningModel(model, groups, optimizer, follows_metric)
    return import_hidden(other_format_at(checkpoint), CheckpointDirectory(to), False, running_model=here)[1]


def test_sharded_and_bin_weights_and_rng_states_of_ranks_are_read(runs: Any, tmp_path: Path) -> None:
    """Several files with an index, and pytorch_model.bin, as older versions wrote it."""
    checkpoint = copied(runs("llama")[1], tmp_path)
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    convert(checkpoint, tmp_path / "one")
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    model = tiny_llama()
    model.load_state_dict(weights)
    model.save_pretrained(checkpoint, max_shard_size="10KB")  # type: ignore[operator]
    assert (checkpoint / "model.safetensors.index.json").is_file()
    convert(checkpoint, tmp_path / "index")
    for path in checkpoint.glob("model*"):
        path.unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    convert(checkpoint, tmp_path / "bin")
    one, index, binary = (next((tmp_path / name).glob(".checkpoint*")) for name in ("one", "index", "bin"))
    wanted = load_file(one / "rank_00000.safetensors")
    assert any(torch.equal(tensor.flatten(), weights["lm_head.weight"].flatten()) for tensor in wanted.values())
    for other in (index, binary):
        found = load_file(other / "rank_00000.safetensors")
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    manifest = Manifest.read(one)
    assert manifest.layout["world_size"] == 2
    assert {"random_state_rank0.pt", "random_state_rank1.pt"} <= set(manifest.files)


def test_state_that_is_not_converted_is_reported(runs: Any, tmp_path: Path) -> None:
    checkpoint = copied(runs("llama")[1], tmp_path)
    rounded = {name: t.bfloat16() for name, t in load_file(checkpoint / "model.safetensors").items()}
    save_file(rounded, checkpoint / "model.safetensors", metadata={"format": "pt"})
    torch.save({"scale": 65536.0}, checkpoint / "scaler.pt")
    for path in [*checkpoint.glob("rng_state*.pth"), checkpoint / "scheduler.pt"]:
        path.unlink()
    notes = "\n".join(convert(checkpoint, tmp_path / "ours", optimizer="Lamb").notes)
    assert "master weights start from these rounded values" in notes and "in bfloat16" in notes
    assert "NOT converted: loss scale (scaler.pt)" in notes
    assert "NOT converted: random states" in notes
    assert "NOT converted: learning rate schedule" in notes
    assert "NOT converted: training_args.bin" in notes
    assert "it is not known whether Lamb uses the same states" in notes
    (found,) = (tmp_path / "ours").glob(".checkpoint*")
    masters = load_file(found / "rank_00000.safetensors")
    assert {tensor.dtype for tensor in masters.values() if tensor.dim()} == {torch.float32}


def changed_states(checkpoint: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    saved["state"] = {number: change(of) for number, of in saved["state"].items()}
    torch.save(saved, checkpoint / "optimizer.pt")


def test_refusals(runs: Any, tmp_path: Path) -> None:
    checkpoint, to = copied(runs("llama")[1], tmp_path), tmp_path / "ours"
    with pytest.raises(ConfigError, match=r"only a run with the model can convert it.*resume_from_checkpoint="):
        import_checkpoint(checkpoint, to)
    with pytest.raises(ConfigError, match=r"exp_avg, exp_avg_sq, but SGD requires momentum_buffer"):
        convert(checkpoint, to, optimizer="SGD")
    with pytest.raises(
        ConfigError, match=r"groups of 16 and 5 parameters, but the optimizer of this run has groups of 9 and 3"
    ):
        convert(checkpoint, to, tiny_llama(num_hidden_layers=1))
    with pytest.raises(ConfigError, match="belongs to a different model"):
        convert(checkpoint, to, tiny_llama(hidden_size=64))
    with pytest.raises(ConfigError, match=r"groups of 16 and 5 parameters.*this run has groups of 9,"):
        convert(checkpoint, to, lora())
    with pytest.raises(ConfigError, match=r"scheduler.pt belongs to a schedule that follows the steps"):
        convert(checkpoint, to, follows_metric=True)
    weights = load_file(checkpoint / "model.safetensors")
    save_file({k: t for k, t in weights.items() if k != "model.norm.weight"}, checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weights of a different model: it has no model.norm.weight"):
        convert(checkpoint, to)
    changed_states(checkpoint, lambda of: {**of, "exp_avg_sq": of["exp_avg_sq"].sum(-1)})
    with pytest.raises(ConfigError, match=r"factored states \(Adafactor\).*start_from_weights="):
        convert(checkpoint, to)
    changed_states(checkpoint, lambda of: {"state1": of["exp_avg"].byte(), "qmap1": torch.zeros(256)})
    with pytest.raises(ConfigError, match=r"8-bit states \(qmap1, state1\).*start_from_weights="):
        convert(checkpoint, to)
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(ConfigError, match=r"no optimizer.pt \(it was written with save_only_model=True.*start_from"):
        convert(checkpoint, to)
    assert not list(to.iterdir())  # nothing is left


class Malicious:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_checkpoint_is_not_executed(file: str, runs: Any, tmp_path: Path) -> None:
    checkpoint = copied(runs("llama")[1], tmp_path)
    torch.save({"state": {}, "param_groups": [], "more": Malicious(tmp_path / "trap")}, checkpoint / file)
    with pytest.raises(ConfigError, match=r"may run any code.*trust_checkpoint=True"):
        convert(checkpoint, tmp_path / "ours")
    assert not (tmp_path / "trap").exists()
