"""Plain data that every floor shares. No behaviour beyond simple derivations, no imports above the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal


class FinishReason(StrEnum):
    """Why a generation ended. The values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"


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

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    """`gbnf` is what clients may send; an engine gets it as `lark`."""
    source: str
    """The schema as JSON, the expression, or a grammar in llguidance's Lark dialect."""


Kind = Literal["image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as plain data, in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a sound or a video of a prompt, as its model's processor prepared it."""

    kind: Kind
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
    rank: int | None = None
    """How many tokens were at least as likely there, itself among them. Known of prompts only."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request read and wrote."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those that were not computed again."""
    reasoning_tokens: int = 0
    """Of the completion's, those of thoughts."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, a sound or a video of a conversation, not yet fetched."""

    kind: Kind
    source: str
    """A URL or a data URI."""
    param: str
    """Where it stands in the request."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation still to be rendered by the model's template."""

    messages: tuple[dict[str, object], ...]
    """Content is a string or a list of parts: `text`, or a kind of media with the `MediaPart` as its `media`."""
    template_kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """All of it, in order."""
        contents = [content for message in self.messages if isinstance(content := message.get("content"), list)]
        parts = [part for content in contents for part in content if isinstance(part, dict)]
        return tuple(media for part in parts if isinstance(media := part.get("media"), MediaPart))


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions that a model may call, as OpenAI writes them and checked."""

    tools: tuple[dict[str, Any], ...]
    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The one that must be called, with `required`."""
    parallel: bool = True
    """Whether one answer may call several times."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of each function's parameters, by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much a model should think before it answers."""

    effort: str | None = None
    """`none`, `minimal`, `low`, `medium`, `high` or `xhigh`. None: as the model likes."""
    budget: int | None = None
    """Tokens, after which the thoughts are closed by force. None: what the effort says."""


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
    best_of: int | None = None
    """Write so many answers to each prompt, and give the `n` whose tokens are likeliest on average."""
    echo: bool = False
    """An answer begins with its prompt; with `logprobs`, its log-probabilities do as well."""
    prompt_logprobs: int | None = None
    """As `logprobs`, of the tokens of the prompts."""
    tools: ToolUse | None = None
    thinking: Thinking = Thinking()
    unset: frozenset[str] = frozenset()
    """Fields of `sampling` that the client left to the server."""


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A `TokenLogprob` with its tokens as text and bytes, as clients see it."""

    text: str
    data: bytes
    logprob: float | None
    """None for the first token of a prompt: nothing stands before it."""
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt as clients see it, first, and after it the likeliest tokens at its place."""

    options: tuple[tuple[int, str, float, int], ...] = ()
    """Of each its id, text, log-probability and rank. None at all for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call with number `index` of its answer. The first has an id and a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    void: bool = False
    """The call came to nothing: what was told of it does not count, and its text is in the content."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer with number `index` (prompt-major: prompt * n + choice). The last has a reason."""

    index: int
    text: str = ""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt: tuple[PromptToken, ...] = ()
    """Where the log-probabilities of the prompt are wanted: in one delta a choice, all of them."""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    stop_string: str | None = None
    """The stop string that ended the choice, in its last delta. None if something else ended it."""
