"""``ds-trainer checkpoint``: inspect, verify and export, as a shell calls them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.cli.main import main
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool


def train(output_dir: str) -> None:
    args = TrainingArguments(
        output_dir, max_steps=2, save_strategy="steps", save_steps=1, zero_stage=3, disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=RaggedTokens(32))
    trainer.train()
    trainer.save_model(f"{output_dir}/live")
    trainer.engine.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    pool(2).run(train, str(path))
    return path


@pytest.fixture
def output(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "output"))


def test_export(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["checkpoint", "export", str(output), "--to", str(output / "out"), "--max-shard-size", "20KB"]
    assert main(argv) == 0
    assert f"{output}/checkpoint-2 -> {output}/out: " in capsys.readouterr().out
    wanted = load_file(output / "live" / "model.safetensors")
    files = [load_file(path) for path in (output / "out").glob("*.safetensors")]
    assert len(files) > 2
    assert all(tensor.equal(wanted[name]) for file in files for name, tensor in file.items())
    assert sum(map(len, files)) == len(wanted)
    assert main(argv) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.extended
def test_export_in_another_type_in_a_process_without_ranks(output: Path) -> None:
    import torch

    argv = ["checkpoint", "export", str(output / "checkpoint-1"), "--to", str(output / "out"), "--dtype", "bf16"]
    completed = subprocess.run([sys.executable, "-m", "ds_trainer", *argv], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert {tensor.dtype for tensor in load_file(output / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_inspect(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(output)]) == 0
    text = capsys.readouterr().out
    for line in (
        "checkpoint-2\n",
        "step     2,",
        "2 ranks = dp 2, ZeRO 3, fp32",
        "LlamaForCausalLM, 19,",
        "rank_00001",
    ):
        assert line in text, text
    assert "exp_avg" in text and "master" in text


def test_verify(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(output)]) == 0
    assert capsys.readouterr().out.count("intact") == 2
    path = output / "checkpoint-1" / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "verify", str(output)]) == 2
    captured = capsys.readouterr()
    assert "checkpoint-1: damaged" in captured.out and "checkpoint-2: intact" in captured.out
    assert "rank_00001.safetensors is damaged (checksum" in captured.err
    # What is damaged is not exported.
    assert main(["checkpoint", "export", str(output / "checkpoint-1"), "--to", str(output / "out")]) == 2
    assert not (output / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", "NOWHERE"], "is not a checkpoint"),
        (["verify", "NOWHERE"], "is not a checkpoint"),
        (["export", "NOWHERE", "--to", "x"], "is not a checkpoint"),
        (
            ["export", "HERE", "--to", "x", "--dtype", "int3"],
            "--dtype: 'int3' is no type of weights; the types are fp32, bf16, fp16",
        ),
        (["export", "HERE", "--to", "x", "--max-shard-size", "many"], "--max-shard-size: 'many' is not a size"),
        (["export", "HERE", "--to", "x", "--merge-lora"], "has no adapters"),
        (["inspect", "HERE", "--colour"], "unrecognized arguments: --colour"),
        (["exprt", "HERE"], "checkpoint: unknown action 'exprt'. Did you mean 'export'? Valid actions: inspect,"),
    ],
)
def test_mistakes(
    argv: list[str], message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"HERE": str(trained), "NOWHERE": str(tmp_path), "x": str(tmp_path / "x")}
    assert main(["checkpoint", *(paths.get(argument, argument) for argument in argv)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
