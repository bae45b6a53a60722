"""Compiled kernels are kept on disk: where MLX looks for them, for the next process, and bounded in size."""

from __future__ import annotations

import logging
import os
import re
import site
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from millstream.backend.kernels import compiled
from millstream.backend.kernels.assembled import Body, HashFunction, Parameters, module_name
from millstream.backend.kernels.binary_folder import BinaryFolder, limit_size
from millstream.backend.kernels.compiled import KeptKernels, cuda_kernel
from millstream.backend.kernels.nvrtc import Binary, CompileError, Nvrtc, cuda_headers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is for Linux here")

SOURCE = Path(compiled.__file__).parents[2]
KERNEL: dict[str, Any] = {
    "name": "add",
    "input_names": ["x", "y"],
    "output_names": ["out"],
    "source": "  out[blockIdx.x] = T(float(x[blockIdx.x]) + y[0] + x_shape[0]);",
}
BODY = Body("add", ("x", "y"), ("out",), KERNEL["source"], "")
PARAMETERS = Parameters(((mx.bfloat16, True), (mx.float32, False)), (mx.bfloat16,), (("T", mx.bfloat16), ("N", 3)))


class FakeCompiler:
    """Counts what it compiles."""

    version = "13.0"

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, source: str, function: str, architecture: str) -> Binary:
        self.compiled.append(function)
        if "unknown_to_us" in source:
            raise CompileError("unknown_to_us is undefined")
        return Binary(f"code of {function} for {architecture}: {source}".encode(), f"_Z{function}")


class FakeMlx:
    """Plays `mx.fast.cuda_kernel`: it looks for a binary in the folder, as MLX does, before it would compile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: list[str] = []
        """Of each launch: the binary that was found, or that MLX compiles itself."""

    def cuda_kernel(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool = True,
        shared_memory: int = 0,
    ) -> Any:
        body = Body(name, tuple(input_names), tuple(output_names), source, header)

        def launch(*, inputs: Any, output_dtypes: Any, template: Any, output_shapes: Any, **_: Any) -> list[mx.array]:
            types = tuple((each.dtype, each.ndim > 0) for each in inputs)
            parameters = Parameters(types, tuple(output_dtypes), tuple(template or ()))
            module = module_name(body.function(parameters.template), body.for_mlx(parameters))
            code = self.folder / f"{module}.ptx"
            self.loaded.append(code.read_text() if code.exists() else "compiled by MLX")
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def kept(compiler: FakeCompiler, tmp_path: Path) -> KeptKernels:
    return KeptKernels(compiler, "sm_90a", BinaryFolder(tmp_path / "kernels"))


@pytest.fixture
def mlx(kept: KeptKernels, monkeypatch: pytest.MonkeyPatch) -> FakeMlx:
    """A process that keeps kernels."""
    fake = FakeMlx(kept.folder.path)
    monkeypatch.setattr(mx.fast, "cuda_kernel", fake.cuda_kernel)
    monkeypatch.setattr(compiled._process, "kept", kept)
    return fake


def launch(kernel: Any, rows: int = 3, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    (out,) = kernel(
        inputs=[mx.zeros((rows,), dtype), mx.array(1.0)],
        output_shapes=[(rows,)],
        output_dtypes=[dtype],
        grid=(rows, 1, 1),
        threadgroup=(1, 1, 1),
        template=[("T", dtype)],
    )
    assert out.shape == (rows,) and out.dtype == dtype
    return out


def test_source_is_the_one_that_mlx_assembles() -> None:
    """To the letter: MLX names the file by its hash. Written down from its custom_kernel.cpp."""
    expected = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// header
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_add_bfloat16_t_3_t_float(
    const __nv_bfloat16* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ Strides x_strides,
    const __grid_constant__ int x_ndim,
    const float* y,
    __nv_bfloat16* out,
    int64_t* more) {
  using T = __nv_bfloat16;
  constexpr int N = 3;
  constexpr bool FAST = true;
  using U = float;

x_shape x_strides x_ndim y_shape
}

} // namespace mlx::core::cu
"""
    body = Body("add", ("x", "y"), ("out", "more"), "x_shape x_strides x_ndim y_shape", "// header\n")
    template = (("T", mx.bfloat16), ("N", 3), ("FAST", True), ("U", mx.float32))
    parameters = Parameters(PARAMETERS.inputs, (mx.bfloat16, mx.int64), template)
    assert body.for_mlx(parameters) == expected


