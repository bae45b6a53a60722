"""Threads that owners run on. MLX leaves an OS thread behind for each thread that computes on the CPU, for good: so a
thread whose engine ended is kept for the next engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

Work = Callable[[], bool]
"""The whole life of an engine. True if the thread may be used for another one."""

CLOSE_SECONDS = 2.0


class Run:
    """One engine's time on a thread. Whoever gives it up sets `disowned`: then the thread is not used again."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.work: Work | None = work
        self.disowned = False
        self.native_id: int | None = None
        """None before it begins and when it is over."""
        self._over = threading.Event()
        self._ending: threading.Thread | None = None

    def join(self, timeout: float) -> bool:
        """Wait until it is over, and its thread parked or gone."""
        deadline = time.monotonic() + timeout
        if not self._over.wait(timeout):
            return False
        if self._ending is not None:
            self._ending.join(max(0.0, deadline - time.monotonic()))
        return self._ending is None or not self._ending.is_alive()

    def execute(self) -> bool:
        """On the thread. Whether that may be used again."""
        work, self.work = self.work, None  # nothing of an engine outlives its run
        assert work is not None, "a run is executed once"
        self.native_id = threading.get_native_id()
        try:
            return work() and not self.disowned
        except BaseException:  # the end of a thread: nobody else would tell
            log.exception("%s: the owner thread failed", self.name)
            return False

    def finish(self, ending: threading.Thread | None) -> None:
        """`ending`: its thread, unless that is parked."""
        self.native_id = None
        self._ending = ending
        self._over.set()


class OwnerThreads:
    """`keep`: whether threads are parked when their engine ended. Each parks at most once, so there are never more than
    engines that ran at the same time."""

    def __init__(self, *, keep: bool = True) -> None:
        self._lock = threading.Lock()
        self._parked: list[_OwnerThread] = []
        self._keep = keep

    def start(self, name: str, work: Work) -> Run:
        """Run on a parked thread if there is one, else on a new one."""
        run = Run(name, work)
        with self._lock:
            thread = self._parked.pop() if self._parked else None
        if thread is None:
            thread = _OwnerThread(self._park)
            thread.start()
        thread.runs.put(run)
        return run

    def close(self) -> None:
        """End the parked threads, and park no more."""
        with self._lock:
            self._keep = False
            parked, self._parked = self._parked, []
        for thread in parked:
            thread.runs.put(None)
        for thread in parked:
            thread.join(CLOSE_SECONDS)

    def _park(self, thread: _OwnerThread) -> bool:
        with self._lock:
            if self._keep:
                self._parked.append(thread)
            return self._keep


class _OwnerThread(threading.Thread):
    """A daemon: an owner that hangs inside a native call must not keep the process from exiting."""

    def __init__(self, park: Callable[[_OwnerThread], bool]) -> None:
        super().__init__(name="engine-parked", daemon=True)
        self.runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._park = park

    def run(self) -> None:
        while (run := self.runs.get()) is not None:
            self.name = f"engine-{run.name}"
            reusable = run.execute()
            self.name = "engine-parked"
            # Parked before the run is over: whoever has waited for its end finds the thread.
            parked = reusable and self._park(self)
            run.finish(None if parked else self)
            del run
            if not parked:
                return
