"""``parallelism="auto"`` in real runs on several ranks: one decision, the same global batch, the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.errors import ConfigError
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
CHOSEN = (
    *("zero_stage", "tensor_parallel_size", "context_parallel_size", "sequence_parallel_size"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing"),
)


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (number, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2},
        **{"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1},
    }
    return TrainingArguments(str(folder), **{**values, **given})


def trained(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    args = arguments(folder, **given)
    trainer = Trainer(model, args, train_dataset=samples(64))
    trainer.train()
    return {
        "chosen": {name: getattr(trainer.args, name) for name in CHOSEN},
        "sources": {name: trainer.args.where(name) for name in CHOSEN},
        "total": trainer.get_total_train_batch_size(trainer.args),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "requested": (args.parallelism, args.per_device_train_batch_size, args.zero_stage),
        "stage": trainer._ds_trainer.compiled.zero_stage,
        "hpz": trainer._ds_trainer.compiled.hpz_partition_size,
        "now": trainer.args.parallelism,
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_choose_alike_and_train_as_without_it(world_size: int, tmp_path: Path) -> None:
    found = pool(world_size).run(trained, tmp_path / "auto", {"parallelism": "auto"})
    plain = pool(world_size).run(trained, tmp_path / "plain", {})
    assert all(rank["chosen"] == found[0]["chosen"] for rank in found)
    assert found[0]["total"] == plain[0]["total"] == 2 * 2 * world_size
    assert found[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-3)
    assert found[0]["sources"]["gradient_accumulation_steps"] == "parallelism='auto'"
    assert found[0]["chosen"]["per_device_train_batch_size"] == 2  # it was given, and fits
    assert found[0]["sources"]["per_device_train_batch_size"] == "argument"
    assert found[0]["requested"] == ("auto", 2, None)  # the script's object stays
    assert found[0]["now"] is None


def test_given_values_stay_and_the_global_batch_is_that_of_one_replica_per_rank(tmp_path: Path) -> None:
    given = {"parallelism": "auto", "tensor_parallel_size": 2, "zero_stage": 1, "activation_checkpointing": True}
    found = pool(2).run(trained, tmp_path / "auto", given)
    plain = pool(2).run(trained, tmp_path / "plain", {})
    chosen = found[0]["chosen"]
    assert (chosen["tensor_parallel_size"], chosen["zero_stage"], chosen["activation_checkpointing"]) == (2, 1, True)
    assert found[0]["sources"]["zero_stage"] == "argument"
    assert chosen["per_device_train_batch_size"] * chosen["gradient_accumulation_steps"] == 8
    assert found[0]["total"] == plain[0]["total"] == 8
    assert found[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-3)


def test_a_deepspeed_file_keeps_its_stage(tmp_path: Path) -> None:
    file = {"zero_optimization": {"stage": 2}}
    found = pool(2).run(trained, tmp_path / "auto", {"parallelism": "auto", "deepspeed": file})
    assert (found[0]["chosen"]["zero_stage"], found[0]["stage"], found[0]["total"]) == (None, 2, 8)


def trained_on_two_machines(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """As :func:`trained`, with 2 ranks on each machine, and what is held of the weights within one."""
    import deepspeed

    seen = []
    real = deepspeed.initialize

    def initialize(**values: Any) -> Any:
        made = real(**values)
        seen.append(max(param.ds_secondary_tensor_num_of_groups for param in made[0].module.parameters()))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "initialize", initialize)
        patch.setattr("ds_trainer.training.job_devices.known_local_size", lambda environment: 2)
        return {**trained(folder, given), "groups": seen}


@pytest.mark.extended
def test_hpz_is_chosen_on_two_machines_and_trains_as_without_it(tmp_path: Path) -> None:
    given = {"zero_stage": 3, "tensor_parallel_size": 1}
    plain = pool(4).run(trained, tmp_path / "plain", given)
    auto = {**given, "parallelism": "auto"}
    found = pool(4).run(trained_on_two_machines, tmp_path / "auto", auto)
    assert [rank["hpz"] for rank in found] == [2] * 4
    assert [rank["groups"] for rank in found] == [[2]] * 4
    assert found[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-3)
    for file in ({"zero_optimization": {"overlap_comm": False}}, {"zero_optimization": {"zero_hpz_partition_size": 4}}):
        kept = pool(4).run(trained_on_two_machines, tmp_path / "file", {**auto, "deepspeed": file})
        assert {rank["hpz"] for rank in kept} == {file["zero_optimization"].get("zero_hpz_partition_size", 1)}


def test_a_recipe_has_it_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = "model: {architecture: {model_type: llama}}\ndata: {train: [python-stdlib], sequence_length: 32}\n"
    recipe.write_text(f"{text}arguments:\n  parallelism: auto\n", encoding="utf-8")
    args = load_recipe(recipe).training_arguments()
    assert (args.parallelism, args.where("parallelism")) == ("auto", f"{recipe}:4")
    with pytest.raises(ConfigError, match="parallelism"):
        load_recipe(recipe, ["--arguments.parallelism", "fast"])


def refused(folder: Path, given: dict[str, Any]) -> list[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    with pytest.raises(ConfigError) as error:
        Trainer(model, arguments(folder, parallelism="auto", **given), train_dataset=samples(64))
    return error.value.problems


def test_impossible_values_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    found = pool(2).run(refused, tmp_path, {"tensor_parallel_size": 2, "sequence_parallel_size": 2})
    assert found[0] == found[1]
    assert found[0][0].startswith("parallelism='auto': nothing with ")
    assert "tensor_parallel_size=2, sequence_parallel_size=2" in found[0][0]


def test_another_problem_is_reported_as_itself(tmp_path: Path) -> None:
    (found, *_) = pool(2).run(refused, tmp_path, {"eval_strategy": "steps"})
    assert any("there is no eval_dataset" in problem for problem in found), found


def test_a_module_of_the_user_is_planned_too(tmp_path: Path) -> None:
    args = arguments(tmp_path, parallelism="auto")
    trainer = Trainer(Regression(), args, train_dataset=regression_rows(64))
    assert trainer.get_total_train_batch_size() == 4
    assert trainer.args.activation_checkpointing is False  # it cannot recompute
    trainer.train()
