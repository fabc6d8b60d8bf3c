"""What ranks compare: versions, code, arguments, clocks; and how they reach each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ds_trainer.monitor.doctor import examination, network
from ds_trainer.monitor.doctor.examination import Skew, clock_finding, measure_skews
from ds_trainer.monitor.doctor.findings import Level, RankHost
from ds_trainer.monitor.doctor.network import interface_findings, name_findings, reach_finding
from ds_trainer.monitor.doctor.versions import code_digest, differences, version_findings
from ds_trainer.utils import distributed
from ds_trainer.utils.ranks import RankInfo, free_port
from tests.support.pool import pool

REPORTS = [
    (RankHost(0, "a"), {"torch": "2.13", "kernel": "6.1"}),
    (RankHost(1, "a"), {"torch": "2.13", "kernel": "6.1"}),
    (RankHost(2, "b"), {"torch": "2.12", "kernel": "6.1", "peft": "0.2"}),
]


def test_a_difference_names_both_values_and_their_ranks() -> None:
    assert [str(one) for one in differences(REPORTS)] == [
        "torch differs: 2.13 on ranks 0-1 (a), but 2.12 on rank 2 (b)",
        "peft differs: nothing on ranks 0-1 (a), but 0.2 on rank 2 (b)",
    ]


def test_only_required_equality_fails() -> None:
    levels = {finding.name: finding.level for finding in version_findings(REPORTS, ["torch"])}
    assert levels == {"torch": Level.FAIL, "kernel": Level.OK, "peft": Level.WARN}


def test_different_code_has_a_different_digest(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    before = code_digest(tmp_path)
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "y.py").write_text("2")
    (tmp_path / "notes.txt").write_text("3")
    assert code_digest(tmp_path) == before
    (tmp_path / "a" / "x.py").write_text("2")
    assert code_digest(tmp_path) != before


def skewed(seconds: list[float]) -> Skew | None:
    """The clock of each rank is off by so much."""
    original = examination.now
    off = seconds[distributed.rank()]
    examination.now = lambda: original() + off
    try:
        return measure_skews([0, 2, 3])
    finally:
        examination.now = original


def test_the_skew_of_a_clock_is_measured() -> None:
    first, none, ahead, behind = pool(4).run(partial(skewed, [100.0, 7.0, 103.0, 80.0]))
    assert first == Skew(0.0, 0.0)
    assert none is None
    for skew, seconds in ((ahead, 3.0), (behind, -20.0)):
        assert abs(skew.seconds - seconds) <= skew.uncertainty + 1e-3
        assert skew.uncertainty < 0.5


def test_clock_skew_is_judged_beyond_its_uncertainty() -> None:
    def level(seconds: float, uncertainty: float) -> Level:
        return clock_finding([(RankHost(0, "a"), Skew(0, 0)), (RankHost(4, "b"), Skew(seconds, uncertainty))]).level

    assert level(0.2, 0.01) == Level.OK
    assert level(-1.5, 0.01) == Level.WARN
    assert level(1.5, 0.9) == Level.OK
    assert level(-3600, 1.0) == Level.FAIL
    finding = clock_finding([(RankHost(0, "a"), Skew(0, 0)), (RankHost(4, "b"), Skew(-5, 0.01))])
    assert finding.message == "b (rank 4) is 5 s behind a (rank 0), +/- 0.01 s"


def test_a_missing_network_interface_is_reported(tmp_path: Path) -> None:
    for name, state in (("eth0", "up"), ("ib0", "down")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    for value in ("eth", "=eth0", "^docker", "ib0,eth0"):
        assert [one.level for one in interface_findings({"NCCL_SOCKET_IFNAME": value}, tmp_path)] == [Level.OK]
    for value in ("ens5", "=eth"):
        assert interface_findings({"NCCL_SOCKET_IFNAME": value}, tmp_path)[-1].level == Level.FAIL


def test_an_unresolvable_host_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    info = RankInfo(1, 2, 0, "no-such-host.invalid", 1, "environment")
    monkeypatch.setattr(network, "addresses_of", lambda name: [] if "invalid" in name else ["127.0.1.1"])
    levels = [(finding.name, finding.level) for finding in name_findings(info, several_hosts=True)]
    assert levels == [("host name", Level.WARN), ("main process", Level.FAIL)]
    assert name_findings(info, several_hosts=False)[0].level == Level.OK


def test_an_unreachable_main_process_is_reported() -> None:
    finding = reach_finding(RankInfo(1, 2, 0, "127.0.0.1", free_port(), "environment"))
    assert finding.level == Level.FAIL
    assert "cannot be reached" in finding.message
