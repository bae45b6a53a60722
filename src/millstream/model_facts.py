"""What the server knows of a model: facts that its engine reports once it is loaded, and the card that clients see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from millstream.speech_types import Voice

LoadPhase = Literal["starting", "downloading", "reading weights", "warming up"]
"""What a load does: find and check files; download them; read, convert and evaluate weights; choose a layout, compile
kernels and calibrate."""

LEAST_TOKENS = 256
"""Tokens that a model must be able to hold to be useful."""


MARGIN = 0.1
"""Share of a device's memory that is left to activations, to MLX and to other programs, if nobody gave a budget."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is."""

    phase: LoadPhase = "starting"
    share: float = 0.0
    """Of the phase, from 0 to 1. It begins anew with each phase."""
    done_bytes: int = 0
    """Of a download; 0 in other phases."""
    total_bytes: int = 0


class ModelFacts(Protocol):
    """What an engine of any kind reports of its model."""

    @property
    def capacity(self) -> int:
        """Requests that the engine runs at the same time."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the log."""
        ...

    @property
    def summary(self) -> str:
        """The figures of this kind of model, for one line of the log."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixSizes:
    """The bytes of a cached prefix."""

    token: int
    """Per token, in layers that can continue from any token."""
    states: tuple[tuple[int, int], ...] = ()
    """The state of each other layer: (tokens beyond which it no longer grows, bytes per token)."""

    def state(self, tokens: int) -> int:
        """The size of a checkpoint after so many tokens."""
        return sum(min(tokens, limit) * size for limit, size in self.states)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a short run at load measured on this device with this model. Plain data: it crosses to other processes."""

    chunks: tuple[tuple[int, float], ...]
    """(tokens, seconds) of a prefill chunk while no row decodes, shortest first."""
    steps: tuple[tuple[int, float], ...]
    """(rows, seconds) of a decode step, fewest rows first."""
    save_seconds: float = 0.0
    """The fixed cost of saving a prefix to the prefix cache."""
    save_seconds_per_byte: float = 0.0
    workspace_bytes: int = 0
    """Memory beside weights and KV cache at the peak of the longest chunk. MLX counts per process, so work of another
    engine in the same process is in it."""
    depth_cost: float = 0.0
    """By how much a prompt token costs more for each token before it, relative to the first; 0 if not measured."""
    passes: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of a pass over whole short prompts while no row decodes, fewest first; empty if the backend
    does not compute a pass over several steps while rows decode."""
    together: tuple[int, int, float] | None = None
    """(prompts, tokens of each, seconds) of a pass that several prompts share; None if that was not measured."""
    verifying: tuple[tuple[int, int, float], ...] = ()
    """(rows, tokens per row, seconds) of passes that verify drafts; empty if nothing drafts, or there was no time."""


@dataclass(frozen=True, slots=True)
class SpecPrefillFacts:
    """How prompts may be read in part: see `engine/generation/sparse_prompt.py`."""

    share: float
    """Of the tokens that the prefix cache does not hold, how many the target reads."""
    least: int
    """The fewest such tokens for which it is done."""
    cost: float
    """What a token costs the draft model, in tokens of the target."""


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """What a generation engine reports of its model."""

    context_length: int
    vocab_size: int
    """Rows of the embedding table that was loaded: token ids from this on have no embedding."""
    max_rows: int
    weight_bytes: int
    dtype: str
    device: str
    notes: tuple[str, ...] = ()
    prefix_sizes: PrefixSizes | None = None
    """The cost of caching a prefix; None if that is not possible."""
    identity: str = ""
    """What keys and values depend on besides tokens: the weights, their format, the KV cache format."""
    kv_bytes_per_token: int = 0
    """Measured: the KV cache of one token over all layers; 0 if it does not grow with the tokens."""
    media: tuple[str, ...] = ()
    """Input besides text: `image`, `video`, `audio`."""
    whole_media: bool = False
    """True if the tokens of an image attend to each other, so that one chunk must hold all of them."""
    calibration: Calibration | None = None
    """None if nothing was measured: `--disable calibration`, or a model so small that it does not matter."""
    workspace_bytes: int = 0
    """Memory that the longest chunk takes beside weights and KV cache; 0 if it was not measured."""
    kv_layout: Literal["classes", "rectangle"] = "classes"
    """How the rows' KV caches lie in memory: each in a buffer of its length class, or all as long as the longest."""
    shares_passes: bool = False
    """True if prompts share a pass from any offset, each with as much of it as the others."""
    share_tokens: int = 0
    """Rows with at least so many tokens in the prefix cache read them there; 0: they hold all of their tokens."""
    device_memory: int = 0
    """Bytes that the model may take of its device: its weights, and what was free when it was loaded. 0: unknown."""
    feature_bytes: int = 0
    """Size of its cache of encoded media."""
    drafters: tuple[str, ...] = ()
    """Who proposes drafts: `grammar`, `prediction`, `mtp`, `draft-model`, `prompt-lookup`. Empty: no speculation, and
    `notes` say why."""
    exact_passes: tuple[tuple[int, int], ...] = ()
    """(rows, tokens), in the order of rows: up to so many rows verify drafts in passes of up to so many tokens, of all
    rows together. Wider ones would give other numbers than plain steps, in their last bits. Empty: any number."""

    def widest_pass(self, rows: int) -> int | None:
        """The most tokens of a pass of so many rows; None: any number."""
        if not self.exact_passes:
            return None
        return next((tokens for most, tokens in self.exact_passes if rows <= most), 0)

    context_reason: str = ""
    """If the context was cut: the model's own limit and why there is less, as a sentence for errors."""
    spec_prefill: SpecPrefillFacts | None = None
    """None: every prompt is read as a whole."""

    @property
    def capacity(self) -> int:
        return self.max_rows

    @property
    def summary(self) -> str:
        return (
            f"{self.dtype} weights; {self.kv_bytes_per_token} bytes of KV cache per token; "
            f"context {self.context_length}, {self.max_rows} rows"
        )

    def memory_bound(self, granted: int | None) -> int | None:
        """Bytes for weights and caches together: as granted, else what the device has. None if that is unknown."""
        if granted is not None or not self.device_memory:
            return granted
        return int((1 - MARGIN) * self.device_memory)

    def tokens_in(self, granted: int | None, prefix_cache: int = 0) -> int | None:
        """How many tokens' worth of KV cache all rows together may take, if `granted` bytes are for weights and caches
        and `prefix_cache` of them for the prefix cache. None: no bound.

        Of a rectangle, a quarter is kept for rows that exist twice while they join, and half of the rest on a GPU,
        which has up to twice as many slots as rows. For length classes, `KvBudget` counts such copies.
        """
        bound = self.memory_bound(granted)
        if bound is None or not self.kv_bytes_per_token:
            return None
        free = bound - prefix_cache - self.weight_bytes - self.workspace_bytes - self.feature_bytes - self._row_states
        if self.kv_layout == "rectangle":
            free = int((0.75 if self.device.startswith("cpu") else 0.375) * free)
        return max(LEAST_TOKENS, free // self.kv_bytes_per_token)

    @property
    def windows(self) -> tuple[tuple[int, float], ...]:
        """Sliding windows, and their layers' part of `kv_bytes_per_token`."""
        states = () if self.prefix_sizes is None or not self.kv_bytes_per_token else self.prefix_sizes.states
        bytes_of = {limit: 0 for limit, _ in states if limit > 1}
        for limit, size in states:
            if limit > 1:
                bytes_of[limit] += size
        return tuple((limit, size / self.kv_bytes_per_token) for limit, size in bytes_of.items())

    @property
    def _row_states(self) -> int:
        """Bytes of the recurrent states of all rows. They do not grow with the tokens."""
        states = () if self.prefix_sizes is None else self.prefix_sizes.states
        return self.max_rows * sum(size for limit, size in states if limit == 1)


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What an encoder engine reports of its model."""

    context_length: int
    """Most tokens of an input."""
    vocab_size: int
    """Rows of the embedding table that was loaded: token ids from this on have no embedding."""
    width: int
    """Numbers per vector."""
    weight_bytes: int
    dtype: str
    device: str
    batch_tokens: int
    """Tokens that one step should compute at most, padding included."""
    free_tokens: int = 0
    """Tokens that cost no more than the fixed cost of a step."""
    capacity: int = 32
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        return (
            f"{self.dtype} weights; {self.width} numbers per vector; at most {self.context_length} tokens per input; "
            f"batches of {self.batch_tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class SpeechFacts:
    """What a speech engine reports of its model."""

    sample_rate: int
    weight_bytes: int
    dtype: str
    device: str
    vocab_size: int = 0
    """Rows of the embedding table that was loaded, for models that read tokens. 0: it reads text."""
    voices: tuple[Voice, ...] = ()
    """The default first."""
    batch_pieces: int = 1
    """Pieces that one step may speak at most."""
    open_batches: int = 1
    """Batches that may take turns, step by step."""
    takes_speed: bool = True
    takes_instructions: bool = False
    needs_instructions: bool = False
    """It makes a voice from a description."""
    capacity: int = 32
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        return f"{self.dtype} weights; {len(self.voices)} voices; {self.sample_rate} samples per second"


@dataclass(frozen=True, slots=True)
class TranscriptionFacts:
    """What a transcription engine reports of its model."""

    window_seconds: float
    """The longest window of audio that it takes."""
    max_rows: int
    """Windows, of all requests, that run at the same time."""
    start_windows: int
    """Windows that begin in one step, at most."""
    weight_bytes: int
    dtype: str
    device: str
    languages: tuple[str, ...] = ()
    """Codes of the languages that it knows. Empty: its files do not say."""
    detects_language: bool = False
    translates: bool = False
    word_times: bool = False
    takes_prompt: bool = False
    capacity: int = 32
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        return f"{self.dtype} weights; {self.max_rows} windows of at most {self.window_seconds:g} s at once"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the files of a model say about it. A field is None if they do not say it, or were not read yet."""

    format: str | None = None
    """`gguf` or `safetensors`."""
    family: str | None = None
    parameters: int | None = None
    quantization: str | None = None
    context_length: int | None = None
    template: str | None = None
    capabilities: tuple[str, ...] = ()
    file_bytes: int | None = None
    """The size of its weights on disk."""


UNDESCRIBED = ModelDescription()


@dataclass(frozen=True, slots=True)
class DraftCount:
    """The drafts of one drafter."""

    drafter: str
    proposed: int
    """Tokens that were verified."""
    accepted: int
    """Of these, those that the model chose, too."""


@dataclass(frozen=True, slots=True)
class SpeculationCard:
    """Speculative decoding of a model since it was loaded."""

    drafters: tuple[str, ...]
    """All that it has, in order of preference."""
    passes: int = 0
    """Forward passes that verified drafts."""
    drafts: tuple[DraftCount, ...] = ()
    gain: float = 1.0
    """Of the latest such passes: tokens per second over those without drafts."""

    @property
    def proposed(self) -> int:
        return sum(each.proposed for each in self.drafts)

    @property
    def accepted(self) -> int:
        return sum(each.accepted for each in self.drafts)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as `/v1/models` shows it."""

    name: str
    created: int
    state: str
    aliases: tuple[str, ...] = ()
    progress: float | None = None
    """The share of `phase` that is done, from 0 to 1. None unless it is loading."""
    phase: LoadPhase | None = None
    """What the load does. None unless it is loading."""
    error: str | None = None
    isolation: str = "thread"
    pid: int | None = None
    thread: int | None = None
    pinned: bool = False
    memory_bytes: int = 0
    prefix_cache_bytes: int = 0
    """Of these, the prefix cache; its disk tier comes on top."""
    prefix_cache_disk_bytes: int = 0
    reserved_bytes: int | None = None
    """Its share of the memory budget, if there is one."""
    kv_bytes_per_token: int | None = None
    kv_tokens: int | None = None
    """Tokens that its running requests hold in the KV cache; None if it is not loaded or has none."""
    active: int = 0
    waiting: int = 0
    max_batch: int | None = None
    context_length: int | None = None
    restarts: int = 0
    capabilities: tuple[str, ...] = ()
    """What the model can do: `completion`, `tools`, `thinking`, `vision`, `audio`, `insert`; `embedding`; `rerank`;
    `transcription`, `translation`, `word_timestamps`; `speech`, `instructions`.
    Until it is loaded, what its files show of that."""
    dimensions: int | None = None
    """Numbers per vector, of an embedding model that is loaded."""
    languages: tuple[str, ...] = ()
    """Codes of the languages that a transcription model knows, once it is loaded."""
    format: str | None = None
    """Of its files: `gguf` or `safetensors`."""
    family: str | None = None
    """The architecture, such as `qwen2`."""
    parameters: int | None = None
    """The number of its weights."""
    quantization: str | None = None
    template: str | None = None
    """The source of its chat template."""
    file_bytes: int | None = None
    """The size of its weights on disk."""
    device: str | None = None
    """Where it runs, once it is loaded."""
    weight_bytes: int | None = None
    """The memory of its weights, once it is loaded."""
    notes: tuple[str, ...] = ()
    """How it runs, once it is loaded: which fast paths it got, and why not others."""
    speculation: SpeculationCard | None = None
    """None if it is not loaded, or does not speculate."""
    calibration: Calibration | None = None
    """What was measured when it was loaded."""
    last_used: float | None = None
    """When the latest request ended, in seconds since 1970; now, if one is running. None if it is not loaded."""
    expires: float | None = None
    """When it will be unloaded if no request comes, in seconds since 1970. None if it will not."""
