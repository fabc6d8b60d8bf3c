"""``ds-trainer plan``: tables, JSON, inverse questions, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, NOTHING_FITS
from tests.planner.test_anchors import LLAMA_8B, LLAMA_70B


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path / "llama-8b")


def test_the_best_plans_are_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--seq-len", "8K", "--global-batch", "64", "--top", "3"]) == DONE
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "llama-8b: 8.03 B parameters, all trained; 32 layers"
    assert lines[1].startswith("1 x 8 H100-80GB, 8,192 tokens a sequence, global batch 64: ")
    assert [line.split()[0] for line in lines[4:7]] == ["1", "2", "3"]
    assert "largest moment" in printed and "optimizer states" in printed and "Arguments: --zero_stage" in printed


def test_json_and_fixed_values(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--zero-stage", "3", "--offload", "optimizer", "--activation-checkpointing", "on", "--micro-batch", "2"]
    assert main(["plan", model, "--global-batch", "64", *fixed, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["parameters"] == 8_030_261_248
    for plan in found["plans"]:
        assert plan["fits"] and plan["global_batch"] == 64
        wanted = {"zero_stage": 3, "offload_optimizer": "cpu", "activation_checkpointing": True}
        assert wanted.items() <= plan["arguments"].items() and plan["arguments"]["per_device_train_batch_size"] == 2
        total = max(sum(items.values()) for items in plan["memory"]["moments"].values())
        assert plan["memory"]["device"] == pytest.approx(total + sum(plan["memory"]["overhead"].values()))
        assert plan["seconds"]["low"] < plan["seconds"]["estimate"] < plan["seconds"]["high"]


def test_the_exit_code_is_3_if_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    assert main(["plan", str(path), "--devices-per-node", "1", "--offload", "none"]) == NOTHING_FITS
    printed = capsys.readouterr().out
    assert "Nothing fits. Nearest:" in printed and "GB of a device" in printed


@pytest.mark.parametrize("quantity", ["seq-len", "params", "devices", "micro-batch"])
def test_inverse_questions(quantity: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def solved(*more: str) -> int:
        fixed = ["--zero-stage", "3", "--activation-checkpointing", "on", "--offload", "none"]
        main(["plan", model, "--seq-len", "8K", *fixed, "--tensor-parallel-size", "1", "--solve", quantity, *more])
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith(f"{quantity}: ")
        return int(line.split()[1].replace(",", ""))

    large, small = solved("--device", "H200"), solved("--device", "H100-80GB")
    if quantity == "devices":
        assert 1 < large <= small
    else:
        assert large > small > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["MODEL", "--device", "X9"], "--device X9: not in the table"),
        (["MODEL", "--zero_stage", "2"], "plan takes no --zero_stage"),
        (["missing.json"], "missing.json cannot be read"),
    ],
)
def test_mistakes(argv: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(model if part == "MODEL" else part for part in argv)]) == CANNOT_WORK
    assert message in capsys.readouterr().err


def test_unknown_families_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mystery", "hidden_size": 4}))
    assert main(["plan", str(path)]) == CANNOT_WORK
    assert "has no model_type='mystery'" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_transformers(model: str) -> None:
    code = (
        "import sys\nfrom ds_trainer.cli.main import main\n"
        f"assert main(['plan', {model!r}, '--global-batch', '64']) == 0\n"
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
