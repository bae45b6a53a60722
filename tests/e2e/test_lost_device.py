"""A GPU that fails while a model is loaded costs the fast path with the bad kernel, not the model."""

from __future__ import annotations

import resource
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from millstream.backend.mlx_backend import MlxBackend, explains_failed_loads
from millstream.config import Settings
from millstream.errors import DeviceLost, ModelError
from millstream.loading import generation
from support.lost_device import loses_device
from support.processes import children_find_us
from support.server import running


@pytest.fixture
def without_cores() -> None:
    """The process that ends by a signal leaves no file."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def test_another_process_loads_the_model_without_the_fast_path(
    servable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, without_cores: None
) -> None:
    """The first process says that its device is gone, the second one dies, the third one has no kernels."""
    children_find_us(monkeypatch)
    monkeypatch.setattr(generation, "expected_device", lambda requested: "cuda")
    settings = Settings(models=(str(servable),), port=0, isolation="process")
    with caplog.at_level("WARNING"), running(settings, loses_device) as server:
        (card,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    notes = [note for note in card["notes"] if note.startswith("loaded without")]
    assert [note.split()[2] for note in notes] == ["fused-matmul,", "kernel,"]
    assert "illegal instruction" in notes[0] and "signal 6" in notes[1]
    assert "Loading it again without kernel" in caplog.text


class Device(MlxBackend):
    """Loads nothing, on a device that may be gone."""

    def __init__(self, works: bool, error: Exception) -> None:
        super().__init__()
        self._works, self._error = works, error

    def device_works(self) -> bool:
        return self._works and super().device_works()

    @explains_failed_loads
    def load(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("works", "error", "raised"),
    [
        (False, RuntimeError("an illegal instruction was encountered"), DeviceLost),
        (True, RuntimeError("a weight has another shape"), RuntimeError),
        (False, ModelError("no such file"), ModelError),
        (True, RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), ModelError),
        (True, RuntimeError("[malloc] Unable to allocate 68719476736 bytes."), ModelError),
        (True, RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than"), ModelError),
        (True, MemoryError(), ModelError),
        (False, RuntimeError("out of memory"), DeviceLost),
    ],
)
def test_a_failed_load_tells_whether_the_device_is_gone(works: bool, error: Exception, raised: type) -> None:
    with pytest.raises(raised) as caught:
        Device(works, error).load()
    assert type(caught.value) is raised
    assert raised is not DeviceLost or "--disable fused-matmul" in str(caught.value)
    assert mx.zeros((1,)).item() == 0


def test_a_load_without_memory_says_how_much_there_was() -> None:
    with pytest.raises(ModelError, match=r"\d GiB of \d+\.\d GiB were left when the load failed \(\[malloc\] Unable"):
        Device(True, RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")).load()
