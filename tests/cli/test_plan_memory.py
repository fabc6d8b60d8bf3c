"""``ds-trainer plan``: host memory of usual machines, cautious plans, solutions that memory bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.cli.main import main
from ds_trainer.utils.exit_codes import DONE
from ds_trainer.utils.host_memory import total_host_memory
from tests.cli.test_plan import model
from tests.planner.test_anchors import LLAMA_8B

__all__ = ["model"]

USUAL = {"H100-80GB": 2000, "A100-40GB": 2000, "T4": 2000, "RTX 4090": 128, "RTX 3090": 64}


@pytest.mark.parametrize("device", USUAL)
def test_host_memory_is_that_of_usual_machines(
    device: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", model, "--device", device, "--offload", "all", "--json"]
    main([*argv, "--devices-per-node", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["host_memory_gb"] == USUAL[device]
    assert f"Host memory of a machine: {USUAL[device]:,} GB are assumed (--host-memory)." in found["notes"]
    for plan in found["plans"]:
        memory = plan["memory"]
        assert memory["host_of_a_machine"] == pytest.approx(2 * memory["host"])
        assert memory["host_of_a_machine"] <= USUAL[device] * 1e9
        assert sum(memory["host_items"].values()) == pytest.approx(memory["host"])
    main([*argv, "--host-memory", "3000"])
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["host_memory_gb"] == 3000 and "assumed" not in " ".join(found["notes"])


def test_devices_of_a_file_have_their_host_memory(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = "tflops: {bf16: 300}, memory: 64, bandwidth: 2000, link: 200, host: 32, network: 25"
    (tmp_path / "d.yaml").write_text(f"One: {{{numbers}, host_memory: 512}}\nTwo: {{{numbers}}}\ncpu: {{{numbers}}}\n")
    found = {}
    for device in ("One", "Two", "cpu"):
        main(["plan", model, "--device", device, "--device-file", str(tmp_path / "d.yaml"), "--json"])
        found[device] = json.loads(capsys.readouterr().out)["cluster"]["host_memory_gb"]
    assert (found["One"], found["Two"]) == (512, 2000)
    assert found["cpu"] == pytest.approx(total_host_memory() / 1e9)


def test_host_memory_has_its_parts_and_the_total_of_a_machine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--zero-stage", "3", "--offload", "optimizer", "--top", "1"]) == DONE
    printed = capsys.readouterr().out
    assert "host/rank" in printed and "of 2,000 GB" in printed
    part = printed.split("Host memory of a rank, ")[1]
    whole, sizes = float(part.split()[0].replace(",", "")), []
    for line in part.splitlines()[1:]:
        if not line.startswith("  "):
            break
        sizes.append(float(line.split(" GB")[0].split()[-1]))
    assert len(sizes) >= 5 and sum(sizes) == pytest.approx(whole, abs=0.1)


def test_the_cautious_plan_fits_with_as_much_fragmentation_as_was_measured(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", model, "--seq-len", "8K", "--global-batch", "64"]
    assert main([*argv, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    fastest, cautious = found["plans"][0], found["cautious"]

    def at_worst(plan: dict[str, Any]) -> float:
        overhead = {**plan["memory"]["overhead"], "fragmentation": 0.0}
        tensors = max(sum(items.values()) for items in plan["memory"]["moments"].values())
        return float(1.25 * tensors + sum(overhead.values()))

    room = 1e9 * found["cluster"]["device_memory_gb"]
    assert at_worst(fastest) > room >= at_worst(cautious)
    assert cautious["tokens_per_second"] <= fastest["tokens_per_second"]
    assert main(argv) == DONE
    printed = capsys.readouterr().out
    assert "Cautious, the fastest that fits with 25 % of fragmentation" in printed
    assert f"Start the cautious plan with\n  {cautious['command']}" in printed
    assert main([*argv, "--device", "B200"]) == DONE
    assert "The first plan is also the fastest that fits with 25 %" in capsys.readouterr().out


MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def test_mixtures_of_experts_have_a_caveat(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", model])
    assert "No mixture of experts has been measured" not in capsys.readouterr().out
    (Path(model) / "config.json").write_text(json.dumps(MIXTRAL))
    main(["plan", model, "--nodes", "2"])
    assert "No mixture of experts has been measured" in capsys.readouterr().out


@pytest.mark.parametrize("quantity", ["params", "seq-len"])
def test_solutions_are_bounded_by_the_memory_of_a_machine(
    quantity: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = []
    for size in ([], ["--host-memory", "500"], ["--host-memory", "500", "--nvme", "4000"]):
        assert main(["plan", model, "--solve", quantity, "--json", *size]) == DONE
        found = json.loads(capsys.readouterr().out)
        room, best = 1e9 * found["cluster"]["host_memory_gb"], found["plans"][0]["memory"]
        assert best["host_of_a_machine"] <= room and best["nvme_of_a_machine"] <= 4e12
        values.append(found["value"])
    assert values[1] < values[0] < (5e11 if quantity == "params" else 6e7) and values[1] <= values[2]