def test_hash_is_that_of_the_c_plus_plus_library() -> None:
    assert f"{HashFunction()(b'hello world, a kernel'):x}" == "1d035eaae0481573"
    assert re.fullmatch("add_[0-9a-f]{10,16}", module_name("add", "source"))


def test_kernel_is_compiled_once_for_all_processes(mlx: FakeMlx, compiler: FakeCompiler) -> None:
    first, second = cuda_kernel(**KERNEL), cuda_kernel(**KERNEL)  # of two processes
    launch(first)
    launch(first, rows=5)
    launch(second)
    assert compiler.compiled == ["mlx::core::cu::custom_kernel_add_bfloat16_t"]
    assert len(mlx.loaded) == 3 and all("sm_90a" in code and "x_shape[0]" in code for code in mlx.loaded)
    launch(second, dtype=mx.float16)
    assert compiler.compiled[1:] == ["mlx::core::cu::custom_kernel_add_float16_t"]


def test_names_beside_the_code_are_those_that_mlx_asks_for(kept: KeptKernels) -> None:
    kept.stub(BODY, PARAMETERS)
    (names,) = kept.folder.path.glob("*.txt")
    lines = [line.split("\t") for line in names.read_text().splitlines() if "\t" in line]
    function = "mlx::core::cu::custom_kernel_add_bfloat16_t_3"
    assert lines == [[function, f"_Z{function}"]]


def test_stub_asks_for_the_same_parameters_and_cannot_compile(kept: KeptKernels) -> None:
    stub = kept.stub(BODY, PARAMETERS)
    assert stub.extras == BODY.extras == ("x_shape",)
    assert "\n#error" in stub.for_mlx(PARAMETERS)
    assert len(stub.source) < 200


def test_changed_source_is_another_kernel(mlx: FakeMlx, compiler: FakeCompiler) -> None:
    launch(cuda_kernel(**KERNEL))
    launch(cuda_kernel(**KERNEL | {"source": KERNEL["source"] + " // changed x_shape"}))
    launch(cuda_kernel(**KERNEL, header="// changed\n"))
    assert len(compiler.compiled) == 3
    assert len(set(mlx.loaded)) == 3


def test_other_shared_memory_is_another_module(mlx: FakeMlx, kept: KeptKernels) -> None:
    """MLX allows a module the shared memory of its first launch."""
    for size in (0, 60_000, 90_000, 60_000):
        launch(cuda_kernel(**KERNEL, shared_memory=size))
    assert len(list(kept.folder.path.glob("*.ptx"))) == 3
    assert "compiled by MLX" not in mlx.loaded


def test_other_compiler_or_architecture_compiles_again(kept: KeptKernels, compiler: FakeCompiler) -> None:
    newer = FakeCompiler()
    newer.version = "13.1"
    for each in (kept, KeptKernels(newer, "sm_90a", kept.folder), KeptKernels(compiler, "sm_80", kept.folder)):
        each.stub(BODY, PARAMETERS)
        each.stub(BODY, PARAMETERS)
    assert (len(compiler.compiled), len(newer.compiled)) == (2, 1)


@pytest.mark.parametrize("damage", [b"", b"other", None])
def test_damaged_code_is_compiled_again(kept: KeptKernels, compiler: FakeCompiler, damage: bytes | None) -> None:
    kept.stub(BODY, PARAMETERS)
    (code,) = kept.folder.path.glob("*.ptx")
    right = code.read_bytes()
    if damage is None:
        code.unlink()
    else:
        code.write_bytes(damage)
    kept.stub(BODY, PARAMETERS)
    assert code.read_bytes() == right and len(compiler.compiled) == 2


