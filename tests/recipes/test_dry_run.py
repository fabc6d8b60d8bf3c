"""A dry run of N ranks raises what the real start on N ranks raises, word for word, and passes where that passes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_trainer.recipes.dry_run import dry_run_of_model, dry_run_of_recipe
from ds_trainer.training.dry_run import DryRun
from ds_trainer.utils.errors import ConfigError
from tests.support.forks import in_a_fork
from tests.support.pool import pool

CHARACTERS = 40_000
LENGTH = 33  # a block has 32 targets
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Mistake:
    """Values of a recipe that cannot work, and a part of the error."""

    values: dict[str, Any]
    error: str


MISTAKES = {
    "unknown argument": Mistake({"arguments.learning_rat": 1}, "Did you mean"),
    "value out of range": Mistake({"arguments.zero_stage": 9}, "zero_stage=9"),
    "tp does not divide the ranks": Mistake(
        {"arguments.tensor_parallel_size": 3}, "2 ranks cannot be divided by tensor 3"
    ),
    "sequences shorter than their shards": Mistake(
        {
            "arguments.context_parallel_size": 2,
            "model.architecture.max_position_embeddings": 3,
            "data.sequence_length": 3,
        },
        "too short for the 4 chunks",
    ),
    "sp does not divide the heads": Mistake(
        {
            "arguments.sequence_parallel_size": 2,
            "model.architecture.num_attention_heads": 1,
            "model.architecture.num_key_value_heads": 1,
        },
        "sequence_parallel_size",
    ),
    "offload without ZeRO-3": Mistake({"arguments.zero_stage": 1, "arguments.offload_param": "cpu"}, "offload_param"),
    "fp16 on CPUs": Mistake({"arguments.fp16": True}, "fp16 needs a GPU"),
    "batch of the DeepSpeed file": Mistake({"arguments.deepspeed": {"train_batch_size": 7}}, "train_batch_size"),
    "unknown key of DeepSpeed": Mistake(
        {"arguments.deepspeed": {"zero_optimisation": {"stage": 1}}}, "zero_optimization"
    ),
    "two ZeRO stages": Mistake(
        {"arguments.zero_stage": 3, "arguments.deepspeed": {"zero_optimization": {"stage": 1}}}, "stage"
    ),
    "batch that is split among replicas": Mistake(
        {
            "arguments.accelerator_config": {"split_batches": True},
            "arguments.per_device_train_batch_size": 3,
            "arguments.per_device_eval_batch_size": 3,
        },
        "split_batches",
    ),
    "fewer samples than a micro-step": Mistake(
        {"arguments.dataloader_drop_last": True, "arguments.per_device_train_batch_size": 1000}, "is empty"
    ),
    "missing model": Mistake({"model.architecture": None, "model.path": "no/such/model"}, "no/such/model"),
    "missing data": Mistake({"data.train": ["no_such_file.txt"]}, "no_such_file.txt"),
    "too little data": Mistake(
        {"data.sequence_length": 50_000, "model.architecture.max_position_embeddings": 50_000}, "are too few"
    ),
    "unknown field of the model": Mistake({"model.architecture.hidden_sise": 8}, "hidden_size"),
    "unknown adapters": Mistake(
        {"model.peft": {"peft_type": "LORA", "target_modules": ["no_such_layer"]}}, "no_such_layer"
    ),
    "evaluation without data": Mistake({"arguments.eval_strategy": "epoch"}, "eval_dataset"),
    "unknown tracker": Mistake({"arguments.report_to": "wandbb"}, "wandbb"),
    "schedule without its arguments": Mistake(
        {"arguments.lr_scheduler_type": "warmup_stable_decay"}, "warmup_stable_decay"
    ),
    "missing checkpoint": Mistake({"arguments.resume_from_checkpoint": "no/such/checkpoint-1"}, "no/such/checkpoint-1"),
    "no checkpoint": Mistake({"arguments.resume_from_checkpoint": True}, "holds no complete checkpoint"),
    "missing weights": Mistake({"arguments.start_from_weights": "no/such/weights"}, "no/such/weights"),
}


def recipe(folder: Path, **changes: Any) -> Path:
    """A small recipe for CPUs; a key is a dotted name, and None removes it."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * (CHARACTERS // 44))
    content: dict[str, Any] = {
        "model": {"architecture": dict(LLAMA)},
        "data": {"train": [str(folder / "text.txt")], "tokenizer": "bytes", "sequence_length": LENGTH},
        "arguments": {
            "output_dir": str(folder / "run"),
            "max_steps": 2,
            "per_device_train_batch_size": 1,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        },
        "report": {"compression_baselines": False, "sample_tokens": 0},
    }
    for name, value in changes.items():
        *sections, key = name.split(".")
        section = content
        for part in sections:
            section = section[part]
        if value is None:
            section.pop(key)
        else:
            section[key] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def really_started(path: str) -> str | None:
    """The error of this rank when it runs the recipe; None if there is none."""
    from ds_trainer.recipes.jobs import job_of
    from ds_trainer.recipes.recipe import load_recipe

    try:
        job_of(load_recipe(path)).run()
    except ConfigError as error:
        return str(error)
    return None


