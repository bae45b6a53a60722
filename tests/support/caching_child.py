"""Engines over one folder of the disk tier; each serves the same prompts until it is killed."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.backend.environment import load_blas

load_blas()

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend  # noqa: E402
from millstream.engine.generation.messages import Generate  # noqa: E402
from millstream.engine.generation.tuning import DiskTierConfig, SchedulerSettings, make_scheduler  # noqa: E402
from millstream.engine.link import ThreadLink  # noqa: E402
from support.engines import Driver  # noqa: E402
from support.forked import fork_for_each, say  # noqa: E402

PROMPTS = 12
MEMORY, DISK = 1 << 20, 1 << 22


def prompts_for(seed: int, first: int = 0) -> list[Generate]:
    """Prompts of several blocks, some with a shared prefix."""
    draw = random.Random(seed)
    common = [draw.randrange(1, 90) for _ in range(70)]
    prompts = [common[: draw.randrange(70)] + [draw.randrange(1, 90) for _ in range(60)] for _ in range(PROMPTS)]
    return [Generate(first + number, tuple(prompt), 4) for number, prompt in enumerate(prompts)]


@contextmanager
def caching_engine(folder: Path, disk: Path, memory_bytes: int, disk_bytes: int) -> Iterator[Driver]:
    """An engine with a server's tuning and a disk tier."""
    make = functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=4))
    tune = functools.partial(
        make_scheduler, SchedulerSettings(prefix_cache_bytes=memory_bytes, disk=DiskTierConfig(disk, disk_bytes))
    )
    driver = Driver(ThreadLink("cached", make, tune))
    driver.start()
    try:
        yield driver
    finally:
        driver.stop()


def answer_on(folder: Path, disk: Path, seed: int) -> None:
    with caching_engine(folder, disk, MEMORY, DISK) as driver:
        say("serves")
        for first in itertools.count(0, 100):
            say("answers", json.dumps(driver.run(*prompts_for(seed, first=first))))


if __name__ == "__main__":
    fork_for_each(lambda line: answer_on(Path(sys.argv[1]), Path(sys.argv[2]), int(line)))
