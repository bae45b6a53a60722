"""Owner threads, reused from one engine to the next.

MLX permanently leaks an OS thread for each thread that computes on the CPU, so threads are parked instead of ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

Work = Callable[[], bool]
"""The whole life of an engine. Returns True if the thread may run another one."""

CLOSE_SECONDS = 2.0


class Run:
    """The run of one engine on a thread. If `disowned` is set, because the engine hangs, the thread is not reused."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.work: Work | None = work
        self.disowned = False
        self.native_id: int | None = None
        """None unless it is running."""
        self._ended = threading.Event()
        self._ending_thread: threading.Thread | None = None

    def join(self, timeout: float) -> bool:
        """Wait until the run has ended and its thread is parked or gone; False if that takes longer than `timeout`."""
        deadline = time.monotonic() + timeout
        if not self._ended.wait(timeout):
            return False
        if self._ending_thread is not None:
            self._ending_thread.join(max(0.0, deadline - time.monotonic()))
        return self._ending_thread is None or not self._ending_thread.is_alive()

    def execute(self) -> bool:
        """On the owner thread. Returns True if the thread may be reused."""
        work, self.work = self.work, None  # drop the engine's objects with its run
        assert work is not None, "a run is executed once"
        self.native_id = threading.get_native_id()
        try:
            return work() and not self.disowned
        except BaseException:  # the thread ends here, so the error would be lost
            log.exception("%s: the owner thread failed", self.name)
            return False

    def finish(self, ending: threading.Thread | None) -> None:
        """`ending`: its thread if that ends, None if it is parked."""
        self.native_id = None
        self._ending_thread = ending
        self._ended.set()


class OwnerThreads:
    """Starts engines on parked threads, or on new ones. There are never more threads than engines that ran at the same
    time."""

    def __init__(self, *, reuse: bool = True) -> None:
        """`reuse`: park a thread when its engine has ended, instead of ending it."""
        self._lock = threading.Lock()
        self._parked: list[_OwnerThread] = []
        self._reuse = reuse

    def start(self, name: str, work: Work) -> Run:
        """Run `work` on a parked thread if there is one, else on a new one."""
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
            self._reuse = False
            parked, self._parked = self._parked, []
        for thread in parked:
            thread.runs.put(None)
        for thread in parked:
            thread.join(CLOSE_SECONDS)

    def _park(self, thread: _OwnerThread) -> bool:
        with self._lock:
            if self._reuse:
                self._parked.append(thread)
            return self._reuse


class _OwnerThread(threading.Thread):
    """A daemon thread: an owner that hangs in a native call must not keep the process from exiting."""

    def __init__(self, park: Callable[[_OwnerThread], bool]) -> None:
        super().__init__(name="engine-parked", daemon=True)
        self.runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._park = park

    def run(self) -> None:
        while (run := self.runs.get()) is not None:
            self.name = f"engine-{run.name}"
            reusable = run.execute()
            self.name = "engine-parked"
            # Park before the run ends, so that a caller that has joined it finds the thread.
            parked = reusable and self._park(self)
            run.finish(None if parked else self)
            del run
            if not parked:
                return