def rehearsed(path: str, ranks: int, device_type: str = "cpu", overrides: tuple[str, ...] = ()) -> DryRun | str:
    """The dry run of the recipe, or its error."""
    try:
        return dry_run_of_recipe(path, overrides, ranks, 8, device_type)
    except ConfigError as error:
        return str(error)


def rehearsed_with_header(path: str, headers: str) -> DryRun | str:
    """The same where libaio.h is found: asked for where states go to NVMe, but a rehearsal compiles nothing."""
    os.environ["CPATH"] = headers
    return rehearsed(path, 64, "cuda")


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_is_that_of_the_real_start(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    path = str(recipe(tmp_path, **mistake.values))
    dry = in_a_fork(rehearsed, path, 2)
    assert not (tmp_path / "run").exists()
    real = pool(2).run(really_started, path)
    assert mistake.error in str(dry)
    assert real == [dry, dry]


WORLD = {
    "batch of the DeepSpeed file": ({"arguments.deepspeed": {"train_batch_size": 512}}, ("train_batch_size", "512")),
    "sp does not divide the heads of a tensor-parallel rank": (
        {"arguments.tensor_parallel_size": 8, "arguments.sequence_parallel_size": 4},
        ("16 query heads", "cannot be divided among 4 sequence-parallel ranks"),
    ),
    "sizes that do not divide the ranks": (
        {"arguments.tensor_parallel_size": 3},
        ("1024 ranks cannot be divided by tensor 3",),
    ),
    "fewer samples than a micro-step": (
        {"arguments.dataloader_drop_last": True, "arguments.per_device_train_batch_size": 2},
        ("train_dataset is empty", "less than 2048"),
    ),
    "batch that is split among replicas": (
        {
            "arguments.accelerator_config": {"split_batches": True},
            "arguments.per_device_train_batch_size": 512,
            "arguments.per_device_eval_batch_size": 512,
        },
        ("split_batches", "512"),
    ),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", WORLD)
def test_a_mistake_that_only_many_ranks_show(name: str, tmp_path: Path) -> None:
    values, parts = WORLD[name]
    found = in_a_fork(rehearsed, str(recipe(tmp_path, **values)), 1024)
    assert isinstance(found, str)
    assert all(part in found for part in parts), found


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [8, 64, 1024, 4096])
def test_a_good_run_passes(ranks: int, stage: int, tmp_path: Path) -> None:
    found = in_a_fork(rehearsed, str(recipe(tmp_path, **{"arguments.zero_stage": stage})), ranks)
    assert isinstance(found, DryRun), found
    assert f"rank 0 of {ranks:,} ranks succeeded" in list(found.lines())[-1]
    assert found.global_batch_size == ranks
    shards = ranks if stage else 1
    assert found.parameters / shards <= found.updated <= found.parameters / shards + 64 * 24  # padding
    weights = 4 * found.parameters
    assert weights / shards <= found.weight_bytes if stage == 3 else found.weight_bytes == weights
    assert not (tmp_path / "run").exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ({"tensor_parallel_size": 8}, 5),
        ({"tensor_parallel_size": 8, "context_parallel_size": 2, "sequence_parallel_size": 2, "zero_stage": 3}, 9),
        ({"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "bf16": True}, 2),
        ({"zero_stage": 2, "offload_optimizer": "cpu", "bf16": True}, 2),
        ({"zero_stage": 2, "fp16": True}, 2),
        ({"zero_stage": 0, "bf16": True}, 2),
    ],
)
def test_layouts_offload_and_precision_for_gpus(values: dict[str, Any], groups: int, tmp_path: Path) -> None:
    changes = {"arguments.use_cpu": None, **{f"arguments.{name}": value for name, value in values.items()}}
    found = in_a_fork(rehearsed, str(recipe(tmp_path, **changes)), 1024, "cuda")
    assert isinstance(found, DryRun), found
    assert found.groups == groups
    assert ("cpu_adam" in found.operators) == ("offload_optimizer" in values)


def test_adapters_hpz_and_nvme(tmp_path: Path) -> None:
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "libaio.h").touch()
    adapters = {"model.peft": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}}
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    settings = {"arguments.deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 8, **offload}}}
    common = {"arguments.use_cpu": None, "arguments.zero_stage": 3, "arguments.bf16": True}
    before = sorted(tmp_path.rglob("*"))
    found = in_a_fork(rehearsed, str(recipe(tmp_path, **common, **adapters)), 64, "cuda")
    assert isinstance(found, DryRun), found
    assert found.updated == 2 * 2 * -(-64 * 4 // 64)  # matrices of two layers
    found = in_a_fork(rehearsed_with_header, str(recipe(tmp_path, **common, **settings)), str(headers))
    assert isinstance(found, DryRun), found
    assert found.groups == 3
    assert "NVMe" in found.not_rehearsed[0]
    assert {path.name for path in tmp_path.rglob("*")} - {path.name for path in before} == {"recipe.yaml", "text.txt"}


def of_a_70b_model(arguments: dict[str, Any], ranks: int) -> DryRun:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    return dry_run_of_model({"model_type": "llama", **sizes, **heads}, arguments, 4096, ranks, 8, "cuda")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        {"zero_stage": 3, "bf16": True},
        {"zero_stage": 3, "bf16": True, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"zero_stage": 1, "bf16": True, "tensor_parallel_size": 8},
    ],
)
def test_70b_parameters_take_no_memory(arguments: dict[str, Any]) -> None:
    found = in_a_fork(of_a_70b_model, arguments, 1024)
    assert found.parameters == 70_553_706_496
    assert found.peak_memory < 2e9
    tp = arguments.get("tensor_parallel_size", 1)
    embedding = 128256 * 8192 if tp > 1 else 0  # not sliced
    of_rank = (found.parameters - embedding) / tp + embedding
    assert found.updated == pytest.approx(of_rank * tp / 1024, rel=1e-3)
    assert found.weight_bytes == pytest.approx(2 * of_rank / (1024 if arguments["zero_stage"] == 3 else 1), rel=1e-3)


