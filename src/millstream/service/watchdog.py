"""The watchdog: decides from heartbeats whether an engine hangs."""

from __future__ import annotations

from millstream.engine.heartbeat import BEAT_EVERY, Beat

SILENCE_SECONDS = 10.0
"""Between steps an owner beats once per second. After this long without a beat it hangs."""
MIN_SILENCE = 4 * BEAT_EVERY

Age = tuple[Beat, float]
"""The last beat of an engine, and for how many seconds it has been the last."""


class Watchdog:
    """Counts the time between its own checks, and at most two intervals for each: if this process or the whole machine
    was suspended, engines get time for their next beat."""

    def __init__(self, step_timeout: float) -> None:
        """`step_timeout`: seconds that a step may take; 0: no limit."""
        self._step_timeout = step_timeout
        limits = [SILENCE_SECONDS, *([max(step_timeout, MIN_SILENCE)] if step_timeout else [])]
        self._silence = min(limits)
        self.interval = min([1.0, *([step_timeout / 4] if step_timeout else [])])
        """Seconds between two checks."""
        self._ages: dict[str, Age] = {}

    def check(self, name: str, beat: Beat, elapsed: float) -> str | None:
        """Returns why the engine counts as hung, or None. `elapsed`: seconds since the last check of all engines."""
        before, seconds = self._ages.get(name, (Beat(), 0.0))
        seconds = seconds + min(elapsed, 2 * self.interval) if beat == before else 0.0
        self._ages[name] = (beat, seconds)
        if beat.step:
            if self._step_timeout and seconds > self._step_timeout:
                return (
                    f"the engine hangs: a step did not return within {seconds:.1f} s "
                    f"(--step-timeout {self._step_timeout:g})"
                )
        elif beat.last and seconds > self._silence:
            return f"the engine hangs or was stopped: no heartbeat for {seconds:.1f} s between two steps"
        return None
