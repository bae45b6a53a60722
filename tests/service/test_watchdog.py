"""When an engine is taken for dead: by its heartbeat, and by time that the watchdog itself has seen pass."""

from __future__ import annotations

import pytest

from millstream.engine.heartbeat import Beat
from millstream.service.watchdog import LEAST_SILENCE, SILENCE_SECONDS, Watchdog


def looks(dog: Watchdog, beat: Beat, count: int, elapsed: float = 1.0) -> list[int]:
    """The looks at the same beat that found the engine dead."""
    return [number for number in range(count) if dog.look("a", beat, elapsed) is not None]


def test_an_idle_owner_lives_as_long_as_it_beats() -> None:
    dog = Watchdog(120.0)
    assert not [second for second in range(1000) if dog.look("a", Beat(0.0, 5.0 + second), 1.0)]


def test_a_silent_owner_between_steps_is_dead_after_some_seconds() -> None:
    for step_timeout in (0.0, 120.0):
        assert looks(Watchdog(step_timeout), Beat(0.0, 5.0), 30)[0] == SILENCE_SECONDS + 1
    dog = Watchdog(0.0)
    assert "no sign of life for 11.0 s" in [dog.look("a", Beat(0.0, 5.0), 1.0) or "" for _ in range(12)][-1]


def test_a_short_step_timeout_shortens_the_silence_but_beats_have_time_to_come() -> None:
    assert looks(Watchdog(6.0), Beat(0.0, 5.0), 30)[0] == 7
    dog = Watchdog(0.5)
    first = looks(dog, Beat(0.0, 5.0), 1000, dog.every)[0]
    assert first * dog.every == pytest.approx(LEAST_SILENCE + dog.every, abs=0.01)


def test_a_step_may_take_as_long_as_it_may() -> None:
    assert looks(Watchdog(120.0), Beat(5.0, 4.0), 121) == []
    dog = Watchdog(20.0)
    assert looks(dog, Beat(5.0, 4.0), 21) == []
    assert "--step-timeout 20" in (dog.look("a", Beat(5.0, 4.0), 1.0) or "")
    assert looks(Watchdog(0.0), Beat(5.0, 4.0), 1000) == [], "0: for ever"


def test_a_load_has_no_heartbeat() -> None:
    assert looks(Watchdog(1.0), Beat(), 1000) == []


@pytest.mark.parametrize("beat", [Beat(0.0, 5.0), Beat(5.0, 4.0)])
def test_time_in_which_the_watchdog_itself_was_stopped_does_not_count(beat: Beat) -> None:
    """Parent and child are stopped together and go on: the child has time for its next beat."""
    dog = Watchdog(10.0)
    assert dog.look("a", beat, 1.0) is None
    assert dog.look("a", beat, 3600.0) is None
    assert dog.look("a", beat, 1.0) is None
    assert dog.look("a", beat._replace(last=beat.last + 3605.0), 1.0) is None


def test_engines_are_counted_apart() -> None:
    dog = Watchdog(0.0)
    for second in range(11):
        assert dog.look("a", Beat(0.0, 5.0), 1.0) is None
        assert dog.look("b", Beat(0.0, 5.0 + second), 1.0) is None
    assert dog.look("a", Beat(0.0, 5.0), 1.0) is not None
    assert dog.look("b", Beat(0.0, 99.0), 1.0) is None