def test_overrides_are_those_of_train(tmp_path: Path) -> None:
    path = str(recipe(tmp_path))
    found = in_a_fork(rehearsed, path, 8, "cpu", ("--arguments.gradient_accumulation_steps", "4"))
    assert isinstance(found, DryRun), found
    assert found.global_batch_size == 32
    assert found.samples == (CHARACTERS // 44 * 44) // (LENGTH - 1)
    assert found.steps_per_epoch == -(-found.samples // 32)
    assert json.loads(json.dumps(found.__dict__))["max_steps"] == 2


def sizes_of_a_real_engine(path: str) -> tuple[int, int, int, int]:
    """Bytes of weights, updated elements, optimizer steps and samples of a step of this rank, after a real step."""
    from ds_trainer.engine.meta_engine import updated_elements
    from ds_trainer.recipes.jobs import job_of
    from ds_trainer.recipes.recipe import load_recipe

    job = job_of(load_recipe(path))
    job.prepare(args := job.arguments())
    trainer = job.make_trainer(args)
    trainer.train()
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in trainer.model.parameters()]
    weights = sum(data.numel() * data.element_size() for data in held)
    return weights, updated_elements(trainer.engine), trainer.state.max_steps, trainer.get_total_train_batch_size()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "bf16", "tp"), [*product((1, 2, 3), (False, True), (1, 2)), (0, False, 1), (0, False, 2), (0, True, 1)]
)
def test_partitions_are_those_of_a_real_engine(stage: int, bf16: bool, tp: int, tmp_path: Path) -> None:
    values = {"arguments.zero_stage": stage, "arguments.bf16": bf16, "arguments.tensor_parallel_size": tp}
    path = str(recipe(tmp_path, **values))
    found = in_a_fork(rehearsed, path, 2)
    assert isinstance(found, DryRun), found
    real = pool(2).run(sizes_of_a_real_engine, path)
    assert real[0] == (found.weight_bytes, found.updated, found.max_steps, found.global_batch_size)


