"""``ds-trainer init``: a recipe that suits the data, the model and the devices; what is missing is said at once."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.yaml_reader import read_yaml
from ds_trainer.cli.main import main
from ds_trainer.recipes.devices import parse_devices
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.recipes.schema import recipe_schema
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE
from tests.support.chat_model import save_chat_model
from tests.support.json_schema import schema_problems
from tests.support.vision_models import picture, save_vision_model

WORDS = ("red", "green", "blue", "cat", "dog", "fox")
PAIRS = [f"{first} {second}" for first in WORDS for second in WORDS]
ROWS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"messages": [{"role": "user", "content": f"say {pair}"}, {"role": "assistant", "content": pair}]}
        for pair in PAIRS
    ],
    "text": [{"text": f"{pair} " * 10} for pair in PAIRS],
    "preferences": [{"prompt": f"say {pair}", "chosen": pair, "rejected": pair[::-1]} for pair in PAIRS],
    "labels": [{"text": pair, "label": pair.split()[0]} for pair in PAIRS],
    "triplets": [{"anchor": f"say {pair}", "positive": pair, "negative": pair[::-1]} for pair in PAIRS],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and data of every kind."""
    path = tmp_path_factory.mktemp("init")
    save_chat_model(path / "base")
    for name, rows in ROWS.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_vision_model(path / "vision", "llava")
    picture(16, 20, 0).save(path / "a.png")
    images = [{**row, "images": ["a.png"] * (index % 3)} for index, row in enumerate(ROWS["chat"])]
    (path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in images))
    return path


def init(folder: Path, data: str, *more: str, out: str = "r.yaml") -> int:
    return main(["init", str(folder / out), "--model", str(folder / "base"), "--data", str(folder / data), *more])


@pytest.mark.parametrize(
    ("data", "task"),
    [
        *(("chat.jsonl", task) for task in ("full", "lora", "qlora")),
        ("text.jsonl", "pretrain"),
        *(("preferences.jsonl", task) for task in ("dpo", "reward")),
        ("labels.jsonl", "classification"),
        ("triplets.jsonl", "embedding"),
    ],
)
def test_the_recipe_is_one_that_train_accepts(folder: Path, data: str, task: str) -> None:
    out = f"{task}.yaml"
    options = ["--task", task, "--devices", "cpu", "--output", "runs/x"]
    assert init(folder, data, *options, out=out) == DONE
    recipe = load_recipe(folder / out)
    assert recipe.arguments["output_dir"] == "runs/x"
    assert recipe.task.name == (task if task in ("dpo", "reward", "classification", "embedding") else "sft")
    assert (recipe.model.peft is not None) == (task in ("lora", "qlora"))
    assert (recipe.model.quantization is not None) == (task == "qlora")
    root, problems = read_yaml((folder / out).read_text(), out)
    assert not problems
    assert list(schema_problems(root.plain(), recipe_schema())) == []


@pytest.mark.parametrize(
    ("data", "task"),
    [
        ("chat", "full"),
        ("text", "sft"),
        ("preferences", "dpo"),
        ("labels", "classification"),
        ("triplets", "embedding"),
    ],
)
def test_defaults_follow_the_data(folder: Path, data: str, task: str) -> None:
    assert init(folder, f"{data}.jsonl", "--yes", "--devices", "cpu", "--force") == DONE
    recipe = load_recipe(folder / "r.yaml")
    assert recipe.task.name == (task if task != "full" else "sft")
    if data != "text":
        assert recipe.data.max_length == 128  # the power of two above the longest sample
    else:
        assert recipe.data.sequence_length == 256  # the positions of the model


