"""Every file of ds_configs/: it explains when to use it, compiles, and trains for two steps if a CPU can."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.arguments.typed import read_as
from ds_trainer.arguments.yaml_reader import read_command_line_value
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.config.environment import Environment
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool

FOLDER = Path(__file__).parents[1] / "ds_configs"
FILES = sorted(FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Header:
    """The comment at the top of a file."""

    text: str
    arguments: dict[str, Any]
    needs: frozenset[str]
    ranks: int


def header_of(path: Path, nvme: str = "/local") -> Header:
    lines = [line.removeprefix("//").strip() for line in path.read_text().splitlines() if line.startswith("//")]
    entries = {key: value for key, _, value in (line.partition(": ") for line in lines) if key.isidentifier()}
    hints = {name: field.type for name, field in TrainingArguments.__dataclass_fields__.items()}
    arguments: dict[str, Any] = {}
    for setting in entries.get("arguments", "").split():
        name, _, text = setting.partition("=")
        assert name in hints
        value = read_as(read_command_line_value(text.replace("NVME", nvme)), Any)
        arguments[name] = value
    needs = frozenset(entries.get("needs", "").split())
    return Header(" ".join(lines), arguments, needs, int(entries.get("ranks", "1")))


def compiled(path: Path, header: Header, environment: Environment | None = None, **more: Any) -> CompiledConfig:
    args = TrainingArguments("out", deepspeed=str(path), max_steps=2, **header.arguments, **more)
    device = "cuda" if "gpu" in header.needs else "cpu"
    shape = ModelShape(256, "test")
    return compile_config(args, ParallelLayout.of(args, header.ranks), shape, device, environment=environment)


def test_each_common_case_has_a_file() -> None:
    names = {path.stem for path in FILES}
    assert {f"zero{stage}" for stage in range(4)} <= names
    assert {"zero2_offload", "zero3_offload", "zero3_nvme", "zeropp", "fp16", "bf16", "muon", "superoffload"} <= names
    assert {"long_context", "autocast", "zenflow", "deepcompile", "tensor_parallel", "context_parallel"} <= names


def test_the_list_of_files_is_complete_and_true() -> None:
    rows = dict(re.findall(r"\| `(\w+)\.json` \|.*\| (\w+) \|", (FOLDER / "README.md").read_text()))
    gpu = {path.stem for path in FILES if "gpu" in header_of(path).needs}
    expected = {"GPU": gpu, "trained": {path.stem for path in FILES} - gpu}
    assert {kind: {name for name, kinds in rows.items() if kinds == kind} for kind in expected} == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_says_when_to_use_it_and_compiles(path: Path) -> None:
    header = header_of(path)
    assert re.search(r"\bWhen: .+\.", header.text)
    config = compiled(path, header)
    assert '"auto"' not in config.to_json()
    args = TrainingArguments("out", deepspeed=config.to_json(), max_steps=2, **header.arguments)
    device = "cuda" if "gpu" in header.needs else "cpu"
    recompiled = compile_config(args, ParallelLayout.of(args, header.ranks), ModelShape(256, "test"), device)
    assert recompiled.to_dict() == config.to_dict()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_deepspeed_reads_each_file(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    header = header_of(path)
    DeepSpeedConfig(compiled(path, header).to_dict())


def micro_batch_of(arguments: dict[str, Any]) -> int:
    """The same global batch on two ranks, also where they share one replica."""
    return 4 * math.prod(arguments.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "context", "sequence"))


def train(path: Path, output_dir: Path, arguments: dict[str, Any], callbacks: Any = (), width: int = 32) -> list[float]:
    args = TrainingArguments(
        str(output_dir),
        deepspeed=str(path),
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=micro_batch_of(arguments),
        gradient_accumulation_steps=2,
        **arguments,
    )
    model = tiny_llama(hidden_size=width, intermediate_size=width)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(32), callbacks=list(callbacks))
    before = os.getcwd()
    os.chdir(output_dir.parent)  # monitors write beside the working directory
    try:
        trainer.train()
    finally:
        os.chdir(before)
    trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


RUN = [p for p in FILES if not header_of(p).needs & {"gpu", "libaio", "compiler"}]
COMPILED = [p for p in FILES if header_of(p).needs == {"compiler"}]


# Other optimizers, schedules and precisions give other numbers; all else must give those of plain data parallelism.
OTHER_NUMBERS = {"bf16", "bf16_lean", "long_context", "autocast", "muon", "warmup_schedule"}


@functools.cache
def plain_losses(output_dir: Path) -> list[float]:
    return list(pool(2).run(partial(train, FOLDER / "zero0.json", output_dir, {}))[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_each_file_trains(path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    header = header_of(path)
    check(path, pool(2).run(partial(train, path, tmp_path, header.arguments)), tmp_path, tmp_path_factory)


def check(path: Path, reports: list[list[float]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert len(reports[0]) == 2 and reports[0] == reports[1]
    plain = plain_losses(tmp_path_factory.getbasetemp() / "plain")
    assert reports[0] == pytest.approx(plain, rel=0.02 if path.stem in OTHER_NUMBERS else 1e-5)
    written = json.loads((tmp_path / "ds_config.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == micro_batch_of(header_of(path).arguments)


# -- what a compiler must make first -----------------------------------------------------------------------------


def train_compiled(extensions: str, path: Path, output_dir: Path) -> list[float]:
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    return train(path, output_dir, header_of(path).arguments)


@pytest.mark.jit
@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_files_that_need_an_operator_train(
    path: Path, extensions: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(path, pool(2).run(partial(train_compiled, extensions, path, tmp_path)), tmp_path, tmp_path_factory)


class DiskUse(TrainerCallback):
    """Bytes below a directory at the end of each step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.most = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        files = [path for path in self.directory.rglob("*") if path.is_file()]
        self.most = max(self.most, sum(path.stat().st_size for path in files))


def train_on_disk(extensions: str, nvme: Path, output_dir: Path) -> tuple[list[float], int]:
    """Losses, and the most bytes on the disk. Tensors of a smaller model than this would not be worth a file."""
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    path, use = FOLDER / "zero3_nvme.json", DiskUse(nvme)
    return train(path, output_dir, header_of(path, str(nvme)).arguments, [use], width=256), use.most


@pytest.mark.extended
@pytest.mark.jit
@pytest.mark.needs("libaio.h")
def test_offload_to_nvme_trains(extensions: str, tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    reports = pool(2).run(partial(train_on_disk, extensions, nvme, tmp_path))
    plain = pool(2).run(partial(train, FOLDER / "zero0.json", tmp_path / "plain", {}, width=256))[0]
    for losses, bytes_on_disk in reports:
        assert losses == pytest.approx(plain, rel=1e-5)
        assert bytes_on_disk > 2**20
