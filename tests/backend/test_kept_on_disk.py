"""What is kept, under kills and floods: real MLX engines over one folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.backend.text_model import MlxTextBackend, TextModelSettings
from millstream.engine.link import ThreadLink
from millstream.engine.messages import Submit
from millstream.engine.tuning import DiskTier, make_scheduler
from support.engines import Driver, engine

KILLS = 50
PROMPTS = 12

WRITER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_kept_on_disk import asked, keeping
folder, disk, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with keeping(folder, disk, 1 << 20, 1 << 22) as driver:
    print("serves", flush=True)
    number = 0
    while True:
        answers = driver.run(*asked(seed, first=number))
        print(json.dumps(answers), flush=True)
        number += 100
"""


def asked(seed: int, first: int = 0) -> list[Submit]:
    """Prompts of which some begin alike, of the length of some blocks each."""
    draw = random.Random(seed)
    common = [draw.randrange(1, 90) for _ in range(70)]
    prompts = [common[: draw.randrange(70)] + [draw.randrange(1, 90) for _ in range(60)] for _ in range(PROMPTS)]
    return [Submit(first + number, tuple(prompt), 4) for number, prompt in enumerate(prompts)]


@contextmanager
def keeping(folder: Path, disk: Path, memory_bytes: int, disk_bytes: int) -> Iterator[Driver]:
    """An engine with the tuning of a server, over a folder."""
    make = functools.partial(MlxTextBackend, TextModelSettings("folder", folder, max_rows=4))
    tune = functools.partial(make_scheduler, None, None, memory_bytes, DiskTier(disk, disk_bytes))
    driver = Driver(ThreadLink("kept", make, tune))
    driver.start()
    try:
        yield driver
    finally:
        driver.stop()


def test_engines_that_are_killed_while_they_write(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Each finds what those before it wrote: no wrong token, and nothing half written is left."""
    folder, disk = tiny_model("lfm2"), tmp_path / "disk"
    with engine(functools.partial(MlxTextBackend, TextModelSettings("folder", folder, max_rows=4))) as plain:
        expected = {seed: plain.run(*asked(seed, first=1000 * seed)) for seed in range(3)}
    draw = random.Random(5)
    for kill in range(KILLS):
        arguments = [str(folder), str(disk), str(kill % 3), str(Path(__file__).parent)]
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, env=_environment(), text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "serves\n"
        time.sleep(draw.uniform(0, 0.6))
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().splitlines()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        for line in lines:
            if line.endswith("]]"):
                assert [tuple(answer) for answer in json.loads(line)] == [tuple(each) for each in expected[kill % 3]]
    assert any(disk.glob("*.safetensors")), "the kills came before anything was written"
    with keeping(folder, disk, 1 << 20, 1 << 22) as driver:
        for seed in range(3):
            assert driver.run(*asked(seed, first=1000 * (seed + 1))) == expected[seed]
    assert not [entry for entry in os.scandir(disk) if "tmp" in entry.name]


def test_a_flood_of_prompts_stays_within_memory_and_disk(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Budgets for some of them only; what the engine measures and what the folder takes are looked at all the time."""
    memory, disk = 300_000, 400_000
    draw = random.Random(1)
    most_kept = most_disk = 0
    with keeping(tiny_model("llama"), tmp_path, memory, disk) as driver:
        for turn in range(25):
            prompts = [tuple(draw.randrange(1, 90) for _ in range(draw.randrange(20, 120))) for _ in range(8)]
            driver.run(*(Submit(100 * turn + number, prompt, 3) for number, prompt in enumerate(prompts)))
            assert driver.facts is not None
            most = driver.facts.weight_bytes + memory
            driver.wait(lambda most=most: driver.measured.memory_bytes <= most)  # type: ignore[misc]
            most_kept = max(most_kept, driver.measured.kept_bytes)
            most_disk = max(most_disk, _bytes_in(tmp_path), driver.measured.disk_bytes)
    assert memory // 2 < most_kept <= memory
    assert disk // 2 < most_disk <= disk


def _bytes_in(folder: Path) -> int:
    """While the store goes on: files come, get their names and leave."""
    used = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            used += path.stat().st_size
    return used


def _environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
