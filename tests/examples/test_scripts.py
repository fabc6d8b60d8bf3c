"""Every example does what its first lines say, on a tiny model and one or two CPU processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_trainer.utils.ranks import free_port
from tests.examples.conftest import ROOT, environment, losses, results

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

EXAMPLES = ROOT / "examples"
SHORT = ("--sequence_length", "64", "--logging_steps", "1", "--save_strategy", "no", "--learning_rate", "1e-2")


def test_every_example_has_a_test() -> None:
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.stem for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in here] == []


def test_full_finetune_changes_all_weights(run_example: Callable[..., Path], model_directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = run_example(
        "full_finetune", "--model", str(model_directory), "--max_steps", "20", *SHORT, "--zero_stage", "3", ranks=2
    )
    assert losses(out)[-1] < losses(out)[0] - 0.5
    assert results(out)["eval_loss"] < losses(out)[0]
    before = AutoModelForCausalLM.from_pretrained(model_directory).state_dict()
    after = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert [name for name in before if before[name].equal(after[name])] == []
    assert AutoTokenizer.from_pretrained(out)("import os")["input_ids"]


def test_lora_trains_adapters_and_merges_them(run_example: Callable[..., Path], model_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = run_example("lora", "--model", str(model_directory), "--max_steps", "10", *SHORT)
    assert losses(out)[-1] < losses(out)[0]
    assert (out / "adapter_model.safetensors").is_file() and not (out / "model.safetensors").exists()
    before = AutoModelForCausalLM.from_pretrained(model_directory).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(out / "merged").state_dict()
    changed = {name for name in before if not before[name].equal(merged[name])}
    assert changed and all("_proj" in name for name in changed)


def test_the_custom_module_example_learns(run_example: Callable[..., Path]) -> None:
    out = run_example(
        *("own_module", "--max_steps", "60", "--logging_steps", "1", "--save_strategy", "no"),
        *("--learning_rate", "1e-2", "--per_device_train_batch_size", "64", "--per_device_eval_batch_size", "256"),
    )
    assert losses(out)[-1] < losses(out)[0] - 1
    assert results(out)["eval_loss"] < losses(out)[0] - 1
    assert (out / "model.safetensors").is_file()


def test_evaluate_only_gives_the_models_loss(run_example: Callable[..., Path], model_directory: Path) -> None:
    one = results(run_example("evaluate_only", "--model", str(model_directory), "--sequence_length", "64"))
    two = run_example(
        "evaluate_only", "--model", str(model_directory), "--sequence_length", "64", "--zero_stage", "3", ranks=2
    )
    assert results(two)["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    assert one["perplexity"] == pytest.approx(300, rel=0.1)  # random weights know nothing of 300 tokens
    assert not list(two.glob("model*"))


# Instead: tests/cluster/test_scripts.py: the batch script on two machines; resuming:
# tests/resilience/test_restarts.py
@pytest.mark.matrix
def test_multi_node_on_two_agents_resumes(run_example: Callable[..., Path]) -> None:
    """Two torchruns stand for two nodes. They continue after the checkpoint of a start on one node."""
    more = ("--save_steps", "5", "--logging_steps", "1")
    out = run_example("multi_node", "--max_steps", "5", *more, ranks=2)
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                *("--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1"),
                *(str(EXAMPLES / "multi_node.py"), "--output_dir", str(out), "--use_cpu", "true"),
                *("--max_steps", "10", "--disable_tqdm", "true", *more),
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)[-4000:]
    assert "step 5 of 10" in "\n".join(outputs)
    assert len(losses(out)) == 10
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (75, True)])
def test_the_batch_script_requeues_a_stopped_job(tmp_path: Path, code: int, requeued: bool) -> None:
    """Programs of the same names stand for the launcher and SLURM. USR1 reaches the launcher, its exit code decides."""
    programs = {
        "ds-trainer": f'trap "exit {code}" USR1; echo "$@" >launched; for _ in $(seq 300); do sleep 0.1; done; exit 99',
        "scontrol": 'echo "$@" >requeued',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = subprocess.Popen(
        ["bash", str(EXAMPLES / "multi_node.sbatch"), "--max_steps", "9"], cwd=tmp_path, env=variables
    )
    launched, deadline = tmp_path / "launched", time.monotonic() + 60
    while not (launched.exists() and launched.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == code
    assert launched.read_text(encoding="utf-8").split()[:2] == ["launch", "examples/multi_node.py"]
    assert (tmp_path / "requeued").exists() == requeued
