"""Checkpoints of DeepSpeed resume here, ours resume in DeepSpeed: the same losses, in other layouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.converters.checkpoint_import import export_universal, import_checkpoint
from ds_trainer.checkpoint.converters.conversion import other_format_at, to_universal
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.protocol.other_formats import CheckpointFormat, detect_format
from ds_trainer.cli.main import main
from ds_trainer.utils.errors import ConfigError
from tests.support import plain_deepspeed as plain
from tests.support.models import tiny_llama
from tests.support.pool import pool

CLOSE = {"rel": 0, "abs": 1e-6}


def resume(checkpoint: str | None, output_dir: str, stage: int, tp: int = 1, **arguments: Any) -> list[float]:
    """Losses of our Trainer from ``checkpoint`` (or the beginning) to step 6."""
    world = torch.distributed.get_world_size()
    values: dict[str, Any] = dict(
        per_device_train_batch_size=plain.GLOBAL_BATCH // (world // tp),
        max_steps=6,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        tensor_parallel_size=tp,
        zero_stage=stage,
        seed=plain.SEED,
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    trainer = Trainer(tiny_llama(), args, train_dataset=plain.make_data())
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def save_ours(output_dir: str, stage: int, tp: int = 1) -> list[float]:
    return resume(None, output_dir, stage, tp, save_strategy="steps", save_steps=3)


# world, stage, tp of DeepSpeed; the same of ours
PAIRS = {
    "1 -> 3": ((2, 1, 1), (2, 3, 1)),
    "3 -> 1, fewer ranks": ((2, 3, 1), (1, 1, 1)),
    "2 -> 2, more ranks": ((1, 2, 1), (2, 2, 1)),
    "0 -> 0": ((2, 0, 1), (1, 0, 1)),
    "tp 2 -> 3": ((2, 1, 2), (2, 3, 1)),
    "3 with tp 2 -> tp 2": ((2, 3, 2), (2, 2, 2)),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_deepspeed_run_resumes_after_conversion(pair: str, tmp_path: Path) -> None:
    (world, stage, tp), (our_world, our_stage, our_tp) = PAIRS[pair]
    wanted = pool(world).run(plain.train_and_save, str(tmp_path / "plain"), stage, tp)[0]
    output = tmp_path / "ours"
    for losses in pool(our_world).run(resume, str(tmp_path / "plain"), str(output), our_stage, our_tp):
        assert losses == pytest.approx(wanted, **CLOSE)
    assert not list(output.glob(".checkpoint*"))  # the converted files are removed again


def test_control_without_optimizer_states_the_losses_differ(tmp_path: Path) -> None:
    """Negative control: without the second moments the losses are others."""
    wanted = pool(1).run(plain.train_and_save, str(tmp_path / "plain"), 1)[0]
    directory = tmp_path / "universal" / "global_step3"
    to_universal(tmp_path / "plain" / "global_step3", directory)
    assert detect_format(tmp_path / "universal").format is CheckpointFormat.DEEPSPEED_UNIVERSAL  # type: ignore[union-attr]
    (losses,) = pool(1).run(resume, str(tmp_path / "universal"), str(tmp_path / "a"), 1)
    assert losses == pytest.approx(wanted, **CLOSE)
    for path in directory.glob("zero/*/exp_avg_sq.pt"):
        torch.save({**torch.load(path), "param": torch.load(path)["param"] * 1.5}, path)
    (losses,) = pool(1).run(resume, str(directory), str(tmp_path / "b"), 1)
    assert losses != pytest.approx(wanted, rel=0, abs=1e-3)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("stage", "tp"), [(1, 1), (3, 1), (2, 2)])
def test_a_converted_checkpoint_resumes_in_deepspeed(stage: int, tp: int, tmp_path: Path) -> None:
    """From stage 1 to stage 3 too, which DeepSpeed's own converter does not manage."""
    wanted = pool(2).run(save_ours, str(tmp_path / "ours"), 1)[0]
    export_universal(tmp_path / "ours" / "checkpoint-3", tmp_path / "universal")
    for losses in pool(2).run(plain.load_universal_and_train, str(tmp_path / "universal"), stage, tp):
        assert losses == pytest.approx(wanted[3:], **CLOSE)


def train_with_transformers(output_dir: str, stage: int) -> list[float]:
    """transformers.Trainer with DeepSpeed; it saves after step 3."""
    import transformers

    from ds_trainer.engine.topology import reset_deepspeed_groups

    reset_deepspeed_groups()
    config = plain.config_of(stage, 1)
    config = {**config, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    args = transformers.TrainingArguments(
        output_dir,
        per_device_train_batch_size=plain.GLOBAL_BATCH // torch.distributed.get_world_size(),
        max_steps=6,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        max_grad_norm=0.0,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=plain.SEED,
        deepspeed=config,
    )
    trainer = transformers.Trainer(tiny_llama(), args, train_dataset=plain.make_data())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_transformers_run_resumes_after_conversion(tmp_path: Path) -> None:
    wanted = pool(2).run(train_with_transformers, str(tmp_path / "theirs"), 2)[0]
    checkpoint = tmp_path / "theirs" / "checkpoint-3"
    assert detect_format(checkpoint).format is CheckpointFormat.HF_TRAINER_DEEPSPEED  # type: ignore[union-attr]
    linear = {"lr_scheduler_type": "linear"}
    losses = pool(1).run(resume_linear, str(checkpoint), str(tmp_path / "ours"), linear)[0]
    assert losses == pytest.approx(wanted, **CLOSE)  # its log of the first steps is kept
    final, converted = import_checkpoint(checkpoint, tmp_path / "converted")
    names = {path.name for path in final.iterdir()}
    assert {"random_state_rank0.pt", "random_state_rank1.pt", "trainer_state.json"} <= names
    assert any("NOT converted: training_args.bin" in note for note in converted.notes)


def resume_linear(checkpoint: str, output_dir: str, arguments: dict[str, Any]) -> list[float]:
    return resume(checkpoint, output_dir, 3, **arguments)


# -- refusals, and the command ----------------------------------------------------------------------------------------


class Malicious:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.path), 0o777, True)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    pool(1).run(plain.train_and_save, str(directory), 1, 1, 1, 1)
    return directory


