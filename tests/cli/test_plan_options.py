"""Options of ``ds-trainer plan`` that fix features, offload and the optimizer; what a recipe has beyond the plans."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.cli.main import main
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE
from tests.planner.test_anchors import LLAMA_8B

ARGS = ("--seq-len", "4K", "--global-batch", "32", "--json")
LAYOUT = ("--tensor-parallel-size", "1", "--context-parallel-size", "1", "--sequence-parallel-size", "1")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv]) == DONE
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def started(found: dict[str, Any]) -> TrainingArguments:
    """The arguments that the script of the first plan gets."""
    words = shlex.split(found["plans"][0]["command"])
    words = words[words.index("train.py") + 1 :]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*words, "--output_dir", "runs"])
    return args  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (("--chunked-loss", "on"), {"loss_chunk_tokens": 1024}),
        (("--tiled-mlp", "on", "--micro-batch", "4"), {"tiled_mlp": True}),
        (
            ("--offload-activations", "on", "--activation-checkpointing", "on"),
            {"activation_offload": True, "activation_checkpointing": True},
        ),
        (("--activation-checkpointing", "2"), {"activation_checkpointing_kwargs": {"every_n_layers": 2}}),
        (("--activation-checkpointing", "off"), {"activation_checkpointing": False}),
        (
            ("--offload", "all", "--offload-to", "nvme"),
            {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/local_nvme"},
        ),
        (("--offload", "optimizer", "--offload-to", "cpu", "--zero-stage", "3"), {"offload_optimizer": "cpu"}),
    ],
)
def test_an_option_is_in_every_plan(
    options: tuple[str, ...], arguments: dict[str, Any], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, model, *ARGS, *LAYOUT, *options)
    for one in found["plans"]:
        assert {name: one["arguments"].get(name) for name in arguments} == arguments
    args = started(found)
    assert {name: getattr(args, name) for name in arguments} == arguments
    assert found["deepspeed_config"]


def test_a_disk_is_in_the_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*LAYOUT, "--offload", "optimizer", "--offload-to", "nvme")
    slow, fast = (
        plan(capsys, model, *ARGS, *options, "--nvme", "2000", "--nvme-bandwidth", rate)["plans"][0]
        for rate in ("8/4", "80")
    )
    part = "optimizer states on NVMe"
    assert slow["memory"]["nvme_of_a_machine"] == pytest.approx(16 * 8.03e9, rel=0.01)
    assert slow["seconds"]["parts"][part] == pytest.approx(fast["seconds"]["parts"][part] * 15)  # 1/8 + 1/4, 2/80


def test_the_optimizer_has_its_states(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = (*LAYOUT, "--zero-stage", "3", "--offload", "none")

    def states(*argv: str) -> float:
        found = plan(capsys, *argv, *fixed)["plans"][0]["memory"]["moments"]["optimizer step"]
        return float(found.get("optimizer states", 0.0))

    per_rank = 8.03e9 / 8
    assert states(model, *ARGS) == pytest.approx(8 * per_rank, rel=0.01)
    assert states(model, *ARGS, "--optim", "adamw_8bit") == pytest.approx(2 * per_rank, rel=0.01)
    recipe: dict[str, Any] = {
        "model": {"architecture": LLAMA_8B},
        "data": {"train": ["python-stdlib"], "tokenizer": "bytes", "sequence_length": 2048},
        "arguments": {"output_dir": "runs/x", "bf16": True, "optim": "adafactor"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert states(str(path), *ARGS) == 0
    assert states(str(path), *ARGS, "--optim", "adamw_torch") == pytest.approx(8 * per_rank, rel=0.01)
    optimizer = {"type": "Lion", "params": {"lr": 1e-4}}
    recipe["arguments"] = {"output_dir": "runs/x", "bf16": True, "deepspeed": {"optimizer": optimizer}}
    path.write_text(yaml.safe_dump(recipe))
    assert states(str(path), *ARGS) == pytest.approx(4 * per_rank, rel=0.01)


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"zero_quantized_weights": True}, "quantized communication (ZeRO++)"),
        ({"zenflow": {"topk_ratio": 0.1}}, "ZenFlow"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "SuperOffload"),
        ({"zero_quantized_weights": False, "zero_hpz_partition_size": 8}, None),
    ],
)
def test_what_is_not_covered_is_said(
    zero: dict[str, Any], words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "model": {"architecture": LLAMA_8B},
        "data": {"train": ["python-stdlib"], "tokenizer": "bytes", "sequence_length": 2048},
        "arguments": {"output_dir": "runs/x", "bf16": True, "deepspeed": {"zero_optimization": {"stage": 3, **zero}}},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(recipe))
    notes = [note for note in plan(capsys, str(path), *ARGS, *LAYOUT)["notes"] if "do not cover" in note]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--offload-to nvme --zero-stage 2", "--offload-to nvme needs --zero-stage 3"),
        ("--offload-to nvme --offload none", "--offload-to nvme needs --zero-stage 3"),
        ("--offload-activations on --activation-checkpointing off", "needs --activation-checkpointing on"),
    ],
)
def test_contradictions(options: str, message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, *options.split()]) == CANNOT_WORK
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--activation-checkpointing=some", "--optim=adan", "--nvme-bandwidth=fast"])
def test_values_that_are_none(option: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, option]) == CANNOT_WORK
    assert "is n" in capsys.readouterr().err
