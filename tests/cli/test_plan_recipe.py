"""``ds-trainer plan RECIPE``: what a recipe says, what overrides it, and what contradicts the plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_trainer import TrainingArguments
from ds_trainer.cli.main import main
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, NOTHING_FITS
from tests.planner.test_anchors import LLAMA_8B

RECIPE = {
    "model": {"architecture": {**LLAMA_8B, "max_position_embeddings": 8192}},
    "data": {"train": ["python-stdlib"], "tokenizer": "bytes", "sequence_length": 2048},
    "arguments": {
        "output_dir": "runs/x",
        "fp16": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "tensor_parallel_size": 2,
        "offload_optimizer": "cpu",
        "learning_rate": 1e-3,
    },
}


def recipe(path: Path, **model: object) -> str:
    path.write_text(yaml.safe_dump({**RECIPE, "model": {**RECIPE["model"], **model}}))
    return str(path)


def test_a_recipe_has_its_own_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml")
    assert main(["plan", path, "--tensor-parallel-size", "1", "--offload", "none"]) == DONE
    printed = capsys.readouterr().out
    assert "8 H100-80GB, 2,048 tokens a sequence, global batch 32: " in printed
    assert (
        f"From {path}: 2,048 tokens (data.sequence_length), a global batch of 32 = 4 per device x 2 accumulation x 4 "
        "data parallel, fp16."
    ) in printed
    command = shlex.split(printed.split("Start the first plan with\n")[1])
    assert command[:5] == ["ds-trainer", "launch", "--nproc-per-node", "8", path]
    started = load_recipe(path, command[5:]).training_arguments()
    # What the plan does not have must not come from the file.
    assert (started.tensor_parallel_size, started.offload_optimizer, started.fp16) == (1, "none", True)
    assert started.learning_rate == 1e-3
    assert not started.problems()


@pytest.mark.parametrize("name", ["use_cpu", "no_cuda"])
@pytest.mark.parametrize("how", [[], ["--as-written"]], ids=["searched", "as written"])
def test_a_recipe_for_cpus_is_started_on_the_planned_devices(
    name: str, how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "arguments": {**RECIPE["arguments"], name: True}}))
    assert main(["plan", str(path), *how]) == DONE
    printed = capsys.readouterr().out
    assert "is a recipe for CPUs" in printed
    command = next(line for line in printed.splitlines() if line.startswith("  ds-trainer launch"))
    assert load_recipe(str(path), shlex.split(command)[5:]).training_arguments().use_cpu is False
    recipe(path)
    assert main(["plan", str(path), *how]) == DONE
    printed = capsys.readouterr().out
    assert "use_cpu" not in printed and "for CPUs" not in printed


def test_options_and_overrides_win_over_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml")
    overrides = ["--arguments.gradient_accumulation_steps", "4", "--arguments.seed=7", "--arguments.bf16", "false"]
    assert main(["plan", path, "--seq-len", "1K", "--precision", "bf16", "--json", *overrides]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["goal"]["length"] == 1024 and found["goal"]["global_batch"] == 64
    assert found["deepspeed_config"]["bf16"]["enabled"] and not found["deepspeed_config"]["fp16"]["enabled"]
    command = shlex.split(found["plans"][0]["command"])
    assert command.count("--arguments.gradient_accumulation_steps") == command.count("--arguments.bf16") == 1
    started = load_recipe(path, command[5:]).training_arguments()
    assert (started.seed, started.bf16, started.fp16) == (7, True, False)
    wanted = found["plans"][0]["arguments"]["gradient_accumulation_steps"]
    assert started.gradient_accumulation_steps == wanted
    assert main(["plan", path, "--arguments.lerning_rate", "1"]) == CANNOT_WORK
    assert "lerning_rate" in capsys.readouterr().err


def test_a_recipe_that_contradicts_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = recipe(tmp_path / "job.yaml"), ["--zero-stage", "3"]
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    config = ["--arguments.deepspeed", str(tmp_path / "ds.json")]
    assert main(["plan", path, *other]) == DONE
    assert "But " not in capsys.readouterr().out
    assert main(["plan", path, *other, *config]) == DONE
    assert "zero_optimization.stage" in capsys.readouterr().out.split("But ")[1]
    assert main(["plan", path, *other, *config, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert "zero_optimization.stage" in found["contradictions"][0] and "deepspeed_config" not in found
    assert main(["plan", path, *other, *config, "--config", "-"]) == CANNOT_WORK


def test_the_evaluation_of_a_recipe_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml")
    held_out = ["--data.held_out_every", "10", "--arguments.per_device_eval_batch_size"]
    assert main(["plan", path, *held_out, "16", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert "batches of evaluation of 16 per device" in found["notes"][0]
    assert {plan["arguments"]["per_device_eval_batch_size"] for plan in found["plans"]} == {16}
    assert main(["plan", path, *held_out, "4096"]) == NOTHING_FITS
    assert "needs" in (printed := capsys.readouterr().out) and ": evaluation" in printed
    assert "per_device_eval_batch_size=1" in printed


def test_adapters_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml", peft={"peft_type": "LORA", "r": 16})
    assert main(["plan", path]) == DONE
    printed = capsys.readouterr().out
    assert "42 M trained" in printed and "LoRA of rank 16" in printed
    assert main(["plan", path, "--lora-rank", "8"]) == DONE
    assert "21 M trained" in capsys.readouterr().out
    path = recipe(tmp_path / "job.yaml", peft={"peft_type": "IA3"})
    assert main(["plan", path]) == CANNOT_WORK
    assert "IA3 are unknown to plan" in capsys.readouterr().err


def test_a_recipe_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml")
    assert main(["plan", path, "--as-written", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    (plan,) = found["plans"]
    args = load_recipe(path).training_arguments()
    assert found["tried"] == 1 and plan["global_batch"] == 4 * 2 * 4  # per device, accumulation, data parallel of tp 2
    for name in ("tensor_parallel_size", "offload_optimizer", "fp16", "per_device_train_batch_size"):
        assert plan["arguments"][name] == getattr(args, name), name
    assert plan["arguments"]["zero_stage"] == found["deepspeed_config"]["zero_optimization"]["stage"]
    assert plan["command"] == f"ds-trainer launch --nproc-per-node 8 {path}"
    # The search has the same way to run, with the same figures.
    fixed = ["--tensor-parallel-size", "2", "--micro-batch", "4", "--offload", "optimizer", "--zero-stage"]
    features = ["--activation-checkpointing", "on", "--chunked-loss", "on", "--tiled-mlp", "off"]
    others = [str(plan["arguments"]["zero_stage"]), *features, "--offload-activations", "off", "--global-batch", "32"]
    assert main(["plan", path, "--json", "--top", "99", *fixed, *others]) == DONE
    every = json.loads(capsys.readouterr().out)["plans"]
    (same,) = [one for one in every if one["arguments"] == plan["arguments"]]
    assert same["memory"] == plan["memory"] and same["seconds"] == plan["seconds"]


def test_a_recipe_as_it_is_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml")
    assert main(["plan", path, "--as-written", "--device", "L4"]) == NOTHING_FITS
    printed = capsys.readouterr().out
    assert "the recipe as it is" in printed and "would fit with" in printed
    assert main(["plan", path, "--as-written", "--arguments.per_device_train_batch_size=1", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["plans"][0]["global_batch"] == 8


def test_pairs_and_frozen_weights_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.vision_models import make_model, make_processor

    def planned(name: str, **content: object) -> dict[str, object]:
        data = {"train": ["python-stdlib"], "max_length": 64}
        arguments = {"output_dir": "runs/x", "per_device_train_batch_size": 2, "bf16": True, "zero_stage": 2}
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"data": data, "arguments": arguments, **content}))
        assert main(["plan", str(path), "--as-written", "--json", "--devices-per-node", "2"]) == DONE
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found, dict)
        return found

    (tmp_path / "llama").mkdir()
    config = {**LLAMA_8B, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    model = {"path": str(tmp_path / "llama")}
    pairs = planned("dpo.yaml", task="dpo", model=model)
    assert pairs["plans"][0]["global_batch"] == 2 * 2 * 2  # type: ignore[index]
    assert "a second copy of the weights" in str(pairs["notes"])
    assert planned("sft.yaml", model=model)["plans"][0]["global_batch"] == 2 * 2  # type: ignore[index]

    vision = make_model("llava", make_processor("llava"))
    (tmp_path / "vision").mkdir()
    vision.config.save_pretrained(tmp_path / "vision")
    about = {"path": str(tmp_path / "vision")}
    whole = planned("whole.yaml", task="vision_language", model=about)
    part = planned("part.yaml", task="vision_language", model={**about, "freeze": ["vision_tower"]})
    tower = sum(p.numel() for name, p in vision.named_parameters() if "vision_tower" in name)
    assert whole["model"]["trainable"] - part["model"]["trainable"] == tower > 0  # type: ignore[index]


def test_tasks_have_their_own_heads_and_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bert").mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 64,
    }
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))

    def planned(task: object) -> dict[str, Any]:
        content = {
            "task": task,
            "model": {"path": str(tmp_path / "bert")},
            "data": {"train": ["python-stdlib"], "max_length": 64},
            "arguments": {"output_dir": "runs/x", "per_device_train_batch_size": 32, "bf16": True},
        }
        (tmp_path / "task.yaml").write_text(yaml.safe_dump(content))
        assert main(["plan", str(tmp_path / "task.yaml"), "--as-written", "--json", "--devices-per-node", "2"]) == DONE
        found = json.loads(capsys.readouterr().out)
        return {**found["plans"][0], "by_kind": found["model"]["by_kind"]}

    classifier, embedding = planned("classification"), planned("embedding")
    assert classifier["arguments"]["per_device_train_batch_size"] == 32
    assert embedding["arguments"]["per_device_train_batch_size"] == 64  # both texts of a pair
    cached = planned({"name": "embedding", "options": {"mini_batch_size": 4}})
    assert cached["arguments"]["per_device_train_batch_size"] == 8
    assert cached["global_batch"] == embedding["global_batch"]
    assert cached["memory"]["device"] < embedding["memory"]["device"]
    assert "head" not in embedding["by_kind"]  # no rows of a vocabulary
    reward = planned("reward")
    assert reward["arguments"]["activation_checkpointing"] is True  # TRL's default
    assert reward["arguments"]["per_device_train_batch_size"] == 64


def test_as_written_takes_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path / "job.yaml")
    assert main(["plan", path, "--as-written", "--zero-stage", "2", "--global-batch", "8"]) == CANNOT_WORK
    assert "--zero-stage, --global-batch cannot be given" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["plan", str(tmp_path / "config.json"), "--as-written"]) == CANNOT_WORK
    assert "needs a recipe" in capsys.readouterr().err


def hpz_recipe(path: Path, deepspeed: dict[str, Any] | None) -> str:
    arguments = {"output_dir": "runs/x", "bf16": True, "learning_rate": 1e-3, "tensor_parallel_size": 1}
    more = {} if deepspeed is None else {"deepspeed": deepspeed}
    path.write_text(yaml.safe_dump({**RECIPE, "arguments": {**arguments, **more}}))
    return str(path)


@pytest.mark.parametrize(
    ("deepspeed", "size"),
    [
        (None, 8),
        ({"zero_optimization": {"overlap_comm": True}}, 1),
        ({"zero_optimization": {"zero_hpz_partition_size": 4}}, 4),
    ],
)
def test_hpz_is_in_the_command_and_in_the_configuration(
    deepspeed: dict[str, Any] | None, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hpz_recipe(tmp_path / "job.yaml", deepspeed)
    options = ["--zero-stage", "3", "--tensor-parallel-size", "1", "--offload", "none", "--nodes", "16"]
    assert main(["plan", path, *options, "--global-batch", "512", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    best = found["plans"][0]
    wanted = {"zero_optimization": {"zero_hpz_partition_size": size}} if size > 1 else None
    assert best["arguments"].get("deepspeed") == wanted
    assert found["deepspeed_config"]["zero_optimization"].get("zero_hpz_partition_size", 1) == size
    assert not found["contradictions"]
    command = shlex.split(best["command"])
    assert load_recipe(path, command[command.index(path) + 1 :]).training_arguments().deepspeed == (deepspeed or wanted)


def test_hpz_that_does_not_divide_the_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hpz_recipe(tmp_path / "job.yaml", {"zero_optimization": {"zero_hpz_partition_size": 3}})
    assert main(["plan", path, "--nodes", "2"]) == CANNOT_WORK
    assert "zero_hpz_partition_size=3 in the recipe's DeepSpeed configuration" in capsys.readouterr().err


def test_hpz_without_a_recipe_is_an_argument_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options = ["--zero-stage", "3", "--tensor-parallel-size", "1", "--offload", "none", "--nodes", "16"]
    assert main(["plan", str(tmp_path), *options, "--seq-len", "2K", "--solve", "micro-batch", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)
    assert main(["plan", str(tmp_path), *options, "--seq-len", "2K", "--global-batch", "512", "--json"]) == DONE
    command = shlex.split(json.loads(capsys.readouterr().out)["plans"][0]["command"])
    given = TrainingArguments("x", deepspeed=command[command.index("--deepspeed") + 1])
    assert json.loads(given.deepspeed) == {"zero_optimization": {"zero_hpz_partition_size": 8}}
