"""Vision-language fine-tuning from a recipe: the one in ds_configs in small, what is frozen, and what is refused."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.cli.main import main
from ds_trainer.recipes.fine_tuning_data import FineTuningData
from ds_trainer.recipes.fine_tuning_job import VisionLanguageJob
from ds_trainer.recipes.frozen_parts import part_of
from ds_trainer.recipes.recipe import Recipe, load_recipe
from ds_trainer.utils.errors import ConfigError
from tests.support.chat_model import save_chat_model
from tests.support.pool import pool
from tests.support.vision_models import picture, save_vision_model

RECIPE = Path(__file__).parents[2] / "ds_configs" / "recipes" / "vision_language.yaml"
SAMPLES = 16


def turns(text: str, answer: str = "a thing") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    save_vision_model(path / "base", "llava")
    save_chat_model(path / "text")
    (path / "pictures").mkdir()
    rows = []
    for index in range(SAMPLES):
        images = [f"pictures/{index}-{number}.png" for number in range(index % 3)]
        for image in images:
            picture(16 + index, 20, index).save(path / image)
        row: dict[str, Any] = {"messages": turns("<image>" * len(images) + f"what is {index}?", f"it is {index}")}
        rows.append({**row, "images": images} if images else row)
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(folder: Path, name: str, **more: Any) -> list[str]:
    values = {
        "model.path": folder / "base",
        "data.train": folder / "data.jsonl",
        "data.held_out": 4,
        "data.max_length": 128,
        "data.prepared_dir": folder / "cache",
        "arguments.output_dir": folder / "runs" / name,
        "arguments.max_steps": 2,
        "arguments.gradient_accumulation_steps": 2,
        "arguments.per_device_train_batch_size": 1,
        "arguments.dataloader_num_workers": 0,
        "arguments.save_strategy": "no",
        "arguments.activation_checkpointing": "false",
        "arguments.disable_tqdm": "true",
        "arguments.use_cpu": "true",
        **more,
    }
    return [f"--{key}={value}" for key, value in values.items() if value is not None]


def test_the_recipe_trains_in_small_on_two_ranks(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert pool(2).run(partial(main, ["train", str(RECIPE), *overrides(folder, "full")])) == [0, 0]
    output = folder / "runs" / "full"
    results = json.loads((output / "results.json").read_text())
    assert results["steps"] == 2 and math.isfinite(results["evaluation"]["eval_loss"])
    processor = AutoProcessor.from_pretrained(output)
    assert type(processor).__name__ == "LlavaProcessor" and processor.chat_template
    before = AutoModelForImageTextToText.from_pretrained(folder / "base").state_dict()
    after = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32).state_dict()
    moved = {part_of(name) for name in before if not torch.equal(before[name].bfloat16().float(), after[name])}
    assert moved == {"projector", "language_model"}  # of the saved weights; the tower is frozen


def test_adapters_with_a_frozen_language_model(folder: Path) -> None:
    adapters = {
        "model.peft": "{peft_type: LORA, r: 4, target_modules: all-linear}",
        "model.freeze": "['*language_model*', '*lm_head*']",
        "arguments.zero_stage": 2,
        "arguments.bf16": "false",
        "arguments.learning_rate": 0.1,
        "data.held_out": "null",
        "arguments.eval_strategy": "no",
    }
    assert pool(1).run(partial(main, ["train", str(RECIPE), *overrides(folder, "lora", **adapters)])) == [0]
    from safetensors.torch import load_file

    saved = load_file(folder / "runs" / "lora" / "adapter_model.safetensors")
    trained = {part_of(name) for name, weight in saved.items() if "lora_B" in name and weight.any()}
    assert trained == {"vision_tower", "projector"}
    merged = folder / "runs" / "merged"
    assert main(["checkpoint", "merge", str(folder / "runs" / "lora"), "--to", str(merged)]) == 0
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert AutoProcessor.from_pretrained(merged).chat_template
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (folder / "base", merged)
    )
    assert {part_of(n) for n in before if not torch.equal(before[n], after[n])} == {"vision_tower", "projector"}


def prepared_data(recipe: Recipe) -> FineTuningData:
    """The data of ``recipe``, before a model is built."""
    job = VisionLanguageJob(recipe)
    job.prepare(job.arguments())
    return job.data


def problems_of(folder: Path, **more: Any) -> list[str]:
    """What the recipe is refused for, before a model is built."""
    with pytest.raises(ConfigError) as error:
        prepared_data(load_recipe(RECIPE, overrides(folder, "refused", **more)))
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"arguments.packing": "true"}, "arguments.packing=True: not with images"),
        ({"arguments.tensor_parallel_size": 2}, "arguments.tensor_parallel_size=2: not with images"),
        ({"arguments.sequence_parallel_size": 2}, "arguments.sequence_parallel_size=2: not with images"),
        ({"arguments.context_parallel_size": 2}, "arguments.context_parallel_size=2: not with images"),
        ({"data.long_samples": "split"}, "only texts can be split"),
        ({"data.tokenizer": "bytes"}, "the processor of model.path has its tokenizer"),
        ({"data.max_length": None, "data.sequence_length": 64, "data.train_on": "all"}, "remove one"),
        ({"report.sample_prompt": "x"}, "report.sample_prompt: not with task vision_language"),
        ({"task.options": "{x: 1}"}, "vision_language has no options"),
        ({"data.max_length": 600}, "data.max_length=600 is longer than the model's max_position_embeddings=512"),
    ],
)
def test_what_cannot_work_is_refused(more: dict[str, Any], message: str, folder: Path) -> None:
    assert any(message in problem for problem in problems_of(folder, **more))


def test_models_and_tasks_without_images(folder: Path) -> None:
    (problem,) = problems_of(folder, **{"model.path": folder / "text"})
    assert "no processor" in problem and "task sft" in problem
    with pytest.raises(ConfigError, match=r"model\.freeze: task classification trains all weights"):
        load_recipe(RECIPE, [*overrides(folder, "x"), "--task.name=classification"])


def test_bad_images_are_reported_together_with_their_lines(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    (tmp_path / "text.png").write_text("no image")
    picture(64, 64, 1).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:3000])
    names = ["huge.png", "text.png", "gone.png", "good.png", "cut.png"]
    rows = [{"messages": turns("<image>?"), "images": [name]} for name in names]
    rows.append({"messages": turns("<image><image>?"), "images": ["good.png"]})
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"data.train": tmp_path / "bad.jsonl", "data.held_out": "null", "arguments.eval_strategy": "no"}
    problems = problems_of(folder, **more)
    lines = {problem.partition(": ")[0].rpartition(":")[2]: problem for problem in problems}
    assert sorted(lines) == ["1", "2", "3", "5", "6"]
    words = {"1": "9000 x 9000", "2": "cannot identify", "3": "does not exist", "5": "truncated", "6": "has 1"}
    for line, text in words.items():
        assert text in lines[line], lines[line]
    recipe = load_recipe(RECIPE, [*overrides(folder, "skipped", **more), "--data.bad_lines=skip"])
    data = prepared_data(recipe)
    assert len(data.train) == 1 and data.sources[0].bad_lines == 4  # and one that cannot be encoded
    assert data.sources[0].without_sample == 1


def test_the_samples_of_a_copy_have_the_images_of_the_copy(folder: Path, tmp_path: Path) -> None:
    """The text is the same, and the key of prepared samples is their content."""
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        picture(20, 20, 1).save(tmp_path / name / "a.png")
        (tmp_path / name / "data.jsonl").write_text(json.dumps({"messages": turns("<image>?"), "images": ["a.png"]}))
        more = {"data.train": tmp_path / name / "data.jsonl", "data.held_out": "null", "arguments.eval_strategy": "no"}
        recipe = load_recipe(RECIPE, overrides(folder, name, **more))
        paths += prepared_data(recipe).train[0]["images"]
    assert paths == [str(tmp_path / name / "a.png") for name in ("one", "two")]


def test_freeze(folder: Path) -> None:
    from ds_trainer.recipes.frozen_parts import freeze
    from tests.support.vision_models import make_model, make_processor

    for family in ("llava", "qwen2_vl", "gemma3", "idefics3", "internvl"):
        model = make_model(family, make_processor(family))
        parts = {part_of(name) for name, _ in model.named_parameters()}
        assert parts == {"vision_tower", "projector", "language_model"}, family
        freeze(model, ["vision_tower", "language_model"], "r.yaml:3")
        assert {part_of(name) for name, p in model.named_parameters() if p.requires_grad} == {"projector"}
        with pytest.raises(ConfigError, match=r"r\.yaml:3: model\.freeze: nothing is left to train"):
            freeze(model, ["projector"], "r.yaml:3")
        with pytest.raises(ConfigError, match="'vision' selects no parameter"):
            freeze(model, ["vision"], "r.yaml:3")


def test_chat_takes_text_also_where_the_template_reads_parts(folder: Path) -> None:
    from ds_trainer.cli.chat import command
    from ds_trainer.recipes.chat_session import GenerationOptions, load_session
    from ds_trainer.recipes.saved_model import find_saved_model

    session = load_session(find_saved_model(str(folder / "base")), GenerationOptions(3, 0.0), "cpu")
    session.ask("what is it?", lambda piece: None)
    tokens = session._prompt([{"role": "user", "content": "what is it?"}], "", ())
    assert session._tokenizer.decode(tokens) == "USER: what is it? ASSISTANT:"
    with pytest.raises(ConfigError, match=r"a\.png' cannot be read"):
        command(session, "/image a.png")
