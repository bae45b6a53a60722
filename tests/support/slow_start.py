"""`millstream serve` that does not start or stop as it should: `python -m support.slow_start KIND PATIENCE ARGUMENTS`.

The model never becomes ready: `endless` reads weights for ever, `stuck` hangs in one. PATIENCE: seconds that the server
gives a cancelled load. The stop never ends: `deaf` hangs in it, `locked` does so and holds Python's lock. PATIENCE:
seconds until the last resort.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import time

from millstream import server
from millstream.cli import main
from millstream.compose import Mill
from millstream.engine.protocols import Progress, ignore_progress
from millstream.loading.settings import EngineSettings
from millstream.model_facts import GenerationFacts
from millstream.models.source import ModelSource
from millstream.service import engine_client, managed_model
from support.fake import FakeBackend

BEGUN, ENDED = "the load has begun", "the load has ended"


class EndlessLoad(FakeBackend):
    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        say(BEGUN)
        try:
            for number in itertools.count():
                report(number % 100 / 100)
                time.sleep(0.01)
        finally:
            say(ENDED)
        raise AssertionError("it never ends")


class StuckLoad(FakeBackend):
    def load(self, report: Progress = ignore_progress) -> GenerationFacts:
        say(BEGUN)
        time.sleep(100_000)
        raise AssertionError("it never ends")


async def hang(kind: str, *_: object) -> bool:
    (time.sleep if kind == "deaf" else ctypes.PyDLL(None).sleep)(100_000)
    return True


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def backend(kind: str, source: ModelSource, settings: EngineSettings) -> FakeBackend:
    return EndlessLoad() if kind == "endless" else StuckLoad()


if __name__ == "__main__":
    from support import slow_start  # as a child process imports it, not as __main__

    kind, patience, *arguments = sys.argv[1:]
    if kind in ("endless", "stuck"):
        managed_model.CANCELLED_LOAD_SECONDS = engine_client.ABORT_SECONDS = float(patience)
        server.serve_on = functools.partial(server.serve_on, make_backend=functools.partial(slow_start.backend, kind))
    else:
        server.LAST_RESORT_SECONDS = float(patience)
        Mill.close = functools.partial(slow_start.hang, kind)  # type: ignore[method-assign]
    sys.exit(main(["serve", "--port", "0", *arguments]))
