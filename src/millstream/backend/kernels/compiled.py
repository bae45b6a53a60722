"""`mx.fast.cuda_kernel`, but compiled kernels are kept on disk for the next process, and compile faster.

MLX compiles a custom kernel again in every process, with a header that takes most of the time. Here we compile it, and
put the binary where MLX looks before it compiles (see `assembled`). MLX is then handed a stub in place of the source,
also because it hashes the source at every launch: that of a short one costs the host nothing.

Without NVRTC, or where MLX does not find a binary that was put there, all of this is plain `mx.fast.cuda_kernel`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from millstream.backend.kernels.assembled import NAMESPACE, Body, Parameters, module_name
from millstream.backend.kernels.binary_folder import BinaryFolder, limit_size
from millstream.backend.kernels.nvrtc import Binary, CompileError, Nvrtc, cuda_headers, loaded_nvrtc
from millstream.models.demo import user_cache_dir

MLX_FOLDER = "MLX_PTX_CACHE_DIR"
"""The variable by which MLX is told where compiled kernels are. It is read when the first one is needed."""
LONGEST_NAME = 245
"""Of a module. MLX spreads longer ones over several folders, which is not worth the trouble here."""

log = logging.getLogger(__name__)


class Compiler(Protocol):
    @property
    def version(self) -> str: ...
    def compile(self, source: str, function: str, architecture: str) -> Binary: ...


@dataclass(frozen=True, slots=True)
class KeptKernels:
    """Compiles kernels for one kind of GPU into a folder."""

    compiler: Compiler
    architecture: str
    folder: BinaryFolder

    def stub(self, body: Body, parameters: Parameters, shared_memory: int = 0) -> Body:
        """Put the kernel's binary into the folder, and return what MLX must be given to find it. Raises `CompileError`
        or OSError. MLX sets up a module for the shared memory of its first launch alone, so another amount is another
        stub."""
        source = body.for_us(parameters)
        key = hashlib.sha256("\0".join([source, self.architecture, self.compiler.version]).encode()).hexdigest()
        # Should MLX ever compile it, it must not succeed. The names make MLX pass their values.
        error = "a compiled kernel is gone; start again"
        stub = Body(
            body.name,
            body.inputs,
            body.outputs,
            f"#error {error}\n// {key} {shared_memory} {' '.join(body.extras)}",
            "",
        )
        self.put(stub, parameters, source)
        return stub

    def put(self, sought: Body, parameters: Parameters, source: str) -> None:
        """Put a binary of `source` where MLX looks for that of another body."""
        function = sought.function(parameters.template)
        module = module_name(function, sought.for_mlx(parameters))
        if len(module) > LONGEST_NAME:
            raise CompileError(f"the name of {function} is too long")
        qualified = f"{NAMESPACE}::{function}"
        self.folder.ensure(module, qualified, lambda: self._compile(source, qualified))

    def _compile(self, source: str, function: str) -> Binary:
        started = time.monotonic()
        try:
            return self.compiler.compile(source, function, self.architecture)
        finally:
            _process.compiled.append(time.monotonic() - started)


class Kernel:
    """Called like what `mx.fast.cuda_kernel` returns."""

    def __init__(self, body: Body, *, ensure_row_contiguous: bool, shared_memory: int) -> None:
        self._body = body
        self._options = {"ensure_row_contiguous": ensure_row_contiguous, "shared_memory": shared_memory}
        self._launchers: dict[Parameters, Any] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, int | mx.Dtype]] | None = None,
        **launch: Any,
    ) -> list[mx.array]:
        types = tuple((each.dtype, each.ndim > 0) for each in inputs)
        parameters = Parameters(types, tuple(output_dtypes), tuple(template or ()))
        launcher = self._launchers.get(parameters)
        if (noted := getattr(_noting, "variants", None)) is not None:
            if launcher is None:
                noted.add((self._body, parameters, self._options["shared_memory"]))
            shapes = launch["output_shapes"]
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, output_dtypes, strict=True)]
        if launcher is None:
            launcher = self._launchers[parameters] = self._launcher(parameters)
        out: list[mx.array] = launcher(inputs=inputs, output_dtypes=output_dtypes, template=template, **launch)
        return out

    def _launcher(self, parameters: Parameters) -> Any:
        body = self._body
        if (kept := _process.for_kernels()) is not None and parameters.known:
            try:
                body = kept.stub(body, parameters, self._options["shared_memory"])
            except (CompileError, OSError) as error:
                log.info("The kernel %s is compiled by MLX, in every process: %s", body.name, error)
        return mx_kernel(body, **self._options)


@contextlib.contextmanager
def compile_ahead() -> Iterator[None]:
    """Kernels that this thread calls inside are not launched, and give zeros: whoever builds a graph there must not use
    it. At the end of the outermost one, all of them are compiled at once, on as many threads as there are cores."""
    if getattr(_noting, "variants", None) is not None:
        yield
        return
    _noting.variants = noted = set[tuple[Body, Parameters, int]]()
    mx.disable_compile()  # else zeros would become part of compiled functions
    try:
        yield
    finally:
        _noting.variants = None
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()
    if (kept := _process.for_kernels()) is not None:
        _compile_at_once(kept, [each for each in noted if each[1].known])


def rehearse(work: Callable[[], object]) -> None:
    """Run `work` for the kernels that it calls: they are not launched, and are compiled at once afterwards. Whatever it
    leaves behind must be dropped. Does nothing where nothing is compiled."""
    if keeps_kernels():
        with compile_ahead(), contextlib.suppress(Exception):  # of zeros anything may come; the real run tells
            work()


def _compile_at_once(kept: KeptKernels, waiting: list[tuple[Body, Parameters, int]]) -> None:
    def work() -> None:
        while waiting:
            try:
                kept.stub(*waiting.pop())
            except (CompileError, OSError, IndexError):
                continue  # the first real call says so, and leaves the kernel to MLX

    before, started = len(_process.compiled), time.monotonic()
    threads = [threading.Thread(target=work, name="compile") for _ in range(min(len(waiting), os.cpu_count() or 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if count := len(_process.compiled) - before:
        log.info("Compiled %d kernels in %.1f s, %d at once", count, time.monotonic() - started, len(threads))


def keeps_kernels() -> bool:
    """True if kernels are compiled here, so that `compile_ahead` is worth calling."""
    return _process.for_kernels() is not None


_noting = threading.local()
"""`variants`: what this thread's kernels are called with inside of `compile_ahead`."""


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Kernel:
    """See `mx.fast.cuda_kernel`."""
    body = Body(name, tuple(input_names), tuple(output_names), source, header)
    return Kernel(body, ensure_row_contiguous=ensure_row_contiguous, shared_memory=shared_memory)


