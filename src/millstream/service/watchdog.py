"""Judges heartbeats: an engine that is busy or idle lives, one that does neither is dead."""

from __future__ import annotations

from millstream.engine.heartbeat import BEAT_EVERY, Beat

SILENCE_SECONDS = 10.0
"""Between two steps an owner beats once a second. After this long without a beat it is dead."""
LEAST_SILENCE = 4 * BEAT_EVERY

Seen = tuple[Beat, float]
"""A beat, and for how many seconds there has been no other."""


class Watchdog:
    """Counts only the time between its own looks, and no more than two usual ones for each: if this process, or all of
    the machine, was stopped, a beat that looks old is given the time to be followed by the next."""

    def __init__(self, step_timeout: float) -> None:
        """`step_timeout`: seconds that a step may take; 0: any time."""
        self._step_timeout = step_timeout
        limits = [SILENCE_SECONDS, *([max(step_timeout, LEAST_SILENCE)] if step_timeout else [])]
        self._silence = min(limits)
        self.every = min([1.0, *([step_timeout / 4] if step_timeout else [])])
        """Seconds between two looks."""
        self._seen: dict[str, Seen] = {}

    def look(self, name: str, beat: Beat, elapsed: float) -> str | None:
        """`elapsed`: seconds since the last look at all engines. Why this one has to be given up, if it has."""
        before, seconds = self._seen.get(name, (Beat(), 0.0))
        seconds = seconds + min(elapsed, 2 * self.every) if beat == before else 0.0
        self._seen[name] = (beat, seconds)
        if beat.step:
            if self._step_timeout and seconds > self._step_timeout:
                return (
                    f"a step did not return within {seconds:.1f} s (--step-timeout {self._step_timeout:g}): "
                    "the engine hangs"
                )
        elif beat.last and seconds > self._silence:
            return f"the engine gave no sign of life for {seconds:.1f} s between two steps: it hangs or was stopped"
        return None
