"""The GPU kit on the CPU: every stage runs, judges what it measured, and keeps it when it is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import gpu_features  # noqa: E402
import gpu_oracle  # noqa: E402
import gpu_syncs  # noqa: E402
import gpu_throughput  # noqa: E402
from kept_results import Results  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def kit(*arguments: str, work: Path | None = None, benchmarks: Path = BENCHMARKS) -> subprocess.CompletedProcess[str]:
    command = [str(benchmarks / "gpu.sh"), *arguments]
    variables = environment() if work is None else {**environment(), "GPU_KIT_WORK": str(work)}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=900)


@pytest.mark.parametrize(("limit", "found"), [(50, 0), (64, 64), (1000, 960), (5000, 4096)])
def test_the_longest_sequence_is_found_by_halving(limit: int, found: int) -> None:
    tried: list[int] = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= limit

    assert found <= gpu_features.longest(fits, 64, 4096) <= limit
    assert len(tried) < 14


STAGES = {
    "first": ("first-oracle", "shared-2", "shared-4", "endings", "saves-16gb", "masks", "host-time"),
    "oracle": ("tests", "oracle", "pairs"),
    "kernels": ("kernels", "loss", "experts"),
    "speed": ("throughput", "features"),
    "memory": ("memory", "longest"),
    "stalls": ("syncs", "saves"),
}


Cases = dict[str, list[dict[str, Any]]]


def run_stages(stages: list[str], directory: Path) -> Cases:
    """Run stages of the kit on the CPU; the cases of each part, all of which have passed."""
    completed = kit("--cpu", "--out", str(directory / "out"), *stages, work=directory / "work")
    assert completed.returncode == 0, completed.stdout[-6000:] + completed.stderr[-4000:]
    assert {path.name for path in (directory / "out").iterdir()} == {f"{stage}.json" for stage in stages}
    found: Cases = {}
    for stage in stages:
        assert f"[gpu] {stage}: passed after" in completed.stdout
        parts = json.loads((directory / "out" / f"{stage}.json").read_text(encoding="utf-8"))["parts"]
        assert tuple(parts) == STAGES[stage]
        assert all(part["outcome"] == "passed" and part["printed"] for part in parts.values())
        found |= {name: part.get("cases", []) for name, part in parts.items()}
    assert all(case.get("passed", True) for cases in found.values() for case in cases)
    return found


@pytest.mark.slow
def test_what_a_borrowed_gpu_runs_first_runs_on_the_cpu(tmp_path: Path) -> None:
    found = run_stages(["first"], tmp_path)
    names = [case["name"] for part in ("first-oracle", "shared-2", "shared-4", "masks") for case in found[part]]
    assert names == ["resume, zero1 fp32", "dp2 zero1 fp32", "dp2 tp2 zero3 fp32", "packed encoder fp32"]
    killed, stopped, bare = found["endings"]
    assert killed["codes"][1] == -signal.SIGKILL and killed["noticed_after"] < 60
    assert stopped["codes"] == [77, 77] and stopped["resumed"] == [0, 0] and stopped["difference"] < 1e-5
    assert bare["codes"] == [0] and bare["difference"] < 1e-5
    assert found["saves-16gb"][0]["medians"]["ds_trainer, background"]["held_up"] > 0


@pytest.mark.matrix  # five minutes; the variants that it times are trained by tests/training/model and tests/engine
def test_the_stage_of_speed_runs_on_the_cpu(tmp_path: Path) -> None:
    found = run_stages(["speed"], tmp_path)
    for case in found["throughput"]:
        assert all(loop["tokens_per_second"] > 0 for loop in case["loops"].values())
    assert all(case["targets_per_second"] > 0 for case in found["features"])
    assert found["features"][0]["profile"]["operators"] and found["features"][0]["profile"]["steps"] == 3
    assert found["features"][1]["variant"] == gpu_features.DEEPSPEEDS_NORM


# Instead: the other tests of tests/benchmarks/test_gpu_kit.py; what its oracle compares:
# tests/training/test_layouts.py
@pytest.mark.matrix
@pytest.mark.slow
def test_every_other_stage_runs_on_the_cpu(tmp_path: Path) -> None:
    found = run_stages(["oracle", "kernels", "memory", "stalls"], tmp_path)
    quick = [case.name for case in gpu_oracle.cases() if case.quick]
    assert [case["name"] for case in found["oracle"]] == quick
    assert {"dp2 zero3 fp32", "tp2 zero1 fp32", "cp2 zero2 fp32", "sp2 zero3 fp32"} <= set(quick)
    assert len(found["pairs"]) == 2
    assert len(found["loss"]) > 5 and all(case["same"] for case in found["loss"])
    assert [case["ranks"] for case in found["experts"]] == [1] * 6 + [2, 2, 4, 4]
    assert len(found["memory"]) == 12
    assert all(case["predicted"]["tensors"] > 0 and case["measured"]["seconds"] > 0 for case in found["memory"])
    assert found["longest"][-1] == {"longest": 128, "out_of_time": False}
    assert [case["variant"] for case in found["syncs"]] == list(gpu_syncs.VARIANTS)
    assert found["saves"][0]["medians"]["ds_trainer, background"]["held_up"] > 0


def test_a_part_that_fails_keeps_what_it_printed(tmp_path: Path) -> None:
    """A stage whose script cannot start, beside packages that are older than this one asks for."""
    wheels = tmp_path / "benchmarks" / "wheels"
    shutil.copytree(BENCHMARKS, wheels.parent, ignore=shutil.ignore_patterns("results", "wheels"))
    (wheels.parent / "ring_kernels.py").write_text("raise SystemExit('no kernels here')")
    (wheels.parent / "gpu_loss.py").write_text("print('fine')")
    bounds = (BENCHMARKS.parent / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(bounds.replace("torch>=2.12", "torch>=98"))
    (tmp_path / "tests").mkdir()
    old = tmp_path / "work" / "site" / "filelock-3.18.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: filelock\nVersion: 3.18.0\n")
    wheel(wheels, "filelock", "99.0")
    wheel(wheels, "psutil", "99.0")  # the installed one is new enough
    wheel(wheels, "torch", "99.0")  # the installed one is too old, and stays
    completed = kit(
        "--cpu", "--out", str(tmp_path / "out"), "kernels", work=tmp_path / "work", benchmarks=wheels.parent
    )
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert "installing 1 packages" in completed.stdout
    assert (tmp_path / "work" / "site" / "filelock-99.0.dist-info").is_dir()
    parts = json.loads((tmp_path / "out" / "kernels.json").read_text(encoding="utf-8"))["parts"]
    assert parts["kernels"]["outcome"] == "failed" and parts["kernels"]["printed"] == ["no kernels here"]
    assert parts["loss"]["outcome"] == "passed" and parts["loss"]["printed"] == ["fine"]


def wheel(directory: Path, name: str, version: str) -> None:
    """An empty package."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_unknown_commands_are_rejected() -> None:
    unknown = kit("--cpu", "kernel")
    assert unknown.returncode == 2
    assert "unknown stage or option 'kernel'. Stages: first oracle kernels speed memory stalls" in unknown.stderr
    assert kit("--minutes", "0").returncode == 2
    if not torch.cuda.is_available():
        assert "--cpu runs the same code" in kit("kernels").stderr
    assert "a killed rank, a stop file" in kit("--help").stdout


