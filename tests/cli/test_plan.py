"""``ds-trainer plan``: tables, JSON, inverse questions, exit codes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.arguments.parser import HfArgumentParser
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.cli.main import main
from ds_trainer.cli.plan import QUANTITIES, solve
from ds_trainer.cli.plan_outputs import compiled_config, training_arguments
from ds_trainer.cli.plan_request import PlanRequest, many_tokens, tokens
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.calibration import record_run
from ds_trainer.planner.candidate import FEATURES
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.search import Goal, fits, search
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
    table = next(number for number, line in enumerate(lines) if line.startswith("    plan "))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["1", "2", "3"]
    assert "largest moment" in printed and "optimizer states" in printed
    assert "  ds-trainer launch --nproc-per-node 8 train.py --zero_stage" in printed


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
    machine = ["--devices-per-node", "1", "--host-memory", "3000"]
    assert main(["plan", str(path), *machine, "--offload", "none"]) == NOTHING_FITS
    printed = capsys.readouterr().out
    assert "Nothing fits. Nearest:" in printed and "GB of a device" in printed
    changes = printed.split("would fit with\n")[1].split("\n\n")[0].splitlines()
    assert changes[0].startswith("  offload_optimizer='cpu', offload_param='cpu': ") and len(changes) == 3
    assert main(["plan", str(path), *machine, "--offload", "none", "--json"]) == NOTHING_FITS
    found = json.loads(capsys.readouterr().out)
    assert found["plans"] == [] and all(plan["problem"] for plan in found["rejected"])
    assert [change["fits"] for change in found["changes"]] == [True] * 3
    assert found["changes"][0]["arguments"]["offload_param"] == "cpu"
    assert "bars" not in found and max(len(line) for line in printed.splitlines() if "█" in line) < 80


def with_values(line: str) -> list[str]:
    return shlex.split(line.split("train.py ")[1])


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_command_and_the_configuration_are_those_of_the_plan(
    nodes: int, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", model, "--nodes", str(nodes), "--seq-len", "32K", "--global-batch", "256", "--zero-stage", "3"]
    argv += ["--offload", "optimizer", "--sequence-parallel-size", "2"]
    assert main([*argv, "--json", "--config", str(tmp_path / "ds.json")]) == DONE
    found = json.loads(capsys.readouterr().out)
    best = found["plans"][0]
    machines = f"--nodes {nodes} --nproc-per-node 8 --hostfile hosts" if nodes > 1 else "--nproc-per-node 8"
    assert best["command"].startswith(f"ds-trainer launch {machines} train.py --")
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(with_values(best["command"]))
    for name, value in best["arguments"].items():
        assert getattr(args, name) == value, name
    assert ("deepspeed" in best["arguments"]) == (nodes > 1)  # hpZ
    layout = ParallelLayout.of(args, 8 * nodes)
    batch = BatchPlan(layout, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert batch.global_batch_size == 256
    config = json.loads((tmp_path / "ds.json").read_text())
    assert config == found["deepspeed_config"]
    assert config["zero_optimization"]["stage"] == 3 and config["bf16"]["enabled"]
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["train_micro_batch_size_per_gpu"] == best["arguments"]["per_device_train_batch_size"]
    assert main([*argv, "--config", "-"]) == DONE
    assert json.loads(capsys.readouterr().out) == config


def test_the_launcher_takes_the_command(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("hosts").write_text("a slots=8\nb slots=8\n")
    for nodes in ("1", "2"):
        assert main(["plan", model, "--nodes", nodes, "--global-batch", "64", "--json"]) == DONE
        command = shlex.split(json.loads(capsys.readouterr().out)["plans"][0]["command"])
        assert command[:2] == ["ds-trainer", "launch"]
        assert main(["launch", "--dry-run", *command[2:]]) == DONE
        out = capsys.readouterr().out
        encoded = re.findall(r"--encoded=(\S+)", out)  # arguments with quotes, for other machines
        assert "--zero_stage" in out + "".join(b64decode(one).decode() for one in encoded)


def test_every_plan_is_a_valid_configuration() -> None:
    request = PlanRequest(
        PlannedModel.from_config(LLAMA_8B), LLAMA_8B, Cluster.of("H100", 1, 8), Goal(8192, 64, margin=0.01)
    )
    result = search(request.model, request.cluster, request.goal)
    kinds = {}
    for plan in (*result.fitting, *result.rejected):
        one = plan.candidate
        kinds[one.stage, one.offload_optimizer, one.offload_param, one.tp, one.cp, one.sp] = plan
    assert len(kinds) > 50
    for plan in kinds.values():
        one = plan.candidate
        args = training_arguments(request, plan)
        assert args.activation_checkpointing == one.checkpointing
        layout = ParallelLayout.of(args, 8)
        batch = BatchPlan(layout, args.per_device_train_batch_size, args.gradient_accumulation_steps)
        assert batch.global_batch_size == one.global_batch == 64
        zero = compiled_config(request, plan).to_dict()["zero_optimization"]
        assert zero["stage"] == one.stage
        for state, is_offloaded in (("optimizer", one.offload_optimizer), ("param", one.offload_param)):
            assert (zero.get(f"offload_{state}", {}).get("device") == "cpu") == is_offloaded


def test_hours_and_cost(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--global-batch", "64", "--tokens", "15B", "--price", "2.5"]
    assert main(["plan", model, *more]) == DONE
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("15,000,000,000 tokens: ") and line.endswith(" at 2.5 an hour")
    assert main(["plan", model, *more, "--json"]) == DONE
    best = json.loads(capsys.readouterr().out)["plans"][0]
    hours = 15e9 / best["tokens_per_second"] / 3600
    assert best["training"] == pytest.approx(
        {"tokens": 15e9, "hours": hours, "device_hours": 8 * hours, "cost": 20 * hours}
    )


def test_the_memory_is_drawn(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.svg"
    assert main(["plan", model, "--plot", str(path)]) == DONE
    assert "GB of a device; dashed: 84.9 GB" in path.read_text()
    path.unlink()
    assert main(["plan", model, "--devices-per-node", "1", "--offload", "none", "--plot", str(path)]) == NOTHING_FITS
    assert "optimizer step" in path.read_text()  # of the nearest plan
    assert main(["plan", model, "--plot", str(tmp_path / "memory.png")]) == CANNOT_WORK
    assert "figures are SVG files. Use" in capsys.readouterr().err


def test_sequences_beyond_the_positions_of_a_model_are_noted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(model) / "config.json").write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": 16384}))
    for length, is_beyond in (("16K", False), ("32K", True)):
        assert main(["plan", model, "--seq-len", length]) == DONE
        assert ("more than the 16,384 positions of the model" in capsys.readouterr().out) == is_beyond


FIXED = {"stage": 3, "checkpointing": True, "offload_optimizer": False, "tp": 1, "sp": 1}


def test_measured_runs_correct_the_plans(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def best(*more: str) -> dict[str, Any]:
        main(["plan", model, "--global-batch", "64", "--zero-stage", "3", "--json", *more])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plain = best()
    record_run("H100-80GB", "llama", 2.0, None)
    corrected, other = best(), best("--device", "H200")
    times = [one["plans"][0]["seconds"]["estimate"] for one in (plain, corrected)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)
    note = "For llama on H100-80GB the plans are corrected by 1 run: time x 2.00."
    assert note in corrected["notes"] and note not in plain["notes"] and note not in other["notes"]


def test_a_probe_corrects_later_plans(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def notes(*more: str) -> str:
        main(["plan", model, "--zero-stage", "3", "--json", *more])
        return " ".join(json.loads(capsys.readouterr().out)["notes"])

    assert "probe" not in notes()
    assert "Probed on the CPU in" in notes("--probe")
    assert "corrected by an earlier --probe of these layers on the CPU" in notes()
    assert "probe" not in notes("--precision", "fp32")


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_inverse_questions(quantity: str) -> None:
    without = dict.fromkeys(FEATURES, False)
    model, goal = PlannedModel.from_config(LLAMA_8B), Goal(8192, fixed=tuple({**FIXED, **without}.items()))
    if quantity == "devices":
        goal = replace(goal, length=32768)

    def solved(device: str) -> int:
        cluster = Cluster.of(device, 1, 8)
        found = solve(quantity, model, cluster, goal)
        assert found is not None and found.result.fitting
        more = {
            "seq-len": lambda: (model, cluster, replace(goal, length=found.value + 4096)),
            "params": lambda: (model.with_layers(found.model.stack.layers + 1), cluster, goal),
            "devices": lambda: (model, replace(cluster, devices_per_node=found.value // 2), goal),
            "micro-batch": lambda: (
                model,
                cluster,
                replace(goal, fixed=(*goal.fixed, ("micro_batch", found.value + 1))),
            ),
        }[quantity]()
        assert not fits(*more)
        return found.value

    large, small = solved("H200"), solved("H100-80GB")
    if quantity == "devices":
        assert 1 < large <= small
    else:
        assert large > small > 0


def test_an_inverse_question_on_the_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_8B, "max_position_embeddings": 131072}
    (Path(model) / "config.json").write_text(json.dumps(config))
    assert main(["plan", model, "--solve", "seq-len"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    value = int(lines[0].removeprefix("seq-len: ").split()[0].replace(",", ""))
    assert value > 131072 and "tokens a sequence (in steps of 4,096)" in lines[0]
    assert "more than the 131,072 positions of the model" in lines[1]
    assert main(["plan", model, "--seq-len", "16K", "--solve", "micro-batch", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["value"] == found["plans"][0]["arguments"]["per_device_train_batch_size"]
    (Path(model) / "config.json").write_text(json.dumps(LLAMA_70B))
    small = ["--devices-per-node", "1", "--offload", "none"]
    assert main(["plan", model, *small, "--solve", "seq-len"]) == NOTHING_FITS
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["MODEL", "--device", "X9"], "device 'X9' is not in the table"),
        (["MODEL", "--device", "H10"], "Did you mean 'h100'?"),
        (["MODEL", "--zero_stage", "2"], "plan: unknown option '--zero_stage'. Did you mean '--zero-stage'?"),
        (["missing.json"], "missing.json cannot be read"),
        (["missing.yaml"], "missing.yaml"),
        (["MODEL", "--global-batch", "7", "--tensor-parallel-size", "1", "--sequence-parallel-size", "1",
          "--context-parallel-size", "1"], "--global-batch 7 cannot be divided among 8 devices"),
        (["MODEL", "--global-batch", "64", "--micro-batch", "3"], "Use 63 or 66."),
        (["MODEL", "--tensor-parallel-size", "3"], "8 ranks cannot be divided by tensor 3"),
        (["MODEL", "--nodes", "2", "--tensor-parallel-size", "16"], "more than the 8 devices of a machine"),
        (["MODEL", "--seq-len", "4100", "--sequence-parallel-size", "8"], "4100 tokens are no multiple of 16"),
        (["MODEL", "--zero-stage", "2", "--offload", "all"], "--offload all needs --zero-stage 3, but it is 2"),
        (["MODEL", "--zero-stage", "0", "--offload", "optimizer"], "needs --zero-stage 1 or higher"),
        (["MODEL", "--zero-stage", "0", "--precision", "fp16"], "--zero-stage 0 does not work with fp16"),
        (["MODEL", "--device", "T4", "--precision", "bf16"], "T4 has no fast units"),
        (["MODEL", "--price", "2"], "--price needs --tokens"),
        (["MODEL", "--this-machine", "--device", "H100"], "--this-machine and --device both"),
        (["MODEL", "--config", "MODEL"], "--config "),
        (["MODEL", "--plot", "MODEL"], "--plot ")
    ]
)  # fmt: skip
def test_mistakes(argv: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(model if part == "MODEL" else part for part in argv)]) == CANNOT_WORK
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seq-len", "3x"), ("--seq-len", "-4"), ("--seq-len", "0"), ("--nodes", "0"), ("--nodes", "two"),
        ("--devices-per-node", "-8"), ("--global-batch", "1.5"), ("--margin", "2"), ("--margin", "-0.1"),
        ("--margin", "nan"), ("--lora-rank", "-1"), ("--zero-stage", "4"), ("--host-memory", "0"),
        ("--network", "inf"), ("--tokens", "15X"), ("--price", "-1"), ("--micro-batch", "0")
    ]
)  # fmt: skip
def test_values_out_of_range(option: str, value: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, f"{option}={value}"]) == 2
    assert f"argument {option}: {value!r} is not " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (tokens, "32K", 32768), (tokens, "1m", 1024**2), (tokens, "8,192", 8192), (tokens, "0.5K", 512),
        (many_tokens, "15B", 15 * 10**9), (many_tokens, "1.5T", 15 * 10**11), (many_tokens, "100M", 10**8)
    ]
)  # fmt: skip
def test_numbers_with_units(read: Callable[[str], int], text: str, value: int) -> None:
    assert read(text) == value


def test_unknown_families_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mystery", "hidden_size": 4}))
    assert main(["plan", str(path)]) == CANNOT_WORK
    assert "has no model_type='mystery'" in capsys.readouterr().err


def test_a_model_that_was_planned_before_needs_neither_torch_nor_transformers(model: str) -> None:
    PlannedModel.from_config(json.loads((Path(model) / "config.json").read_text()))
    code = (
        "import sys\nfrom ds_trainer.cli.main import main\n"
        f"assert main(['plan', {model!r}, '--global-batch', '64']) == 0\n"
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