def test_sft_is_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As other tools call it. Text is fine-tuned on, too, where ``pretrain`` would be the default."""
    for data in ("chat", "text"):
        assert init(folder, f"{data}.jsonl", "--yes", "--devices", "cpu", "--force", "--task", "sft") == DONE
        assert "Task: full, the one of sft that fits." in capsys.readouterr().out
        recipe = load_recipe(folder / "r.yaml")
        assert recipe.model.peft is None and recipe.data.max_length is not None


def test_a_teacher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--teacher", str(folder / "base"), "--devices", "cpu", "--yes", "--force"]
    assert init(folder, "chat.jsonl", "--task", "full", *options) == DONE
    distillation = load_recipe(folder / "r.yaml").distillation
    assert distillation is not None and distillation.teacher == str(folder / "base")
    assert init(folder, "preferences.jsonl", *options) == CANNOT_WORK
    assert "not for --task dpo" in capsys.readouterr().err


@pytest.mark.cases(1)
@pytest.mark.parametrize("devices", ["cpu", "8 x H100-80GB"])
def test_images(folder: Path, devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(folder / "vision"), "--devices", devices, "--yes", "--force"]
    assert init(folder, "images.jsonl", *options) == DONE
    assert "36 samples of conversations (messages) with images" in capsys.readouterr().out
    recipe = load_recipe(folder / "r.yaml")
    assert recipe.task.name == "vision_language" and recipe.model.freeze == ("vision_tower",)
    assert recipe.data.max_length == 128 and recipe.data.long_samples == "drop"
    assert not {"tensor_parallel_size", "context_parallel_size", "sequence_parallel_size"} & recipe.arguments.keys()
    root, problems = read_yaml((folder / "r.yaml").read_text(), "r.yaml")
    assert not problems and list(schema_problems(root.plain(), recipe_schema())) == []
    assert init(folder, "chat.jsonl", *options) == DONE  # text alone, for a model that reads both
    assert load_recipe(folder / "r.yaml").task.name == "vision_language"


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("base", "images.jsonl", [], "takes none"),
        ("base", "chat.jsonl", ["--task", "vision_language"], "takes no images"),
        ("vision", "chat.jsonl", ["--task", "lora"], "is trained with --task vision_language"),
        ("vision", "images.jsonl", ["--task", "dpo"], "It is data for vision_language"),
    ],
)
def test_images_that_cannot_be_trained_on(
    folder: Path, model: str, data: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--model", str(folder / model), "--devices", "cpu", "--yes", *options]
    assert init(folder, data, *chosen, out="wrong.yaml") == CANNOT_WORK
    assert message in capsys.readouterr().err
    assert not (folder / "wrong.yaml").exists()


def test_images_with_adapters_where_all_weights_would_need_the_host(folder: Path) -> None:
    """A large model, of which the planner reads the shapes."""
    config = json.loads((folder / "vision" / "config.json").read_text())
    large = folder / "large"
    shutil.copytree(folder / "vision", large, ignore=shutil.ignore_patterns("*.safetensors"))
    config["text_config"] |= {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    (large / "config.json").write_text(json.dumps(config))
    options = ["--model", str(large), "--devices", "8 x H100-80GB", "--yes", "--force"]
    assert init(folder, "images.jsonl", *options) == DONE
    recipe = load_recipe(folder / "r.yaml")
    assert recipe.model.peft is not None and recipe.model.freeze == ("vision_tower",)
    assert "does NOT fit" not in (folder / "r.yaml").read_text()


def test_a_plan_for_gpus_that_this_machine_does_not_have(folder: Path) -> None:
    assert init(folder, "chat.jsonl", "--yes", "--devices", "2 x H100-80GB", "--force") == DONE
    text = (folder / "r.yaml").read_text()
    assert "ds-trainer launch --nproc-per-node 2" in text
    assert "of 84 GB on each device" in text or "of 85 GB on each device" in text
    arguments = load_recipe(folder / "r.yaml").arguments
    assert arguments["bf16"] is True
    assert "zero_stage" in arguments


def test_a_plan_for_a_base_in_4_bits(folder: Path) -> None:
    assert init(folder, "chat.jsonl", "--task", "qlora", "--yes", "--devices", "2 x L4", "--force") == DONE
    text = (folder / "r.yaml").read_text()
    assert "GB on each device" in text and "(estimates)" in text
    arguments = load_recipe(folder / "r.yaml").arguments
    assert arguments["zero_stage"] == 2 and "tensor_parallel_size" not in arguments
    assert init(folder, "chat.jsonl", "--task", "qlora", "--yes", "--devices", "L4", "--force") == DONE
    assert load_recipe(folder / "r.yaml").arguments["zero_stage"] == 1


def test_everything_that_is_missing_is_said_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["init", str(folder / "new.yaml"), "--task", "lora"]) == CANNOT_WORK
    message = capsys.readouterr().err
    assert "--model, --data, --devices, --output are missing" in message
    assert "--yes" in message
    assert main(["init", str(folder / "new.yaml"), "--yes"]) == CANNOT_WORK
    assert "--model, --data are missing" in capsys.readouterr().err
    assert not (folder / "new.yaml").exists()


def test_questions(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    answers = ["", str(folder / "base"), str(folder / "chat.jsonl"), "cpu", "lora", ""]
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return answers.pop(0)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", str(folder / "asked.yaml")]) == DONE
    assert not answers
    assert [question.split()[0] for question in asked] == ["Model", "Model", "Data", "Devices", "Task", "Output"]
    recipe = load_recipe(folder / "asked.yaml")
    assert recipe.arguments["output_dir"] == "runs/asked"  # as the recipe
    assert recipe.model.peft is not None
    assert "36 samples of conversations" in capsys.readouterr().out


def test_a_recipe_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "kept.yaml").write_text("mine")
    assert init(folder, "chat.jsonl", "--yes", out="kept.yaml") == CANNOT_WORK
    assert "--force" in capsys.readouterr().err
    assert (folder / "kept.yaml").read_text() == "mine"


def test_a_recipe_stays_if_the_new_one_cannot_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "kept.yaml").write_text("mine")
    monkeypatch.setattr("ds_trainer.recipes.new_recipe.recipe_text", lambda *_: "model: {}\n")
    assert init(folder, "chat.jsonl", "--yes", "--devices", "cpu", "--force", out="kept.yaml") == CANNOT_WORK
    assert (folder / "kept.yaml").read_text() == "mine"
    assert init(folder, "chat.jsonl", "--yes", "--devices", "cpu", out="other.yaml") == CANNOT_WORK
    assert not (folder / "other.yaml").exists()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("text.jsonl", ["--task", "dpo"], "needs data of the kind preference"),
        ("chat.jsonl", ["--task", "lroa"], "Did you mean 'lora'?"),
        ("chat.jsonl", ["--task", "grpo"], "ds-trainer run SCRIPT.py"),
        ("preferences.jsonl", ["--task", "sft"], "needs data of the kind"),
        ("nothing.jsonl", [], "nothing.jsonl"),
        ("chat.jsonl", ["--devices", "two"], "two"),
    ],
)
def test_what_cannot_work(
    folder: Path, data: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(folder, data, "--yes", *options, out="wrong.yaml") == CANNOT_WORK
    assert message in capsys.readouterr().err
    assert not (folder / "wrong.yaml").exists()


def test_devices() -> None:
    assert parse_devices("cpu").cluster is None
    for text, nodes, per_node in (("8 x H100-80GB", 1, 8), ("4 x 8 x H100-80GB", 4, 8), ("H100-80GB", 1, 1)):
        cluster = parse_devices(text).cluster
        assert cluster is not None
        assert (cluster.nodes, cluster.devices_per_node) == (nodes, per_node)
    assert parse_devices("4 x 8 x H100-80GB").command("r.yaml") == (
        "ds-trainer launch --nodes 4 --hostfile hosts --nproc-per-node 8 r.yaml"
    )
    with pytest.raises(ConfigError, match="not understood"):
        parse_devices("1 x 2 x 3 x H100-80GB")