def mx_kernel(body: Body, **options: Any) -> Any:
    return mx.fast.cuda_kernel(
        name=body.name,
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.source,
        header=body.header,
        **options,
    )


class _Process:
    """Where this process keeps kernels: it is decided once, since MLX reads its variable once."""

    def __init__(self) -> None:
        self.kept: KeptKernels | None = None
        self.compiled: list[float] = []
        """Seconds of each kernel that was compiled here, not found on disk."""
        self.decided = False

    def decide(self, root: Path) -> None:
        """Two threads that come at once decide the same."""
        if self.decided:
            return
        try:
            self.kept = next((kept for kept in _candidates(root) if _found_by_mlx(kept)), None)
        except (OSError, AttributeError, CompileError) as error:
            log.info("CUDA kernels are compiled again by every process: %s", error)
        self.decided = True

    def for_kernels(self) -> KeptKernels | None:
        """Where kernels are kept; decided with the usual folder if nobody did before."""
        if not self.decided and mx.cuda.is_available():
            self.decide(user_cache_dir() / "kernels")
        return self.kept


_process = _Process()


def keep_kernels(root: Path) -> None:
    """Keep compiled kernels in a folder below `root`, MLX's own ones too: for CUDA, before the first is needed. The
    user's own MLX_PTX_CACHE_DIR has precedence."""
    _process.decide(root)


def compile_costs() -> tuple[int, float]:
    """How many kernels this process has compiled, and for how many seconds."""
    return len(_process.compiled), sum(_process.compiled)


def _candidates(root: Path) -> Iterator[KeptKernels]:
    """In our folder; if MLX has read its variable before, in its own."""
    library, packages = loaded_nvrtc(), Path(mx.__file__).parents[1]
    headers = cuda_headers(packages)
    if library is None or headers is None:
        raise CompileError(f"no {'NVRTC' if library is None else 'CUDA headers'}")
    compiler = Nvrtc(library, [path for path in (headers, packages / "mlx/include/cccl") if path.exists()])
    info = mx.device_info()
    major, minor = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
    architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    mlx = importlib.metadata.version("mlx")
    own = root / f"mlx-{mlx}-nvrtc-{compiler.version}-{architecture}"
    folder = BinaryFolder(Path(os.environ.setdefault(MLX_FOLDER, str(own))))
    if root in folder.path.parents:
        folder.remove_damaged()
        limit_size(root)
    yield KeptKernels(compiler, architecture, folder)
    yield KeptKernels(compiler, architecture, BinaryFolder(Path(tempfile.gettempdir()) / "mlx" / mlx / "ptx"))


def _found_by_mlx(kept: KeptKernels) -> bool:
    """Try it: the kernel that MLX is given writes a 0, the binary in the folder a 1."""
    where = hashlib.sha256(str(kept.folder.path).encode()).hexdigest()  # MLX would not look again for the same source
    sought = Body("millstream_probe", ("x",), ("out",), f"  out[0] = 0;  // {where}", "")
    written = Body("millstream_probe", ("x",), ("out",), "  out[0] = 1;", "")
    parameters = Parameters(((mx.int32, True),), (mx.int32,), ())
    kept.put(sought, parameters, written.for_us(parameters))
    (out,) = mx_kernel(sought)(
        inputs=[mx.zeros((1,), dtype=mx.int32)],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    found = bool(out.item() == 1)
    log.debug("Compiled kernels %s in %s", "are kept" if found else "are not found", kept.folder.path)
    return found
