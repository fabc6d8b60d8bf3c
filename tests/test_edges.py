"""Edges of small functions that whole runs pass over: tools/mutants/recent.yaml has the mistakes that they notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationMixin

from ds_trainer.checkpoint.loading import expected_weights, range_reader, verification
from ds_trainer.checkpoint.loading.file_weights import _tied_names
from ds_trainer.checkpoint.loading.stored_tensors import _read_bin
from ds_trainer.data.packing.token_counts import _is_arrow
from ds_trainer.engine.loading import creation_memory
from ds_trainer.engine.loading.new_weights import _check_constructor
from ds_trainer.engine.loading.parameter_data import load_buffers
from ds_trainer.launching import restarts, runner
from ds_trainer.launching.launch_request import LaunchRequest, Target
from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import SUB_GROUP, estimate_memory, largest_sub_group
from ds_trainer.planner.memory.micro_batch import _kept
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.frozen_parts import freeze
from ds_trainer.recipes.language_model import tokenizer_of
from ds_trainer.recipes.prepared_sources import open_sources
from ds_trainer.recipes.recipe import ModelSpec, Recipe
from ds_trainer.recipes.task_data import _records
from ds_trainer.samples.prepared import block_file
from ds_trainer.samples.sources import json_text
from ds_trainer.samples.sources.files import find_files
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.training.model.chunked_loss.linear_head import head_problem, output_embedding
from ds_trainer.training.resume.changed_arguments import Consequences
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import REQUEUE
from ds_trainer.utils.outcomes import RankOutcome
from tests.planner.test_anchors import LLAMA_8B
from tests.support.models import tiny_llama

# -- weights -----------------------------------------------------------------------------------------------------------


def test_values_of_which_some_are_quantized_are_not_compared() -> None:
    types = {"values": torch.uint8, "scale": torch.float32}
    part: Any = Some(memory=torch.zeros(1))
    assert not verification._comparable(part, ["scale", "values"], Some(dtype=types.__getitem__))  # type: ignore[arg-type]


def test_a_conversion_that_cannot_be_traced_runs_once_for_each_group() -> None:
    runs = Counter[str]()

    def run(group: Any, sources: Any) -> dict[str, torch.Tensor]:
        runs[group.name] += 1
        return {group.name: torch.arange(3.0) + ord(group.name)}

    weights: Any = object.__new__(expected_weights.ExpectedWeights)
    weights._groups = {name: Some(name=name, tracer=None, sources=()) for name in "ab"}
    weights._computed, weights._run = None, run
    read = [weights.elements(name, np.array([index])).item() for name, index in (("a", 0), ("a", 2), ("b", 1))]
    assert (read, runs) == ([97, 99, 99], {"a": 1, "b": 1})


def test_only_pretrained_models_are_models_of_transformers() -> None:
    assert expected_weights.is_transformers_model(tiny_llama())
    assert not expected_weights.is_transformers_model(GenerationMixin())


def test_a_tie_to_a_name_that_the_model_lacks_is_none() -> None:
    model = nn.Linear(2, 2)
    model.all_tied_weights_keys = {"absent": "weight"}  # type: ignore[assignment]
    assert _tied_names(model) == {}


def test_a_reader_needs_a_page_for_each_thread_and_counts_its_seconds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(range_reader._THREADS * 4096)):
        range_reader.RangeReader(range_reader._THREADS * 4096 - 1)
    reader = range_reader.RangeReader()
    reader.read([], torch.zeros(1))
    assert 0 <= reader.seconds < 60


def test_a_pickled_file_that_ends_before_its_elements_is_damaged(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as whole, zipfile.ZipFile(tmp_path / "cut.bin", "w") as cut:
        for name in whole.namelist():  # 60,000 elements according to the pickle
            cut.writestr(name, whole.read(name).replace(b"M\xe8\x03", b"M`\xea"))
    assert list(_read_bin(tmp_path / "whole.bin")) == ["weight"]
    with pytest.raises(ConfigError, match="does not contain the elements of weight"):
        _read_bin(tmp_path / "cut.bin")


def test_buffers_without_a_source_stay_as_they_are() -> None:
    model = nn.BatchNorm1d(2)
    load_buffers(model, None, torch.device("cpu"))
    assert model.running_var is not None and model.running_var.tolist() == [1, 1]


def test_a_part_that_initializes_itself_is_accepted_inside_a_model_of_transformers() -> None:
    part = nn.Linear(2, 2)
    part.init_weights = lambda: None  # type: ignore[assignment]
    model = tiny_llama()
    model.part = part
    _check_constructor(model)
    with pytest.raises(ConfigError, match="Linear initializes itself"):
        _check_constructor(part)


def test_engines_with_groups_that_offload_has_emptied_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    optimizer: Any = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    optimizer.__dict__.update(offload_param=True, fp16_partitioned_groups_flat=[None])
    optimizer.fp32_partitioned_groups_flat = [torch.zeros(1)]
    monkeypatch.setattr(creation_memory, "_needs_states", lambda optimizer: True)
    creation_memory.check_creation(optimizer, Counter(create_reduce_and_remove_grad_hooks=1))


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps freed pages")
def test_freed_pages_go_back_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(creation_memory.ctypes, "CDLL", lambda name: Some(malloc_trim=calls.append))
    creation_memory.return_freed_memory()
    assert calls == [0]


# -- heads and data ----------------------------------------------------------------------------------------------------


def test_which_heads_have_tiles_and_which_copy_is_trained() -> None:
    kind = type("Linear", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})
    for one, problem in (({}, None), ({"lora_variant": {"a": 1}}, "variant"), ({"lora_bias": {"a": True}}, "bias")):
        head = kind()
        head.base_layer = nn.Linear(2, 2)
        head.__dict__.update(one)
        found = head_problem(head)
        assert (found is None) == (problem is None), one
    plain = nn.Linear(2, 2)
    plain.original_module = nn.Linear(2, 2)  # not a wrapper of peft
    model = nn.Module()
    model.get_output_embeddings = lambda: plain  # type: ignore[assignment]
    assert output_embedding(model) is plain


def test_what_has_the_form_of_arrow_without_its_format_is_read_by_sample() -> None:
    assert not _is_arrow(Some(with_format=str, format=None))


def test_freezing_a_part_of_a_text_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="selects no parameter"):
        freeze(tiny_llama(), ["language_model"], "here")


@pytest.mark.parametrize(
    ("model", "tokenizer", "key"), [(None, "./absent", "data.tokenizer"), ("./absent", None, "model.path")]
)
def test_a_missing_tokenizer_is_named_with_its_key(model: Any, tokenizer: Any, key: str) -> None:
    recipe = Recipe(model=ModelSpec(path=model), data=DataSpec(train=("x",), tokenizer=tokenizer), path="r.yaml")
    with pytest.raises(ConfigError, match=key):
        tokenizer_of(recipe)


def lines(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(count)))
    return path


def test_files_of_the_evaluation_are_not_trained_on(tmp_path: Path) -> None:
    kept, other = lines(tmp_path / "eval.jsonl", 2), lines(tmp_path / "train.jsonl", 2)
    spec = DataSpec(train=(str(tmp_path),), eval=(str(kept),))
    train, evaluation = open_sources(spec, lambda form: None)
    assert [[file.path for file in source.files] for source in (*train, *evaluation)] == [[other], [kept]]


def test_a_limit_counts_samples_and_a_path_is_that_file(tmp_path: Path) -> None:
    spec = SourceSpec(path=(str(lines(tmp_path / "x.jsonl", 3)),), limit=2)
    assert [file.path for file in find_files(spec, "data.train")] == [tmp_path / "x.jsonl"]
    assert len(list(_records(Source(spec, "data.train"), lambda row: row, BadLines()))) == 2  # type: ignore[arg-type, return-value]


def test_the_key_that_is_repeated_is_named() -> None:
    with pytest.raises(json_text.RepeatedKey, match=r"^b$"):
        json_text._object([("a", 1), ("b", 2), ("b", 3)])


def test_a_block_is_verified_once_and_descriptor_0_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = block_file.BlockWriter(tmp_path / "file")
    writer.write(b"x" * 100)
    file = block_file.BlockFile(tmp_path / "file", writer.finish())
    file.read(0, 1)
    sums = Counter[str]()
    monkeypatch.setattr(block_file.zlib, "crc32", lambda data: sums.update(["crc"]))
    assert bytes(file.read(1, 3)) == b"xx" and not sums
    closed: list[int] = []
    writer._descriptor = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closed.append)
        writer.close()
    assert closed == [0]


# -- launching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts_preempted", [False, True])
def test_a_preempted_job_is_left_to_the_scheduler(
    restarts_preempted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(runner, "_run_once", lambda plan, job, number, requests: seen.append(number) or end)
    monkeypatch.setattr(runner, "_FIRST_PAUSE", 0.0)
    end = restarts.AttemptEnd(REQUEUE)
    target = Target("x.py")
    request = LaunchRequest(target, 1, 1, max_restarts=1, restart_preempted=restarts_preempted, job_dir=str(tmp_path))
    assert runner.run(request) == REQUEUE
    assert len(seen) == 1 + restarts_preempted


def test_a_batch_script_is_told_which_rank_failed_without_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outcomes.0").mkdir()
    ended = {1: RankOutcome(1, 1, "node7", 0.0, "")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarts.outcomes, "read_outcomes", lambda directory: ended)
        assert restarts.main([str(tmp_path), "0", "1"]) == 0
    assert "rank 1 on node7: ended with exit code 1" in capsys.readouterr().out


def test_grandchildren_end_too() -> None:
    program = """if True:
        import subprocess, time, psutil
        from ds_trainer.launching.processes import end_descendants
        subprocess.Popen(["sh", "-c", "sleep 120 & wait"])
        while len(psutil.Process().children(recursive=True)) < 2:
            time.sleep(0.01)
        print(end_descendants())"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["2"]


# -- plans and resumed runs --------------------------------------------------------------------------------------------


def test_sums_of_a_plan() -> None:
    model, run = PlannedModel.from_config(LLAMA_8B, "8B"), Candidate(8, 512, micro_batch=1)
    memory = estimate_memory(model, run, Cluster.of("H100-80GB", 1, 8))
    assert memory.overhead["CUDA context"] > 0
    assert memory.device == memory.tensors + sum(memory.overhead.values())
    twice = Candidate(8, 512, micro_batch=2)
    assert _kept(model, twice, model.stack) == 2 * _kept(model, run, model.stack)
    groups: Any = Some(trainable=1e15, largest=7.0)
    assert largest_sub_group(groups, Some(shards=2)) == SUB_GROUP + 3.5  # type: ignore[arg-type]


def test_a_new_schedule_explains_its_own_arguments_only() -> None:
    for schedule, name, wanted in ((True, "logging_dir", "from step 6 on"), (False, "warmup_steps", "from step 6 on")):
        changes: Any = Some(schedule=schedule, values={}, optimizer=False)
        made = Consequences(changes, Some(max_steps=-1), (1, 1), (9, 9), 5, None, "1e-3")  # type: ignore[arg-type]
        assert made._follows(name) == wanted, name
