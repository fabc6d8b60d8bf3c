"""``ds-trainer config``: the DeepSpeed JSON on standard output, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_trainer
from ds_trainer.cli.main import main
from tests.support.hub_server import HubServer, Repository, pointed_at

QUICKSTART = Path(ds_trainer.__file__).parents[1] / "ds_configs" / "recipes" / "quickstart.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(
        "model: {architecture: {model_type: llama, hidden_size: 2048}}\n"
        "data: {train: nowhere.txt, sequence_length: 8}\n"
        "arguments: {learning_rate: 1e-3, zero_stage: 2, per_device_train_batch_size: 3}\n"
    )
    return str(path)


def compiled(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["config", *argv, "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_config_command_prints_only_json(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = compiled(capsys, recipe)
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["zero_optimization"]["stage"] == 2  # type: ignore[index]
    assert config["zero_optimization"]["reduce_bucket_size"] == 2048**2  # type: ignore[index]


def test_overrides_and_world_size(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (recipe, "--arguments.zero_stage", "null", "--arguments.bf16", "true")
    config = compiled(capsys, *argv, "--world-size", "4")
    assert config["zero_optimization"]["stage"] == 1  # type: ignore[index]
    assert config["bf16"]["enabled"] is True  # type: ignore[index]
    assert compiled(capsys, *argv)["zero_optimization"]["stage"] == 0  # type: ignore[index]


def test_explain(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", recipe, "--device", "cpu", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    stage = next(line for line in lines if line.startswith("zero_optimization.stage"))
    assert stage.split()[1] == "2"
    assert "zero_stage=2" in stage


def test_a_saved_model_gives_the_shape(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')
    argv = ("--model.architecture", "null", "--model.path", str(tmp_path / "model"))
    config = compiled(capsys, recipe, *argv)
    assert config["zero_optimization"]["reduce_bucket_size"] == 4096**2  # type: ignore[index]


def test_a_hub_name_gives_the_shape_and_downloads_no_weights(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    argv = ["--model.architecture", "null", "--model.path", "me/llama"]
    with HubServer() as hub, pointed_at(hub.url):
        files = hub.repositories.setdefault("me/llama", Repository(private=False)).branches["main"]
        files.update({"config.json": b'{"model_type": "llama", "hidden_size": 4096}', "model.safetensors": b"x"})
        config = compiled(capsys, recipe, *argv)
        assert config["zero_optimization"]["reduce_bucket_size"] == 4096**2  # type: ignore[index]
        assert not any("safetensors" in request for request in hub.requests)
    second = compiled(capsys, "--output_dir", "o", "--zero_stage", "2", "--model", "me/llama")  # offline, of the cache
    assert second["zero_optimization"]["reduce_bucket_size"] == 4096**2  # type: ignore[index]
    assert main(["config", recipe, *argv[:-1], "me/other", "--device", "cpu"]) == 2
    assert "model.path: 'me/other' is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "\xff"])
def test_a_model_that_cannot_be_read(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    (tmp_path / "model").mkdir()
    if content is not None:
        (tmp_path / "model" / "config.json").write_bytes(content.encode("latin-1"))
    argv = ["--model.architecture", "null", "--model.path", str(tmp_path / "model"), "--device", "cpu"]
    assert main(["config", recipe, *argv]) == 2
    assert "model.path: " in capsys.readouterr().err


def test_a_misspelled_hidden_size_is_rejected(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(recipe).write_text(Path(recipe).read_text().replace("hidden_size", "hiden_size"))
    assert main(["config", recipe, "--device", "cpu"]) == 2
    assert "r.yaml:1: unknown key 'model.architecture.hiden_size' for a llama model. Did you mean 'hidden_size'?" in (
        capsys.readouterr().err
    )


def test_values_that_the_device_cannot_support_are_rejected(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", recipe, "--device", "cpu", "--arguments.fp16", "true"]) == 2
    assert "fp16" in capsys.readouterr().err
    assert main(["config", recipe, "--device", "cuda", "--arguments.fp16", "true"]) == 0


def test_the_config_command_needs_no_torch() -> None:
    code = (
        "import sys; from ds_trainer.cli.main import main; "
        f"code = main(['config', {str(QUICKSTART)!r}, '--device', 'cpu']); "
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stderr.split() == ["0", "False"]
    json.loads(completed.stdout)


def test_the_device_of_this_machine_is_used(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", recipe]) == 0
    json.loads(capsys.readouterr().out)


def test_arguments_without_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a script is started with can be compiled as it is."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4096}')
    argv = ("--output_dir", "o", "--learning_rate", "1e-3", "--zero_stage", "2", "--model", str(tmp_path))
    config = compiled(capsys, *argv, "--world-size", "16")
    assert config["optimizer"]["params"]["lr"] == 1e-3  # type: ignore[index]
    assert config["zero_optimization"]["reduce_bucket_size"] == 4096**2  # type: ignore[index]
    assert compiled(capsys)["zero_optimization"]["stage"] == 0  # type: ignore[index]
    assert main(["config", "--lerning_rate", "1"]) == 2
    assert "Did you mean '--learning_rate'?" in capsys.readouterr().err
    assert main(["config", "--model", str(tmp_path / "nowhere")]) == 2


def test_only_the_main_process_prints(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    assert main(["config", recipe, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert compiled(capsys, recipe)["zero_optimization"]["stage"] == 2  # type: ignore[index]