def test_a_resume_is_checked_like_the_real_one(tmp_path: Path) -> None:
    saving = {"arguments.save_strategy": "steps", "arguments.save_steps": 1, "arguments.max_steps": 1}
    assert pool(2).run(really_started, str(recipe(tmp_path, **saving))) == [None, None]
    checkpoint = tmp_path / "run" / "checkpoint-1"
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}

    path = str(recipe(tmp_path, **{"arguments.resume_from_checkpoint": True}))
    found = in_a_fork(rehearsed, path, 1024)
    assert isinstance(found, DryRun), found
    assert "states of checkpoint-1" in found.not_rehearsed[0]

    path = str(recipe(tmp_path, **{"arguments.resume_from_checkpoint": True, "arguments.optim": "sgd"}))
    dry = in_a_fork(rehearsed, path, 2)
    assert isinstance(dry, str)
    assert "optim" in dry
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before
    assert pool(2).run(really_started, path) == [dry, dry]

    weights = next(checkpoint.glob("*.safetensors"), None) or next(checkpoint.glob("rank_00000*"))
    weights.write_bytes(weights.read_bytes()[:-1])
    path = str(recipe(tmp_path, **{"arguments.resume_from_checkpoint": True}))
    dry = in_a_fork(rehearsed, path, 2)
    assert isinstance(dry, str)
    assert str(tmp_path / "run") in dry
    assert pool(2).run(really_started, path) == [dry, dry]


def test_weight_files_are_compared_with_the_model_but_not_read(tmp_path: Path) -> None:
    assert pool(2).run(really_started, str(recipe(tmp_path))) == [None, None]
    (tmp_path / "run").rename(tmp_path / "model")
    saved = {"model.architecture": None, "model.path": str(tmp_path / "model"), "data.tokenizer": None}
    path = str(recipe(tmp_path, **saved, **{"arguments.zero_stage": 3}))
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    weights.write_bytes(whole[:header])
    os.truncate(weights, len(whole))  # zeros
    found = in_a_fork(rehearsed, path, 1024)
    assert isinstance(found, DryRun), found
    assert found.parameters > 10_000

    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    dry = in_a_fork(rehearsed, path, 2)
    assert isinstance(dry, str)
    assert "model.layers.2" in dry
    assert pool(2).run(really_started, path) == [dry, dry]
