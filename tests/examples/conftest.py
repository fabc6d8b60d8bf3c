"""What the examples need: a tiny model in a Hugging Face directory, and a way to run a script."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import pool
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of some 30 thousand random weights, and a tokenizer of 300 tokens made from Python's sources."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    directory = tmp_path_factory.mktemp("examples") / "model"
    tokenizer = ByteLevelBPETokenizer()
    source = str(Path(sysconfig.get_path("stdlib"), "heapq.py"))
    tokenizer.train([source], vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., Path]:
    """Runs ``examples/<name>.py`` on forked ranks, which have all imports; gives the output directory.

    A script under a real launcher: ``test_multi_node_on_two_agents_resumes``.
    """

    def run(name: str, *arguments: str, ranks: int = 1, output: str = "") -> Path:
        out = tmp_path / (output or name)
        argv = ["--output_dir", str(out), "--use_cpu", "true", "--disable_tqdm", "true", *arguments]
        pool(ranks).run(run_script, str(ROOT / "examples" / f"{name}.py"), argv, timeout=600)
        return out

    return run


def environment() -> dict[str, str]:
    """That of this process, with this checkout and its scripts first."""
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def losses(out: Path) -> list[float]:
    """Training losses of the run in ``out``, one for each log."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def results(out: Path, split: str = "eval") -> dict[str, Any]:
    """The metrics that ``save_metrics`` wrote."""
    found: dict[str, Any] = json.loads((out / f"{split}_results.json").read_text(encoding="utf-8"))
    return found
