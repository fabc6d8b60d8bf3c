"""How long is too long: a floor, the median step, and patience for what is known to take long."""

from __future__ import annotations

from ds_trainer.monitor.health.heartbeat import BETWEEN, START, Heartbeat, Limit


class Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def after_steps(*seconds: float) -> tuple[Heartbeat, Clock]:
    """A first step of 50 seconds, then these."""
    clock = Clock()
    heartbeat = Heartbeat(7, clock)
    for number, duration in enumerate((50.0, *seconds), start=8):
        clock.now += duration
        heartbeat.step_done(number)
    return heartbeat, clock


def test_a_hang_is_many_median_steps() -> None:
    heartbeat, clock = after_steps(1.0, 2.0, 9.0)
    assert heartbeat.median() == 2.0  # the first step is no measure
    assert Limit(30.0, 20.0, 0.0).of(heartbeat) == 40.0
    assert Limit(30.0, 10.0, 0.0).of(heartbeat) == 30.0
    clock.now += 41.0
    assert heartbeat.seconds_since_progress() == 41.0
    assert (heartbeat.step, heartbeat.phase) == (11, BETWEEN)


def test_the_first_step_has_a_longer_limit() -> None:
    heartbeat, _ = Heartbeat(7, Clock()), None
    assert (heartbeat.step, heartbeat.phase, heartbeat.median()) == (7, START, None)
    assert Limit(30.0, 20.0, 1800.0).of(heartbeat) == 1800.0
    heartbeat.step_done(8)
    assert Limit(30.0, 20.0, 1800.0).of(heartbeat) == 30.0


def test_phases_outside_of_steps_have_a_longer_limit_and_do_not_count() -> None:
    heartbeat, clock = after_steps(2.0)
    limit = Limit(30.0, 10.0, 1800.0)
    with heartbeat.paused("evaluation"):
        clock.now += 500.0
        assert (heartbeat.phase, limit.of(heartbeat), heartbeat.seconds_since_progress()) == (
            "evaluation",
            1800.0,
            500.0,
        )
        heartbeat.beat()
        assert heartbeat.seconds_since_progress() == 0.0
        with heartbeat.paused("saving"):
            clock.now += 100.0
        assert (heartbeat.phase, limit.of(heartbeat)) == ("evaluation", 1800.0)
    assert (heartbeat.phase, limit.of(heartbeat), heartbeat.seconds_since_progress()) == (BETWEEN, 30.0, 0.0)
    clock.now += 2.0
    assert heartbeat.step_done(10) == 2.0


def test_a_suspended_process_is_not_a_hang() -> None:
    heartbeat, clock = after_steps(1.0)
    clock.now += 1e6
    heartbeat.restart_clock()
    assert heartbeat.seconds_since_progress() == 0.0
