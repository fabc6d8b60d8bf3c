"""The rate of a disk, measured over the weights of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ds_trainer.cli.main import main
from ds_trainer.monitor.doctor.findings import Level
from ds_trainer.monitor.doctor.loading import Rate, _times, loading_findings, measure_rate
from ds_trainer.utils.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    files = {"a.safetensors": 5, "b.safetensors": 3}
    where = {}
    for name, count in files.items():
        state = {f"{name[0]}{number}": torch.randn(250, 1000) for number in range(count)}
        save_file(state, tmp_path / name)
        where.update(dict.fromkeys(state, name))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return tmp_path


def test_all_bytes_or_a_sample_of_every_file_are_read(directory: Path) -> None:
    rate = measure_rate(directory)
    assert rate.read_bytes == rate.file_bytes == 8_000_000
    assert (rate.tensors, rate.files) == (8, 2)
    assert rate.bytes_per_second == rate.read_bytes / rate.seconds > 0
    assert measure_rate(directory, 1_000_000).read_bytes == 1_000_000
    assert measure_rate(directory, seconds=0).read_bytes == 1_000_000  # it stops after the first read


def test_estimated_load_times_depend_on_ranks_and_disks() -> None:
    """160 GB at 2 GB/s: 80 seconds, by however many ranks that share a disk; an eighth where 8 nodes have one each."""
    found = _times(Rate(10 * 10**9, 5.0, 160 * 10**9, 1, 1, False), (1, 8, 64))
    assert [finding.name for finding in found] == ["load on 1 rank", "load on 8 ranks", "load on 64 ranks"]
    assert found[0].message.startswith("1 min 20 s (the ranks read every byte once")
    assert found[1].message.startswith("1 min 20 s")
    assert found[2].message == "10.0 s if each of 8 nodes reads at this speed, 1 min 20 s if they share it"


def test_a_system_that_cannot_drop_its_cache_is_handled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading_findings(directory)[0].level == Level.OK
    monkeypatch.delattr("os.posix_fadvise")
    found = loading_findings(directory)[0]
    assert found.level == Level.WARN
    assert "may have been in memory" in found.remedy


def test_doctor_load_command(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--load", str(directory), "--load-bytes", "2MB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in answer["findings"]]
    assert names == ["read speed", "load on 1 rank", "load on 8 ranks", "load on 64 ranks"]
    assert "B/s (2 MB of" in answer["findings"][0]["message"]
    assert main(["doctor", "--load", str(directory)]) == 0
    assert "8 tensors in 2 files, 8" in capsys.readouterr().out
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--load", str(directory)]) == 0
    assert capsys.readouterr().out == ""  # the first rank prints


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load-bytes", "1GB"], "needs --load DIR"),
        (["--load", "DIR", "--load-bytes", "much"], "'much' is not a size"),
        (["--load", "DIR", "--bf16", "true"], "takes no recipe and no training arguments"),
        (["--load", "absent"], "The directory does not exist"),
    ],
)
def test_wrong_arguments_are_rejected(
    argv: list[str], message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *(str(directory) if argument == "DIR" else argument for argument in argv)]) == 2
    assert message in capsys.readouterr().err


def test_empty_weights_are_handled(tmp_path: Path) -> None:
    save_file({"a": torch.empty(0)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="its tensors are empty"):
        measure_rate(tmp_path)
