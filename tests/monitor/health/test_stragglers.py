"""The arithmetic of slow ranks, and how windows come together."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_trainer.monitor.health import stragglers
from ds_trainer.monitor.health.status_board import StatusBoard
from ds_trainer.monitor.health.stragglers import DATA, WORK, StepTimes, StragglerReport, Window, slowest, warning
from ds_trainer.monitor.metrics_file import read_records


def test_the_rank_that_waits_least_is_the_slowest() -> None:
    windows = [Window(1.0, 0.1, 0.5), Window(1.0, 0.1, 0.1, "node7"), Window(1.0, 0.1, 0.5), Window(1.0, 0.1, 0.52)]
    slow = slowest(windows)
    assert slow is not None and slow.notable
    assert (slow.rank, slow.cause, slow.usual) == (1, WORK, 0.5)
    assert slow.excess == pytest.approx(0.4)
    message = warning(50, slow, windows)
    assert "slowest rank 1 (node7): busy 0.900 s per step, 1.80 times the others' 0.500 s" in message


def test_slow_data_is_distinguished_from_slow_compute() -> None:
    slow = slowest([Window(1.0, 0.0, 0.5), Window(1.0, 0.4, 0.1)])
    assert slow is not None and (slow.rank, slow.cause, slow.notable) == (1, DATA, True)


def test_equal_ranks_have_no_straggler() -> None:
    slow = slowest([Window(1.0, 0.1, 0.20), Window(1.0, 0.1, 0.25), Window(1.0, 0.3, 0.2)])
    assert slow is not None and not slow.notable  # all wait alike: if all have slow data, none is a straggler
    assert slowest([Window(1.0, 0.5, 0.0)]) is None


def test_windows_end_at_multiples() -> None:
    times = StepTimes(4, "here")
    for step in range(3, 9):  # a resumed run: the first window is shorter
        times.add(step, 2.0 if step < 5 else 4.0, 0.5, 1.0)
    assert list(times.finished) == [(0, 4, Window(2.0, 0.5, 1.0, "here")), (1, 8, Window(4.0, 0.5, 1.0, "here"))]
    assert times.finished[0][2].work == 0.5


class BoardOf(StatusBoard):
    """One rank's view of notes that several share, in one process."""

    def __init__(self, rank: int, notes: dict[str, str]) -> None:
        super().__init__()
        self.rank, self.world_size, self._values = rank, 2, notes


def test_old_windows_are_ignored_after_a_rollback(tmp_path: Path) -> None:
    notes: dict[str, str] = {}
    times = [StepTimes(2, f"node{rank}") for rank in (0, 1)]
    reports = [StragglerReport(each, tmp_path / f"{rank}.jsonl") for rank, each in enumerate(times)]
    boards = [BoardOf(rank, notes) for rank in (0, 1)]
    for attempt in (1.0, 2.0):
        for step in (1, 2):
            for each in times:
                each.add(step, attempt, 0.0, 0.0)
        for rank in (0, 1, 0):  # the main process looks before the other one has said anything, and after
            reports[rank].exchange(boards[rank])
    for report, board in zip(reports, boards, strict=True):
        report.finish(board)
    assert [record["step_seconds"] for record in read_records(tmp_path / "0.jsonl")] == [[1.0, 1.0], [2.0, 2.0]]
    assert not (tmp_path / "1.jsonl").exists()


def test_warnings_about_a_slow_rank_are_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: dict[str, str] = {}
    times = [StepTimes(1, f"node{rank}") for rank in (0, 1)]
    reports = [StragglerReport(each, tmp_path / "stragglers.jsonl") for each in times]
    boards = [BoardOf(rank, notes) for rank in (0, 1)]

    def windows(first: int) -> None:
        for step in (first, first + 1, first + 2):
            for rank, waits in ((1, 0.0), (0, 0.5)):
                times[rank].add(step, 1.0, 0.0, waits)
                reports[rank].exchange(boards[rank])

    windows(1)
    assert [record.getMessage()[:30] for record in caplog.records] == ["Step 1: slowest rank 1 (node1)"]
    monkeypatch.setattr(stragglers, "SECONDS_BETWEEN_WARNINGS", 0.0)
    reports[0]._quiet_until = 0.0
    windows(4)
    assert len(caplog.records) == 4
    reports[0].finish(boards[0])
    assert [record["notable"] for record in read_records(tmp_path / "stragglers.jsonl")] == [True] * 6


def test_a_failing_disk_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    times, board = StepTimes(1, "here"), StatusBoard()
    report = StragglerReport(times, tmp_path / "file" / "stragglers.jsonl")
    good = StragglerReport(other := StepTimes(1, "here"), tmp_path / "stragglers.jsonl")
    for step in (1, 2):
        for each in (times, other):
            each.add(step, 1.0, 0.5, 0.0)
        report.exchange(board)
        good.exchange(board)
    good.finish(board)
    records = read_records(tmp_path / "stragglers.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["work_seconds"] == [0.5]


def test_record_size_does_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    sizes = {}
    for world in (2, 16, 1024, 4096):
        windows = [Window(1.0, 0.1 + rank / world / 10, 0.5, f"node{rank // 8:04d}") for rank in range(world)]
        windows[world // 2] = Window(1.0, 0.1, 0.0, "slow")
        report = StragglerReport(StepTimes(1, ""), tmp_path / f"{world}.jsonl")
        report._report(7, windows)
        report._writer.close()
        (record,) = read_records(tmp_path / f"{world}.jsonl")
        sizes[world] = (tmp_path / f"{world}.jsonl").stat().st_size
        assert record["slowest_rank"] == world // 2 in record["ranks"] and "slow" in record["hosts"]
        assert len(record["ranks"]) == len(record["work_seconds"]) == min(world, 16)
        assert record["communication_quantiles"] == ([0.0, 0.0, 0.5, 0.5] if world == 2 else [0.0, 0.5, 0.5, 0.5])
    assert sizes[4096] < 1.2 * sizes[16] < 3000
