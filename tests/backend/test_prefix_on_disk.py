"""The prefix cache on disk under kills and floods: real MLX engines over one folder."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.weights.identity import identity_of, sources_hash
from millstream.engine.generation.messages import Generate
from support.caching_child import DISK, MEMORY, caching_engine, prompts_for
from support.engines import engine
from support.forked import Forked

KILLS, FEW = 50, 6
"""With `--whole`, and without."""


def test_engines_killed_while_they_write(tiny_model: Callable[[str], Path], tmp_path: Path, whole: bool) -> None:
    """Each engine reuses what earlier ones wrote: no wrong token, and no partial file is left."""
    folder, disk = tiny_model("lfm2"), tmp_path / "disk"
    with engine(functools.partial(MlxGenerationBackend, GenerationSettings("folder", folder, max_rows=4))) as plain:
        expected = {seed: plain.run(*prompts_for(seed, first=1000 * seed)) for seed in range(3)}
    draw = random.Random(5)
    with Forked("support.caching_child", str(folder), str(disk)) as engines:
        for kill in range(KILLS if whole else FEW):
            engines.begin(str(kill % 3))
            engines.hear("serves")
            time.sleep(draw.uniform(0, 0.6))
            for outputs in engines.kill():
                assert json.loads(outputs) == [list(output) for output in expected[kill % 3]]
    assert any(disk.glob("*.safetensors")), "all kills came before the first write"
    with caching_engine(folder, disk, MEMORY, DISK) as driver:
        for seed in range(3):
            assert driver.run(*prompts_for(seed, first=1000 * (seed + 1))) == expected[seed]
    assert not [entry for entry in os.scandir(disk) if "tmp" in entry.name]


@pytest.mark.parametrize("program", ["millstream", "mlx", "mlx-lm", "mlx-vlm"])
def test_what_another_version_has_written_is_not_read(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """A kernel that was mended would stay without effect for every prompt on disk."""
    folder, version = tiny_model("llama"), importlib.metadata.version
    before = identity_of(folder, "float32")
    assert identity_of(folder, "float32") == before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == program else version(name))
    assert identity_of(folder, "float32") != before


def test_a_change_of_the_sources_without_a_version_counts_too(tmp_path: Path) -> None:
    for name in ("backend/kernels/a.py", "media/b.py", "api/c.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1")
    hashes = [sources_hash(tmp_path)]
    for name in ("api/c.py", "media/b.py", "backend/kernels/a.py"):
        (tmp_path / name).write_text("x = 2")
        sources_hash.cache_clear()
        hashes.append(sources_hash(tmp_path))
    assert hashes[0] == hashes[1], "the API computes no keys and values"
    assert len(set(hashes)) == 3
    sources_hash.cache_clear()


def test_a_flood_of_prompts_stays_within_memory_and_disk(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The budgets hold only some of the prompts. Checks the measured memory and the folder size all the time."""
    memory, disk = 300_000, 400_000
    draw = random.Random(1)
    most_memory = most_disk = 0
    with caching_engine(tiny_model("llama"), tmp_path, memory, disk) as driver:
        for turn in range(25):
            prompts = [tuple(draw.randrange(1, 90) for _ in range(draw.randrange(20, 120))) for _ in range(8)]
            driver.run(*(Generate(100 * turn + number, prompt, 3) for number, prompt in enumerate(prompts)))
            assert driver.facts is not None
            most = driver.facts.weight_bytes + memory
            driver.wait(lambda most=most: driver.measured.memory_bytes <= most)  # type: ignore[misc]
            most_memory = max(most_memory, driver.measured.cache_bytes)
            most_disk = max(most_disk, _bytes_in(tmp_path), driver.measured.disk_bytes)
    assert memory // 2 < most_memory <= memory
    assert disk // 2 < most_disk <= disk


def _bytes_in(folder: Path) -> int:
    """Tolerates files that are renamed or removed meanwhile."""
    used = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            used += path.stat().st_size
    return used
