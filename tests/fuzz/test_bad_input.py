"""Whatever is in a file, a variable or a command line: it is accepted, or refused in one error without a traceback.

``DS_TRAINER_FUZZ=100000 pytest tests/fuzz -m 'extended or matrix'`` tries so many inputs instead of 2,000, others at
every run, and prints their counts.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_trainer import TrainingArguments
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint, Manifest
from ds_trainer.cli.main import main
from ds_trainer.config.compiler import compile_config
from ds_trainer.launching.hosts import read_hostfile, slurm_hosts
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.recipes.recipe import load_recipe
from ds_trainer.samples.chat.problems import RenderError
from ds_trainer.samples.chat.rendering import Renderer
from ds_trainer.samples.chat.templates import load_template
from ds_trainer.samples.prepared.block_file import DamagedDataset
from ds_trainer.samples.prepared.manifest import DatasetManifest
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.printable import printable
from ds_trainer.utils.ranks import resolve_ranks
from tests.fuzz import grammar

INPUTS = int(os.environ.get("DS_TRAINER_FUZZ", "2000"))
MOST_SECONDS = 5.0  # of the processor, so that a busy machine changes nothing
MOST_CHARACTERS = 30_000
REFUSED = (ConfigError, RenderError, BrokenCheckpoint, DamagedDataset)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with files that the inputs name."""
    path, before = tmp_path_factory.mktemp("inputs"), Path.cwd()
    os.chdir(path)
    Path("s.py").write_text("print(1)\n")
    Path("r.yaml").write_text(grammar.RECIPES[1])
    Path("x.jsonl").write_text(grammar.RECORDS[1])
    Path("ds.json").write_text(grammar.DEEPSPEED[0])
    Path("hosts").write_text(grammar.HOSTFILES[0])
    Path("config.json").write_text('{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2}')
    Path("run").mkdir()
    Path("loop").symlink_to("loop")
    os.mkfifo("fifo")
    yield path
    os.chdir(before)


def _file(name: str, text: str) -> str:
    Path(name).write_bytes(grammar.as_bytes(text))
    return name


def _deepspeed(text: str) -> None:
    args = TrainingArguments(output_dir="out", deepspeed=_file("given.json", text), use_cpu=True)
    compile_config(args, ParallelLayout.of(args, 1))


def _records(file: tuple[str, str]) -> None:
    bad = BadLines()
    list(Source(SourceSpec(path=(_file(*file),)), "data.train").read(bad))
    bad.check()


def _template(text: str) -> None:
    tokenizer: Any = SimpleNamespace(special_tokens_map={"eos_token": "</s>"}, chat_template=None)
    renderer = Renderer(load_template(text, tokenizer), tokenizer, {}, "2026-01-01")
    renderer.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None)


def _manifest(given: tuple[type[Manifest | DatasetManifest], str]) -> None:
    kind, text = given
    Path("kept").mkdir(exist_ok=True)
    _file("kept/manifest.json", text)
    kind.read(Path("kept"))


def _environment(variables: dict[str, str]) -> None:
    slurm_hosts(variables)
    resolve_ranks(variables)


def _command(words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    said = err.getvalue()
    assert "Traceback" not in said
    assert printable(said) == said and printable(out.getvalue()) == out.getvalue()
    assert code == 0 or said.strip() or out.getvalue().strip()


def _arguments(given: tuple[str, str]) -> None:
    TrainingArguments(output_dir="out", **dict([given]), use_cpu=True)  # type: ignore[arg-type]


KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], object]]] = {
    "recipe": (grammar.recipes, lambda text: load_recipe(_file("given.yaml", text))),
    "deepspeed": (grammar.deepspeed_files, _deepspeed),
    "hostfile": (grammar.hostfiles, lambda text: read_hostfile(_file("given", text), 2)),
    "environment": (grammar.environments, _environment),
    "records": (grammar.records, _records),
    "template": (grammar.templates, _template),
    "manifest": (grammar.manifests, _manifest),
    "arguments": (grammar.arguments, _arguments),
    "command": (grammar.command_lines, _command),
}


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_input_is_accepted_or_refused_in_one_error(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    strategy, parse = KINDS[kind]
    refused: list[str] = []
    seconds: list[float] = []

    @settings(
        max_examples=INPUTS // len(KINDS),
        derandomize=INPUTS <= 2000,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(value=strategy)
    def try_it(value: Any) -> None:
        began = time.process_time()
        try:
            parse(value)
        except REFUSED as error:
            text = str(error)
            assert text.strip()
            assert printable(text) == text
            assert len(text) <= MOST_CHARACTERS
            refused.append(text)
        seconds.append(time.process_time() - began)
        assert seconds[-1] < MOST_SECONDS

    try_it()
    if "DS_TRAINER_FUZZ" in os.environ:
        with capsys.disabled():
            messages = len({re.sub(r"'[^']*'|\d+", "", text)[:60] for text in refused})
            print(f"\n{kind}: {len(seconds):,} inputs, {len(refused):,} refused ({messages:,} beginnings), ", end="")
            print(f"{sum(seconds):.0f} s, the slowest {max(seconds):.2f} s")
    assert kind == "command" or len(refused) > INPUTS // len(KINDS) // 10  # the grammar makes mistakes
    assert len(seconds) > len(refused)  # and valid inputs
