"""The settings of a server, as plain data. The command line fills them in; tests build them directly."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

FAST_PATHS = {
    "fuse": "compute projections of the same input as one matmul",
    "mkl-layout": "lay out small-batch matmuls the way MKL computes them fastest (CPU, x86_64)",
    "slots": "rows join and leave without copying the batch",
    "kernel": "custom kernels for attention over rows of unequal length and for sampling (CUDA)",
    "fused-matmul": "custom kernels for small-batch matmuls fused with the next operation (CUDA; with kernel, slots)",
    "packed-matmul": "compute with quantised weights as they are, and not unpacked to bf16 (CUDA; with fused-matmul)",
    "compiled-step": "run a decode step's forward pass as one compiled function (CUDA; with kernel, slots)",
    "group-prefill": "prefill prompts of similar length in one pass",
    "calibration": "measure chunks, steps and copies at load, and choose chunk lengths and the like by that",
    "warmup": "compile kernels (GPU) and build the vocabulary for grammars at load, not at the first request",
}
"""What `--disable` can turn off, one by one."""

LAYOUTS = ("auto", "arena", "arena-built")
"""How KV caches of rows are laid out. `arena`: in arenas with a position map, which take every kind of layer and need
no kernel of ours; `arena-built`: the same, and each step is given to the device when the last one has been read."""

FAST_PATH_ALIASES = {"turn": "mkl-layout", "products": "fused-matmul"}
"""Old names of fast paths. `--disable` still accepts them."""

TOOL_SERVER_TRANSPORTS = ("streamable-http", "sse")

MODEL_KINDS = ("generation", "embedding", "rerank", "transcription", "speech")
"""What a model can be used for."""

KV_BITS = (0, 4, 8)
"""Bits per number of the KV cache; 0 for the dtype that the model computes in."""

SPECULATION = ("auto", "off")
"""Whether tokens are drafted and verified several at a time: `auto` where it pays."""

NO_DRAFT = "none"
"""As the draft of a model: it has none, whatever the server's default is."""

STORE_SECONDS = 24 * 3600.0
STORE_DIR_SECONDS = 30 * 24 * 3600.0
"""How long stored responses are kept by default: in memory, and on disk."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model to serve, with its own options. An option that is None falls back to the server's, or the model's."""

    source: str | None
    """A folder, a .gguf file or a hub id. None for the demo model."""
    name: str | None = None
    """The name in requests. None for a name derived from the source."""
    aliases: tuple[str, ...] = ()
    kind: str | None = None
    """One of `MODEL_KINDS`. None: found from its files."""
    pin: bool = False
    """Never unload it, neither to free memory nor when it is idle."""
    load: str | None = None
    """`start`: load it when the server starts. `use`: load it for the first request that names it."""
    idle_unload: float | None = None
    """Unload it after this many seconds without a request; 0 for never."""
    max_batch: int | None = None
    isolation: str | None = None
    kv_memory: int | None = None
    """KV cache size in bytes, if the server has a memory budget."""
    kv_bits: int | None = None
    speculation: str | None = None
    draft: str | None = None
    """Its draft model: as `source`; `none` for none."""
    draft_depth: int | None = None
    spec_prefill: float | None = None
    sampling: tuple[tuple[str, float], ...] = ()
    """Defaults for fields of `Sampling` that a request leaves out, as pairs of name and value."""
    max_tokens: int | None = None
    """Default `max_tokens` of requests that set none."""
    tool_format: str | None = None
    """The format of its tool calls, `auto` or `none`."""
    reasoning_format: str | None = None
    """The markers around its reasoning, `auto` or `none`."""
    allow_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolServerSpec:
    """One MCP server: a `command` that the server runs, or the `url` of one that runs elsewhere."""

    label: str
    """The name in requests."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Variables of its process, besides a few harmless ones. Not shown: they are often secrets."""
    cwd: Path | None = None
    url: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    transport: str = "streamable-http"
    """How to talk to a `url`: one of `TOOL_SERVER_TRANSPORTS`."""
    timeout: float = 60.0
    """Seconds for a call."""
    start_timeout: float = 30.0
    """Seconds to start or connect, and to list the tools."""
    tools: tuple[str, ...] | None = None
    """Offer these tools only. None for all."""