def copied(shards: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(shards, tmp_path / "plain")
    return tmp_path / "plain"


def test_code_in_a_checkpoint_is_not_executed(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_one, target = copied(shards, tmp_path), tmp_path / "trap"
    path = plain_one / "global_step1" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=False), "client": Malicious(target)}, path)
    with pytest.raises(ConfigError, match=r"may run any code.*trust_checkpoint=True"):
        import_checkpoint(plain_one, tmp_path / "ours")
    assert main(["checkpoint", "convert", str(plain_one), "--to", str(tmp_path / "ours")]) == 2
    assert "may run any code" in capsys.readouterr().err
    assert not target.exists()
    assert not list((tmp_path / "ours").glob(".*"))
    with pytest.raises(Exception, match="trust_checkpoint"):
        pool(1).run(resume, str(plain_one), str(tmp_path / "run"), 1)
    assert not target.exists()
    argv = ["checkpoint", "convert", str(plain_one), "--to", str(tmp_path / "ours"), "--trust-checkpoint"]
    assert main(argv) == 0
    assert target.exists()


def test_checkpoint_convert_command(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, universal = tmp_path / "ours", tmp_path / "universal"
    assert main(["checkpoint", "convert", str(shards), "--to", str(ours)]) == 0
    output = capsys.readouterr().out
    assert "checkpoint-1" in output
    assert "NOT converted: random states" in output
    assert Manifest.read(ours / "checkpoint-1").zero_stage == 1
    assert (
        main(["checkpoint", "convert", str(ours / "checkpoint-1"), "--to", str(universal), "--format", "universal"])
        == 0
    )
    assert (universal / "latest_universal").read_text() == "global_step1"
    assert main(["checkpoint", "convert", str(shards), "--to", str(ours)]) == 2
    assert "checkpoint-1 already exists" in capsys.readouterr().err


def test_a_converted_checkpoint_can_be_exported(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not describe its model: ``--model`` names a directory that does."""
    from safetensors.torch import load_file

    model = tiny_llama()
    model.config.save_pretrained(tmp_path / "model")
    checkpoint = str(import_checkpoint(shards, tmp_path / "ours")[0])
    argv = ["checkpoint", "export", checkpoint, "--to", str(tmp_path / "exported")]
    assert main(argv) == 2
    assert "pass a directory with the model's config.json" in capsys.readouterr().err
    assert main([*argv, "--model", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    assert main([*argv, "--model", str(tmp_path / "model")]) == 2
    assert "architectures" in capsys.readouterr().err  # a configuration that no model has written
    model.save_pretrained(tmp_path / "model")
    assert main([*argv, "--model", str(tmp_path / "model")]) == 0
    trained = torch.load(shards / "global_step1" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported and all(torch.equal(exported[name], trained[name]) for name in exported)
    assert set(exported) == set(load_file(tmp_path / "model" / "model.safetensors"))
    assert type(model).from_pretrained(tmp_path / "exported").config.vocab_size == model.config.vocab_size
    other = tiny_llama(hidden_size=64)
    other.save_pretrained(tmp_path / "other")
    argv[-1] = str(tmp_path / "more")
    assert main([*argv, "--model", str(tmp_path / "other")]) == 2
    assert " elements" in capsys.readouterr().err and not (tmp_path / "more").exists()


def test_damaged_and_incomplete_checkpoints_are_rejected(shards: Path, tmp_path: Path) -> None:
    files = copied(shards, tmp_path) / "global_step1"
    path = files / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"optim_states.pt cannot be read.*damaged"):
        import_checkpoint(files, tmp_path / "ours")
    path.unlink()
    with pytest.raises(ConfigError, match="contains only weights and no optimizer"):
        import_checkpoint(files, tmp_path / "ours")
    path.write_bytes(content)
    (files / "offloaded_tensors").mkdir()
    with pytest.raises(ConfigError, match="were on NVMe"):
        import_checkpoint(files, tmp_path / "ours")
    with pytest.raises(ConfigError, match="is not a DeepSpeed checkpoint"):
        other_format_at(tmp_path)
    assert not list((tmp_path / "ours").iterdir())


def test_an_optimizer_that_deepspeed_does_not_convert_is_rejected(tmp_path: Path) -> None:
    pool(1).run(plain.train_and_save, str(tmp_path / "plain"), 1, 1, 1, 1, {"sgd": True})
    with pytest.raises(ConfigError, match=r"momentum_buffer, but DeepSpeed's converter.*only those of Adam"):
        import_checkpoint(tmp_path / "plain", tmp_path / "ours")
