"""Plain data that every floor shares. No behaviour beyond simple derivations, no imports above the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

LEAST_TOKENS = 256
"""What a model must be able to hold to be of any use."""


class FinishReason(StrEnum):
    """Why a generation ended. The values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row picks its tokens. Neutral by default: greedy, nothing cut, nothing penalised."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, from its first token to its last."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    """The schema as JSON, the expression, or a grammar in llguidance's Lark dialect."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as plain data, in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a sound or a video of a prompt, as its model's processor prepared it."""

    kind: Literal["image", "audio", "video"]
    start: int
    """The place of its first token in the prompt."""
    length: int
    """How many places it takes, from its first token to its last."""
    digest: str
    """A hash of everything that it is made of: equal media have equal features."""
    tensors: tuple[tuple[str, Tensor], ...] = ()
    """What the model takes, by name: `pixel_values`, `image_grid_thw`, ..."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen token, and of the most likely ones at its place (best first)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request read and wrote."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those that were not computed again."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine says of its model once it is loaded."""

    context_length: int
    vocab_size: int
    max_rows: int
    weight_bytes: int
    dtype: str
    device: str
    notes: tuple[str, ...] = ()
    keeps_prefixes: bool = False
    """Whether its caches can be cut into blocks and put together again."""
    kv_bytes_per_token: int = 0
    """Measured: what one token's keys and values take over all layers; 0 if that does not grow with the tokens."""
    media: tuple[str, ...] = ()
    """What it takes besides text: `image`, `video`, `audio`."""
    whole_media: bool = False
    """Whether the tokens of an image attend to each other, so that they must be read in one chunk."""

    def tokens_in(self, granted: int | None) -> int | None:
        """How many tokens the rows may hold together, with so many bytes for weights and caches. None: no bound.

        A quarter is kept for rows that exist twice while they join, and half of the rest on a GPU, which has up to
        twice as many slots as rows.
        """
        if granted is None or not self.kv_bytes_per_token:
            return None
        share = 0.75 if self.device.startswith("cpu") else 0.375
        return max(LEAST_TOKENS, int(share * (granted - self.weight_bytes)) // self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation still to be rendered by the model's template."""

    messages: tuple[dict[str, object], ...]
    template_kwargs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What any dialect asks of the service: one model, one or more prompts, `n` answers to each."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling = Sampling()
    seeded: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none wanted. 0: those of the chosen tokens. k: also the k most likely at each place."""
    grammar: Grammar | None = None
    unset: frozenset[str] = frozenset()
    """Fields of `sampling` that the client left to the server."""


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A `TokenLogprob` with its tokens as text and bytes, as clients see it."""

    text: str
    data: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer with number `index` (prompt-major: prompt * n + choice). The last has a reason."""

    index: int
    text: str = ""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A line of the model list."""

    name: str
    created: int
    state: str
    aliases: tuple[str, ...] = ()
    progress: float | None = None
    error: str | None = None
    isolation: str = "thread"
    pid: int | None = None
    thread: int | None = None
    pinned: bool = False
    memory_bytes: int = 0
    reserved_bytes: int | None = None
    """What it holds of the memory budget, if there is one."""
    kv_bytes_per_token: int | None = None
    active: int = 0
    waiting: int = 0
    max_batch: int | None = None
    context_length: int | None = None
    restarts: int = 0
