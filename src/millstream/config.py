"""The settings of a server, as plain data. The command line fills them; tests make them by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FAST_PATHS = {
    "fuse": "compute projections of the same input as one product",
    "mkl-layout": "ask for the products of few rows as MKL computes them fastest (CPU, x86_64)",
    "slots": "rows join and leave without copying the batch",
    "kernel": "our own kernels for attention over unequal rows and for sampling (CUDA)",
    "fused-matmul": "our own kernels for products of few rows, with what follows them (CUDA, with kernel and slots)",
    "group-prefill": "read prompts of like length in one pass",
    "warmup": "compile kernels (GPU) and build the vocabulary of grammars at load, not at the first request",
}
"""What `--disable` can turn off, one by one."""


KV_BITS = (0, 4, 8)
"""What keys and values may be kept in; 0 for the type that the model computes in."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model to serve, as the user wants it. What is None here is the server's own setting, or the model's."""

    source: str | None
    """A folder, a .gguf file or a hub id. None: the demo model."""
    name: str | None = None
    """What requests call it. None: the name that its source has."""
    aliases: tuple[str, ...] = ()
    pin: bool = False
    """Never unload it to make room, nor when it is idle."""
    load: str | None = None
    """`start`: with the server. `use`: when the first request wants it."""
    idle_unload: float | None = None
    """Seconds without a request after which it is unloaded; 0 for never."""
    max_batch: int | None = None
    isolation: str | None = None
    kv_memory: int | None = None
    """Bytes for keys and values, where the server has a memory budget."""
    kv_bits: int | None = None
    sampling: tuple[tuple[str, float], ...] = ()
    """What requests that leave a field of `Sampling` out get: pairs of a name and a value."""
    max_tokens: int | None = None
    """For requests that set no limit."""
    tool_format: str | None = None
    """How the model writes calls of functions; `auto` and `none` too."""
    reasoning_format: str | None = None
    """The marks around its thoughts; `auto` and `none` too."""
    allow_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str | ModelSpec, ...] = ()
    """What to serve; text is a source. None at all: the demo model."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    queue: int = 256
    fail_fast: bool = False
    prefill_chunk: int | None = None
    """The most tokens of one prompt that a step reads beside running rows. None: 128 on the CPU, 256 on a GPU."""
    body_limit: int = 32 * 2**20
    unread_output: int = 8 * 2**20
    """Bytes of its answer that a client may leave unread; all clients together 32 times as many."""
    write_timeout: float = 60.0
    """Seconds that a client may take nothing of what is sent to it; 0 for ever."""
    grace: float = 20.0
    """Seconds that running requests get to finish after SIGTERM."""
    stop_patience: float = 30.0
    """Seconds that engines then get to end their step and free their models."""
    device: str | None = None
    """`cpu` to keep off the GPU; None for MLX's own choice."""
    isolation: str = "auto"
    """`thread`: engines run in this process. `process`: each in a child of its own. `auto`: see `isolated`."""
    blas: bool = True
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths to leave out."""
    cache_dir: Path | None = None
    memory: int | None = None
    """Bytes that all models together may take. None: no bound."""
    prefix_cache_memory: int = 2**30
    """Bytes for beginnings of prompts that are kept, a model; 0 for none."""
    prefix_cache_disk: int = 0
    """Bytes of them on disk, a model; 0 for none. Only together with some in memory."""
    kv_bits: int = 0
    """Keys and values in 8 or 4 bits, for models that do not say; 0 for the type that a model computes in."""
    load: str = "start"
    """When models are loaded that do not say: `start` or `use`."""
    idle_unload: float = 0.0
    """Seconds after which an idle model is unloaded; 0 for never."""
    tool_format: str = "auto"
    """For models that do not say: from the template and the vocabulary."""
    reasoning_format: str = "auto"
    allow_special_tokens: bool = False
    """Let names of control tokens in messages act as control tokens. Off: they are text."""
    step_timeout: float = 120.0
    """Seconds that one step may take before its engine is declared hung; 0 for ever."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the API. None at all: it is open."""
    media_folders: tuple[Path, ...] = ()
    """Requests may name files below these."""
    media_bytes: int = 20 * 2**20
    """The largest image or other file."""
    media_pixels: int = 40_000_000
    media_count: int = 16
    """Files of one request."""
    media_timeout: float = 10.0
    """Seconds for fetching one."""
    media_seconds: float = 300.0
    """The longest sound. A model may take less."""
    media_memory: int = 2**30
    """Bytes for the media of all requests together: as files, while they are decoded, and for engines."""
    allow_private_media: bool = False
    """Fetch from addresses that are not public as well."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the API; `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may carry in `Host`, besides loopback names; `*` for any. None at all: a server on a loopback
    address takes loopback names only, any other server takes all."""
    max_connections: int = 1000
    header_timeout: float = 20.0
    """Seconds for the headers of a request; 0 for ever."""
    body_timeout: float = 30.0
    """Seconds without a byte of its body; 0 for ever."""

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """What to serve: the demo model if nothing was named."""
        named = tuple(ModelSpec(model) if isinstance(model, str) else model for model in self.models)
        return named or (ModelSpec(None),)

    def isolated(self, spec: ModelSpec) -> bool:
        """Whether the engine runs in a process of its own. With cores to spare, that keeps HTTP work and an engine
        from fighting for one interpreter; on one or two cores there is nothing to win."""
        isolation = spec.isolation or self.isolation
        if isolation == "auto":
            return (os.cpu_count() or 1) > 2
        return isolation == "process"
