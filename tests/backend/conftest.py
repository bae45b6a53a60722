"""Models that see, made once a run; and threads to do wrong with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.engines import Run
from support.pointer_kernels import PointerKernels, backend_with_kernels


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny random model of a family that takes images."""
    from support.tiny_vision import write_vision_model

    root = tmp_path_factory.mktemp("tiny-vision-models")

    def get(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else write_vision_model(folder, family)

    return get


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> PointerKernels:
    """The kernels that write in place, in a backend that else runs as on the CPU."""
    return backend_with_kernels(monkeypatch)


@pytest.fixture
def two_threads() -> Iterator[tuple[Run, Run]]:
    """Both live all the time: the streams of one that has ended may be given to the next."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        yield lambda work: one.submit(work).result(60), lambda work: other.submit(work).result(60)