def test_an_interrupted_oracle_keeps_its_cases_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "oracle.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_oracle.py"), "--device", "cpu", "--world", "1", "--out", str(out)]
    variables = {**environment(), "GPU_KIT_TEST": str(out)}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 180
    assert not ranks_of(out.with_name("other"))
    while not (out.exists() and ranks_of(out)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    cases = json.loads(out.read_text(encoding="utf-8"))["cases"]
    assert cases
    assert f"| {cases[0]['name']} |" in text.split("\n\n")[-1]
    deadline = time.monotonic() + 60
    while (remaining := ranks_of(out)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not remaining


def ranks_of(out: Path) -> list[str]:
    """Command lines of processes that a run of the oracle has started and that are there still."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["environ"] or {}).get("GPU_KIT_TEST") == str(out):
            found.append(" ".join(process.info["cmdline"] or []))
    return found


def test_results_are_on_the_disk_after_every_case(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "r.json", "cpu", minutes=0, load=3)
    assert results.out_of_time
    for number in (1, 2):
        results.add({"number": number})
        kept = json.loads((tmp_path / "new" / "r.json").read_text(encoding="utf-8"))
        assert [case["number"] for case in kept["cases"]] == list(range(1, number + 1))
    assert kept["environment"]["torch"] == torch.__version__
    assert kept["environment"]["load"] == 3
    assert not Results(None, "cpu").out_of_time


@pytest.mark.parametrize(
    ("key", "factor"), [("losses", 1.001), ("norms", 2.0), ("losses", float("nan")), ("weights", 1.01)]
)
def test_the_oracle_detects_wrong_results(key: str, factor: float) -> None:
    wanted = gpu_oracle.plain(range(2))
    found = gpu_oracle.plain(range(2))
    assert gpu_oracle.differences(found, wanted, 2) == {"loss": 0.0, "norm": 0.0, "weights": 0.0}
    if key == "weights":
        found.weights = {name: factor * weight for name, weight in found.weights.items()}
    else:
        setattr(found, key, [value * factor for value in getattr(found, key)])
    worst = gpu_oracle.differences(found, wanted, 2)
    assert not all(difference <= gpu_oracle.TOLERANCE["fp32"] for difference in worst.values())


def test_a_bad_row_makes_the_loss_nan_where_the_rollback_expects_it() -> None:
    model, rows = gpu_oracle.build_model(), gpu_oracle.Rows(gpu_oracle.BAD_STEP)
    size = gpu_oracle.GLOBAL_BATCH
    for step in range(gpu_oracle.STEPS):
        tokens = rows.tokens[step * size : (step + 1) * size]
        assert bool(model(input_ids=tokens, labels=tokens).loss.isnan()) == (step == gpu_oracle.BAD_STEP - 1)


def test_a_loss_that_differs_from_the_bare_loop_invalidates_the_measurement() -> None:
    case = gpu_throughput.CASES["cpu"][0]
    turns = [
        {"round": 0, "loop": name, "seconds": 0.5, "peak_gb": None, "losses": [5.0, losses]}
        for name, losses in zip(gpu_throughput.LOOPS, (4.0, 4.0, 4.0, 4.2), strict=True)
    ]
    loops = dict(gpu_throughput.summary(case, turns, "cpu"))
    assert loops["ds_trainer"]["of_bare_loop"] == [1.0, 1.0, 1.0]
    assert "error" not in loops["ds_trainer"]
    assert "other losses" in loops["transformers"]["error"]
    assert dict(gpu_throughput.summary(case, [], "cpu"))["ds_trainer"] == {"not_run": True}
    assert not gpu_throughput.same_losses([float("nan")], [float("nan")])


def test_flops_are_those_of_the_weights_that_compute() -> None:
    """Of adapters those of a frozen model, of experts those of the chosen ones."""
    full, experts, lora = gpu_throughput.CASES["cuda"][2:]
    tokens = full.micro_batch * full.sequence
    weights = 3.2e9
    attention = 12 * full.layers * full.hidden * full.sequence * tokens
    assert gpu_throughput.flops_of_step(full) == pytest.approx(6 * weights * tokens + attention, rel=0.02)
    frozen = gpu_throughput.flops_of_step(lora)
    trained = gpu_throughput.flops_of_step(gpu_throughput.replace(lora, lora=0))
    assert 0.66 < frozen / trained < 0.75
    chosen, tokens = experts.layers * 8 * 3 * experts.hidden * experts.intermediate, experts.micro_batch * 4096
    others = experts.hidden * (experts.vocabulary + experts.layers * (2 * 4096 + 2 * 512 + experts.experts))
    attention = 12 * experts.layers * 4096 * 4096 * tokens
    assert gpu_throughput.flops_of_step(experts) == pytest.approx(6 * (chosen + others) * tokens + attention, rel=0.05)


@pytest.mark.parametrize(
    ("files", "origin"),
    [
        (["ds_trainer/engine/x.py", "deepspeed/runtime/engine.py"], "ds_trainer"),
        (["torch/_tensor.py", "deepspeed/runtime/engine.py", "ds_trainer/engine/x.py"], "deepspeed"),
        (["torch/_tensor.py", "ds_trainer/engine/x.py", "deepspeed/runtime/engine.py"], "ds_trainer"),
        (["transformers/masking_utils.py", "ds_trainer/engine/x.py"], "others"),
        (["torch/_tensor.py", "benchmarks/x.py"], "others"),
    ],
)
def test_the_origin_of_a_host_sync_is_found(files: list[str], origin: str) -> None:
    assert gpu_syncs.origin(files) == origin
