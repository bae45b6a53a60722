"""When the watchdog finds that an engine hangs: by its heartbeat, and by the time between its own checks."""

from __future__ import annotations

import pytest

from millstream.engine.heartbeat import Beat
from millstream.service.watchdog import MIN_SILENCE, SILENCE_SECONDS, Watchdog


def hung_checks(watchdog: Watchdog, beat: Beat, count: int, elapsed: float = 1.0) -> list[int]:
    """The numbers of the checks, all of the same beat, that found a hang."""
    return [number for number in range(count) if watchdog.check("a", beat, elapsed) is not None]


def test_an_idle_owner_that_beats_does_not_hang() -> None:
    watchdog = Watchdog(120.0)
    assert not [second for second in range(1000) if watchdog.check("a", Beat(0.0, 5.0 + second), 1.0)]


def test_an_owner_without_a_heartbeat_between_steps_hangs() -> None:
    for step_timeout in (0.0, 120.0):
        assert hung_checks(Watchdog(step_timeout), Beat(0.0, 5.0), 30)[0] == SILENCE_SECONDS + 1
    watchdog = Watchdog(0.0)
    assert "no heartbeat for 11.0 s" in [watchdog.check("a", Beat(0.0, 5.0), 1.0) or "" for _ in range(12)][-1]


def test_a_short_step_timeout_shortens_the_silence_to_a_minimum() -> None:
    assert hung_checks(Watchdog(6.0), Beat(0.0, 5.0), 30)[0] == 7
    watchdog = Watchdog(0.5)
    first = hung_checks(watchdog, Beat(0.0, 5.0), 1000, watchdog.interval)[0]
    assert first * watchdog.interval == pytest.approx(MIN_SILENCE + watchdog.interval, abs=0.01)


def test_a_step_hangs_after_the_step_timeout() -> None:
    assert hung_checks(Watchdog(120.0), Beat(5.0, 4.0), 121) == []
    watchdog = Watchdog(20.0)
    assert hung_checks(watchdog, Beat(5.0, 4.0), 21) == []
    assert "--step-timeout 20" in (watchdog.check("a", Beat(5.0, 4.0), 1.0) or "")
    assert hung_checks(Watchdog(0.0), Beat(5.0, 4.0), 1000) == [], "0: no limit"


def test_a_load_has_no_heartbeat() -> None:
    assert hung_checks(Watchdog(1.0), Beat(), 1000) == []


@pytest.mark.parametrize("beat", [Beat(0.0, 5.0), Beat(5.0, 4.0)])
def test_time_while_the_watchdog_was_suspended_does_not_count(beat: Beat) -> None:
    """Parent and child are suspended together and resume: the child has time for its next beat."""
    watchdog = Watchdog(10.0)
    assert watchdog.check("a", beat, 1.0) is None
    assert watchdog.check("a", beat, 3600.0) is None
    assert watchdog.check("a", beat, 1.0) is None
    assert watchdog.check("a", beat._replace(last=beat.last + 3605.0), 1.0) is None


def test_engines_are_checked_separately() -> None:
    watchdog = Watchdog(0.0)
    for second in range(11):
        assert watchdog.check("a", Beat(0.0, 5.0), 1.0) is None
        assert watchdog.check("b", Beat(0.0, 5.0 + second), 1.0) is None
    assert watchdog.check("a", Beat(0.0, 5.0), 1.0) is not None
    assert watchdog.check("b", Beat(0.0, 99.0), 1.0) is None


def test_a_process_that_a_signal_has_stopped_hangs_after_seconds_also_within_a_step() -> None:
    step, between = Beat(5.0, 4.0), Beat(0.0, 5.0)
    for step_timeout in (0.0, 120.0):
        for beat in (step, between):
            watchdog = Watchdog(step_timeout)
            assert watchdog.check("a", beat, 1.0) is None
            reasons = [watchdog.check("a", beat, 1.0, stopped=True) for _ in range(12)]
            assert next(second for second, reason in enumerate(reasons) if reason) == SILENCE_SECONDS + 1
            assert "a signal stopped the engine's process 11.0 s ago" in (reasons[-1] or "")


def test_a_process_that_goes_on_in_time_does_not_hang() -> None:
    watchdog = Watchdog(120.0)
    stopped = [second % 10 < 8 for second in range(100)]
    assert not [now for now in stopped if watchdog.check("a", Beat(5.0, 4.0), 1.0, stopped=now)]