def test_kernel_that_we_cannot_compile_is_left_to_mlx(
    mlx: FakeMlx, compiler: FakeCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kernel = cuda_kernel(**KERNEL | {"source": "unknown_to_us"})
    launch(kernel)
    launch(kernel)
    assert mlx.loaded == ["compiled by MLX"] * 2
    assert len(compiler.compiled) == 1 and "unknown_to_us is undefined" in caplog.text


def test_without_a_folder_all_is_left_to_mlx(mlx: FakeMlx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled._process, "kept", None)
    launch(cuda_kernel(**KERNEL))
    assert mlx.loaded == ["compiled by MLX"]


def test_folder_that_cannot_be_written_leaves_all_to_mlx(mlx: FakeMlx, kept: KeptKernels) -> None:
    for path in kept.folder.path.iterdir():
        path.unlink()
    kept.folder.path.rmdir()
    kept.folder.path.write_text("a file in its place")
    mlx.folder = mlx.folder.parent
    launch(cuda_kernel(**KERNEL))
    assert mlx.loaded == ["compiled by MLX"]


@pytest.mark.parametrize("finds", [True, False])
def test_whether_mlx_finds_binaries_is_tried(
    kept: KeptKernels, mlx: FakeMlx, monkeypatch: pytest.MonkeyPatch, finds: bool
) -> None:
    """A build of MLX that looks elsewhere, or names files otherwise, must not be given a stub."""
    if not finds:
        mlx.folder = mlx.folder.parent
    original = mlx.cuda_kernel

    def answering(**options: Any) -> Any:
        inner = original(**options)

        def run(*, template: Any = None, **given: Any) -> list[mx.array]:
            inner(template=template, **given)
            return [mx.array([int("out[0] = 1" in mlx.loaded[-1])])]

        return run

    monkeypatch.setattr(mx.fast, "cuda_kernel", answering)
    assert compiled._found_by_mlx(kept) is finds


def test_processes_that_race_leave_whole_files(kept: KeptKernels) -> None:
    barrier = threading.Barrier(8)

    def compile_binary() -> Binary:
        barrier.wait(30)
        return Binary(b"code" * 10_000, "symbol")

    threads = [
        threading.Thread(target=kept.folder.ensure, args=("module", "function", compile_binary)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in kept.folder.path.iterdir()) == ["module.ptx", "module.txt"]
    assert (kept.folder.path / "module.ptx").read_bytes() == b"code" * 10_000


def test_several_kernels_compile_at_once(mlx: FakeMlx, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    barrier = threading.Barrier(3)
    plain = compiler.compile

    def together(source: str, function: str, architecture: str) -> Binary:
        barrier.wait(30)
        return plain(source, function, architecture)

    monkeypatch.setattr(compiler, "compile", together)
    kernel = cuda_kernel(**KERNEL)
    types = (mx.bfloat16, mx.float16, mx.float32)
    with compiled.compile_ahead():
        for dtype in (*types, mx.bfloat16):
            assert not launch(kernel, dtype=dtype).any().item()
    assert mlx.loaded == [] and len(compiler.compiled) == 3
    for dtype in types:
        launch(kernel, dtype=dtype)
    assert len(compiler.compiled) == 3 and "compiled by MLX" not in mlx.loaded


def test_functions_that_mlx_compiles_see_no_zeros_of_it(mlx: FakeMlx, kept: KeptKernels) -> None:
    kernel = cuda_kernel(**KERNEL)
    traced = mx.compile(lambda x: x + launch(kernel, dtype=mx.float32))
    with compiled.compile_ahead():
        traced(mx.ones((3,)))
    assert mlx.loaded == []
    traced(mx.ones((3,)))
    traced(mx.ones((3,)))
    assert len(mlx.loaded) == 1, "traced once, with the kernel in it"


def test_compiling_ahead_survives_what_cannot_be_compiled(mlx: FakeMlx, compiler: FakeCompiler) -> None:
    bad, good = cuda_kernel(**KERNEL | {"source": "unknown_to_us"}), cuda_kernel(**KERNEL)
    with compiled.compile_ahead():
        launch(bad)
        launch(good)
    launch(bad)
    launch(good)
    assert mlx.loaded[0] == "compiled by MLX" and "x_shape" in mlx.loaded[1]
    with pytest.raises(ZeroDivisionError), compiled.compile_ahead():
        raise ZeroDivisionError
    launch(good)
    assert len(mlx.loaded) == 3


def test_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    for age in range(10):
        path = tmp_path / f"version-{age % 2}" / f"{age}.ptx"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    limit_size(tmp_path, 1000)
    assert len(list(tmp_path.rglob("*.ptx"))) == 10
    limit_size(tmp_path, 800)
    assert sorted(int(path.stem) for path in tmp_path.rglob("*.ptx")) == list(range(6))


def test_code_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    """MLX writes its own files in place; the shared object of Python is as good an ELF file as any."""
    elf = Path(mx.__file__).read_bytes()
    for name, data in {"whole": elf, "cut": elf[:-100], "empty": b"", "text": b"//" + b" PTX" * 100}.items():
        (tmp_path / f"{name}.ptx").write_bytes(data)
        (tmp_path / f"{name}.txt").write_text("function\tsymbol\n")
    for name, names in {"nameless": "", "half-named": "function\tsym"}.items():
        (tmp_path / f"{name}.ptx").write_bytes(elf)
        (tmp_path / f"{name}.txt").write_text(names)
    (tmp_path / "alone.ptx").write_bytes(elf)
    assert BinaryFolder(tmp_path).remove_damaged() == 5
    assert sorted(path.stem for path in tmp_path.glob("*.ptx")) == ["text", "whole"]


def test_our_kernels_are_all_kept() -> None:
    callers = [path.name for path in SOURCE.rglob("*.py") if "mx.fast.cuda_kernel(" in path.read_text()]
    assert callers == ["compiled.py"]


def nvrtc() -> Nvrtc | None:
    folders = [*site.getsitepackages(), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    patterns = ("nvidia/*/lib/libnvrtc.so.*", "libnvrtc.so.*")
    libraries = [path for folder in folders for pattern in patterns for path in Path(folder).glob(pattern)]
    headers = cuda_headers(Path(site.getsitepackages()[0]))
    return Nvrtc(libraries[0], [headers]) if libraries and headers else None


@pytest.mark.skipif(nvrtc() is None, reason="no NVRTC here")
def test_nvrtc_compiles_without_a_gpu(tmp_path: Path) -> None:
    compiler = nvrtc()
    assert compiler is not None
    binary = compiler.compile(BODY.for_us(PARAMETERS), "mlx::core::cu::custom_kernel_add_bfloat16_t_3", "sm_90a")
    for name in ("whole", "cut"):
        (tmp_path / f"{name}.txt").write_text("function\tsymbol\n")
    (tmp_path / "whole.ptx").write_bytes(binary.code)
    (tmp_path / "cut.ptx").write_bytes(binary.code[:-1])
    assert BinaryFolder(tmp_path).remove_damaged() == 1 and (tmp_path / "whole.ptx").exists()
    assert binary.symbol.startswith("_ZN3mlx4core2cu")
    with pytest.raises(CompileError, match="identifier"):
        compiler.compile("void f() { unknown_to_us; }", "f", "sm_90a")


@pytest.mark.skipif(mx.cuda.is_available(), reason="CUDA here")
def test_process_without_cuda_keeps_nothing(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from millstream.backend.kernels import compiled;"
        f"compiled.keep_kernels(Path({str(tmp_path)!r})); print(compiled._process.kept)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "None" and not list(tmp_path.iterdir())