@dataclass(frozen=True, slots=True)
class ConfigUpdate:
    """What the configuration says when it is read again while the server runs."""

    models: tuple[str | ModelSpec, ...]
    needs_restart: tuple[str, ...] = ()
    """Changed options of the server, by name. They take effect when it starts again."""


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str | ModelSpec, ...] = ()
    """The models to serve; a string is a source. Empty for the demo model."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    queue: int = 256
    fail_fast: bool = False
    prefill_chunk: int | None = None
    """Most prompt tokens per request and step while other rows decode. None for what the calibration
    finds: see `engine.generation.cost_model`."""
    max_token_gap: float = 50.0
    """Longest time between two tokens of a stream that prefill of other requests may cause, in milliseconds."""
    body_limit: int = 32 * 2**20
    unread_output: int = 8 * 2**20
    """Bytes of output that a client may leave unread; 32 times as many for all clients together."""
    write_timeout: float = 60.0
    """Seconds after which a client that reads nothing is disconnected; 0 for never."""
    grace: float = 20.0
    """Seconds for running requests to finish after SIGTERM."""
    stop_patience: float = 30.0
    """Seconds after that for engines to finish their step and free their models."""
    device: str | None = None
    """`cpu` to not use the GPU; None for MLX's default device."""
    isolation: str = "auto"
    """`thread`: engines run in this process. `process`: each in its own child process. `auto`: see `isolated`."""
    blas: bool = True
    unpack: bool = True
    disabled: frozenset[str] = frozenset()
    """Fast paths that are turned off: keys of `FAST_PATHS`."""
    layout: str = "auto"
    """One of `LAYOUTS`."""
    cache_dir: Path | None = None
    memory: int | None = None
    """Memory budget of all models in bytes. None: each model may use what its device has free when it is loaded."""
    prefix_cache_memory: int | None = None
    """Prefix cache size per model in bytes; 0 for no prefix cache. None: by the memory that the weights leave."""
    prefix_cache_disk: int = 0
    """Prefix cache size per model on disk, in bytes; 0 for none. It needs a prefix cache in memory."""
    kv_bits: int = 0
    """Quantise the KV cache to 8 or 4 bits, unless a model sets its own; 0 for the dtype that a model computes in."""
    speculation: str = "auto"
    """One of `SPECULATION`, for models that do not set their own."""
    draft: str | None = None
    """The draft model of models that do not set their own: a folder, a .gguf file or a hub id."""
    draft_depth: int | None = None
    """The most tokens that a draft model drafts at once. None: as many as pay."""
    spec_prefill: float = 1.0
    """The share of a long prompt that a model with a draft model reads, unless it sets its own; 1: all of it."""
    spec_prefill_tokens: int = 4096
    """The fewest tokens of a long prompt, without those in the prefix cache."""
    load: str = "start"
    """When to load models that do not set it themselves: `start` or `use`."""
    idle_unload: float = 0.0
    """Unload a model after this many idle seconds; 0 for never."""
    tool_format: str = "auto"
    """For models that do not set their own. `auto` detects it from the chat template and the vocabulary."""
    reasoning_format: str = "auto"
    allow_special_tokens: bool = False
    """Let control tokens in messages act as control tokens. If False, they are text."""
    step_timeout: float = 120.0
    """Seconds after which a step counts as hung and its engine is replaced; 0 for never."""
    api_keys: tuple[str, ...] = ()
    """Requests need one of these keys. Empty: the API is open."""
    media_folders: tuple[Path, ...] = ()
    """Requests may name files in these folders."""
    media_bytes: int = 20 * 2**20
    """Most bytes of a media file."""
    media_pixels: int = 40_000_000
    media_count: int = 16
    """Most media files per request."""
    media_timeout: float = 10.0
    """Seconds to download one file."""
    media_seconds: float = 300.0
    """Longest audio file. A model may accept less."""
    media_memory: int = 2**30
    """Bytes for the media of all requests together: as files, while decoding, and as tensors for engines."""
    audio_bytes: int = 256 * 2**20
    """Most bytes of an audio file to transcribe, uploaded or downloaded."""
    audio_seconds: float = 4 * 3600.0
    """Longest audio to transcribe."""
    allow_private_media: bool = False
    """Download from private addresses too."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the API; `loopback` for all of this machine, `*` for any."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted `Host` headers, besides loopback names; `*` for any. If empty, a server on a loopback address accepts
    loopback names only, and any other server accepts all."""
    max_connections: int = 1000
    header_timeout: float = 20.0
    """Seconds to receive the headers of a request; 0 for no limit."""
    body_timeout: float = 30.0
    """Seconds without a byte of the request body; 0 for no limit."""
    store_dir: Path | None = None
    """Folder for what a restart should find: stored responses, and the key that seals text. None for memory alone."""
    store_size: int = 256 * 2**20
    """Most bytes of stored responses."""
    store_age: float | None = None
    """Seconds after which they expire; 0 for never. None: 24 hours in memory, 30 days on disk."""
    tool_servers: tuple[ToolServerSpec, ...] = ()
    """MCP servers whose tools requests may use."""
    log_content: bool = False
    """Write prompts and answers to the log."""
    otel: bool = False
    """Export OpenTelemetry spans, even if no variable of the environment asks for it."""

    @property
    def record_seconds(self) -> float:
        """How long a stored response is kept, in seconds."""
        if self.store_age is None:
            return STORE_SECONDS if self.store_dir is None else STORE_DIR_SECONDS
        return self.store_age or math.inf

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """The models to serve: the demo model if none is named."""
        named = tuple(ModelSpec(model) if isinstance(model, str) else model for model in self.models)
        return named or (ModelSpec(None),)

    def isolated(self, spec: ModelSpec) -> bool:
        """True if the model's engine runs in its own process.

        With more than two cores, a process keeps HTTP work and the engine from competing for one interpreter lock. On
        one or two cores it gains nothing.
        """
        isolation = spec.isolation or self.isolation
        if isolation == "auto":
            return (os.cpu_count() or 1) > 2
        return isolation == "process"
