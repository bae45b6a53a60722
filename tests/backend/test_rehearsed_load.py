"""On CUDA, a first load compiles its kernels several at once; a stand-in plays compiler and kernels on the CPU."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend import mlx_backend
from millstream.backend.device import Device
from millstream.backend.generation import assembly, trial
from millstream.backend.generation import load as generation_load
from millstream.backend.generation.backend import GenerationSettings, MlxGenerationBackend
from millstream.backend.generation.layers import block_check
from millstream.backend.generation.layout_choice import block_fusion
from millstream.backend.kernels import compiled
from millstream.backend.kernels.binary_folder import BinaryFolder
from millstream.backend.kernels.compiled import KeptKernels
from millstream.backend.kernels.nvrtc import Binary
from millstream.backend.layers import matmul_check
from support.engines import engine
from support.tiny import write_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux here")


class StandIn:
    """Compiles nothing, and notes on which threads it should have."""

    version = "0"

    def __init__(self) -> None:
        self.at_once: list[str] = []
        self.one_by_one: list[str] = []

    def compile(self, source: str, function: str, architecture: str) -> Binary:
        here = threading.current_thread().name == "compile"
        (self.at_once if here else self.one_by_one).append(function)
        return Binary(b"code", "symbol")


def zeros(**_: Any) -> Any:
    """Plays `mx.fast.cuda_kernel`."""

    def launch(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    return launch


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A device whose kernels give zeros, and checks that take them for right."""
    stand_in = StandIn()
    monkeypatch.setattr(mx.fast, "cuda_kernel", zeros)
    monkeypatch.setattr(compiled._process, "kept", KeptKernels(stand_in, "sm_90a", BinaryFolder(tmp_path / "kernels")))
    monkeypatch.setattr(compiled._process, "decided", True)
    monkeypatch.setattr(mlx_backend, "current_device", lambda: Device("cuda", "pretended", 2**34))
    monkeypatch.setattr(block_fusion, "supported_here", lambda: True)
    monkeypatch.setattr(generation_load, "supported_here", lambda: True)
    monkeypatch.setattr(block_check, "_difference", lambda *arrays: 0.0)
    monkeypatch.setattr(block_check, "agree", lambda *numbers: None)
    monkeypatch.setattr(matmul_check, "_apart", lambda *arrays: (mx.array(0.0), mx.array(0.0)))
    monkeypatch.setattr(matmul_check, "_compared", set())
    monkeypatch.setattr(trial, "_distance", lambda *arrays: 0.0)
    monkeypatch.setattr(assembly.Assembly, "check_writes", lambda self, layout: None)
    return stand_in


def load(folder: Path) -> None:
    with engine(lambda: MlxGenerationBackend(GenerationSettings("folder", folder, max_rows=2))) as driver:
        assert driver.facts is not None and any("fused blocks: 2 of 2" in note for note in driver.facts.notes)


def test_kernels_of_a_load_compile_at_once(compiler: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    folder = write_model(tmp_path / "llama", "llama", **sizes)
    file = str(folder / "model.safetensors")
    mx.save_safetensors(file, {name: value.astype(mx.bfloat16) for name, value in mx.load(file).items()})
    load(folder)
    # The sampling kernel is checked by itself.
    assert [function for function in compiler.one_by_one if "millstream_sample" not in function] == []
    compiled_once = set(compiler.at_once)
    assert len(compiler.at_once) == len(compiled_once) >= 8
    assert "at once" in caplog.text and "rehearsal" in caplog.text
    caplog.clear()
    load(folder)
    assert len(compiler.at_once) == len(compiled_once), "a later load finds all of them"
    assert "rehearsal" not in caplog.text
