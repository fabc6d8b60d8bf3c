"""``ds-trainer plan --dry-run N``: output, exit codes, and what it leaves behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ds_trainer.cli.main import main
from ds_trainer.utils import distributed
from tests.recipes.test_dry_run import LLAMA, recipe


@pytest.mark.extended
def test_a_recipe_is_rehearsed_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path)
    before, files, state = dict(os.environ), sorted(tmp_path.rglob("*")), torch.get_rng_state()
    assert main(["plan", str(path), "--dry-run", "1024", "--arguments.zero_stage", "3"]) == 0
    shown = capsys.readouterr().out
    assert "get_total_train_batch_size() = 1024 = 1 per device x 1 accumulation x 1024 data parallel" in shown
    assert "ZeRO 3" in shown
    assert "The start-up of rank 0 of 1,024 ranks succeeded" in shown.splitlines()[-1]
    assert (dict(os.environ), sorted(tmp_path.rglob("*"))) == (before, files)
    assert torch.equal(torch.get_rng_state(), state)
    assert not distributed.is_initialized()


@pytest.mark.extended
def test_a_mistake_has_the_text_and_the_exit_code_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(tmp_path, **{"arguments.report_to": "wandbb"}))
    assert main(["plan", path, "--dry-run", "2"]) == 2
    dry = capsys.readouterr().err
    assert main(["train", path]) == 2
    assert [line for line in dry.splitlines() if line.startswith("ds-trainer")] == [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("ds-trainer")
    ]
    assert main(["plan", path, "--dry-run", "2", "--argments.max_steps", "3"]) == 2
    assert "unknown key '--argments.max_steps'" in capsys.readouterr().err


@pytest.mark.extended
def test_a_bare_model_is_rehearsed_in_the_layout_of_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 256}))
    fixed = ["--zero-stage", "2", "--tensor-parallel-size", "4", "--micro-batch", "2", "--seq-len", "32"]
    assert main(["plan", str(tmp_path), "--dry-run", "64", "--json", *fixed]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["layout"].startswith("dp 16 x cp 1 x sp 1 x tp 4")
    assert found["engine"].startswith("ZeRO 2, bf16")
    assert found["global_batch_size"] == 32


@pytest.mark.extended
def test_json_is_all_that_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # DeepSpeed warns on stdout of more tensor-parallel ranks than heads.
    more = ["--json", "--arguments.tensor_parallel_size", "32"]
    assert main(["plan", str(recipe(tmp_path)), "--dry-run", "64", *more]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["layout"].startswith("dp 2 x cp 1 x sp 1 x tp 32")
    assert "AutoTP" in shown.err


def test_a_plan_that_does_not_fit_is_not_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **sizes, "vocab_size": 128256}))
    assert main(["plan", str(tmp_path), "--dry-run", "2", "--seq-len", "32", "--offload", "none"]) == 3
    assert "Nothing fits" in capsys.readouterr().out
