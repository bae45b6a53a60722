"""Plain data types that all layers share. They import the standard library only and have no behaviour of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal, TypeVar


class FinishReason(StrEnum):
    """Why a generation ended. The values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"


_Data = TypeVar("_Data")
_VALUES: dict[type[Any], Callable[[object], tuple[Any, ...]]] = {}
"""All fields of an object of this class, in order."""


def pickled_by_value(kind: type[_Data]) -> type[_Data]:
    """A decorator for dataclasses of two fields and more that cross to another process often: by its fields in order,
    an object costs a fraction of what a dataclass with slots costs."""

    def reduce(self: object) -> tuple[Any, ...]:
        own = type(self)  # which may be derived from `kind`
        if own not in _VALUES:
            _VALUES[own] = attrgetter(*(field.name for field in fields(own)))  # type: ignore[arg-type]
        return own, _VALUES[own](self)

    kind.__reduce__ = reduce  # type: ignore[method-assign]
    return kind


def quickly_made(kind: type[_Data]) -> type[_Data]:
    """A decorator for frozen dataclasses with slots of which there are some per token or many per request: frozen for
    the type checker alone. The `__init__` that dataclasses write for them gets around `__setattr__`: it takes ten times
    as long as one that assigns."""
    values: dict[str, Any] = {"MISSING": MISSING}
    arguments, lines = [], []
    for each in fields(kind):  # type: ignore[arg-type]
        assert each.init and not each.kw_only, "written for fields that are plain arguments"
        name, value = each.name, each.name
        if each.default_factory is not MISSING:
            values[f"make_{name}"] = each.default_factory
            arguments.append(f"{name}=MISSING")
            value = f"make_{name}() if {name} is MISSING else {name}"
        elif each.default is not MISSING:
            values[f"default_{name}"] = each.default
            arguments.append(f"{name}=default_{name}")
        else:
            arguments.append(name)
        lines.append(f"    self.{name} = {value}")
    exec("\n".join([f"def __init__(self, {', '.join(arguments)}):", *(lines or ["    pass"])]), values)
    values["__init__"].__qualname__ = f"{kind.__qualname__}.__init__"
    kind.__init__ = values["__init__"]  # type: ignore[method-assign]
    kind.__setattr__ = object.__setattr__  # type: ignore[method-assign]
    kind.__delattr__ = object.__delattr__  # type: ignore[method-assign]
    return kind


LEAST_TEMPERATURE = 1e-5
"""Below it a temperature is 0: it would choose the most likely token anyway, and logits divided by it overflow."""


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one row. The defaults are greedy, without truncation or penalties."""

    temperature: float = 0.0
    """Below `LEAST_TEMPERATURE` the row takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    def with_seed(self, seed: int) -> Sampling:
        """The same as `replace`, which takes ten times as long."""
        return Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            seed,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.logit_bias,
        )


SAMPLING_FIELDS = frozenset(field.name for field in fields(Sampling))


@dataclass(frozen=True, slots=True)
class Grammar:
    """Structured output: the grammar that a whole answer must match."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    """Clients may send `gbnf`; engines get it translated to `lark`."""
    source: str
    """The schema as JSON, the expression, or a grammar in llguidance's Lark dialect."""


@quickly_made
@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """How long the reasoning of an output may be, and how to tell what is reasoning."""

    tokens: int
    closing: tuple[int, ...]
    """The tokens that close it: the next ones of the output, whatever the model would choose."""
    formats: tuple[str, str]
    """The names of the model's tool-call format and reasoning format."""
    opened: bool
    """True if the prompt has opened the reasoning."""
    tools: bool
    """True if the output may have tool calls."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are markers of the formats, so part of the text."""


Kind = Literal["image", "audio", "video"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as plain data, in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Media:
    """An image, audio clip or video of a prompt, preprocessed for its model."""

    kind: Kind
    start: int
    """The position of its first token in the prompt."""
    length: int
    """The number of its tokens in the prompt."""
    digest: str
    """A hash of its contents and preprocessing: media with equal hashes have equal features."""
    tensors: tuple[tuple[str, Tensor], ...] = ()
    """The inputs of the model by name: `pixel_values`, `image_grid_thw`, ..."""


@quickly_made
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen token, and those of the most likely tokens at its position (best first)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """How many tokens were at least as likely, including itself. Known for prompts only."""


@pickled_by_value
@quickly_made
@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    reasoning_tokens: int = 0
    """Completion tokens that are reasoning."""
    accepted_prediction_tokens: int = 0
    """Tokens of drafts, by all drafters, that became completion tokens."""
    rejected_prediction_tokens: int = 0
    """Tokens of drafts that were verified in vain."""
    skipped_tokens: int = 0
    """Prompt tokens that the model has not read, since a draft model found them unimportant (SpecPrefill)."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio clip or video of a conversation, not yet fetched."""

    kind: Kind
    source: str
    """A URL or a data URI."""
    param: str
    """The path of its field in the request, for errors."""


@quickly_made
@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's chat template."""

    messages: tuple[dict[str, object], ...]
    """Content is a string or a list of parts: `text`, or a kind of media with the `MediaPart` as its `media`."""
    template_kwargs: dict[str, object] = field(default_factory=dict)
    continue_final: bool = False
    """True: the output continues the last message if that is an assistant message without calls. False: it is a new
    answer in any case."""

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """All media parts, in order."""
        contents = [content for message in self.messages if isinstance(content := message.get("content"), list)]
        parts = [part for content in contents for part in content if isinstance(part, dict)]
        return tuple(media for part in parts if isinstance(media := part.get("media"), MediaPart))


@quickly_made
@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    suffix: str | None = None
    """Text after the gap, for models that can fill in the middle. None: the output continues `text`."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    tokens: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


INPUT_PARAMETER = "input"
"""The one string parameter of a tool that takes free text."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a model may call, in OpenAI's format, validated."""

    tools: tuple[dict[str, Any], ...]
    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The function that must be called, with `required`."""
    parallel: bool = True
    """True if one answer may contain several calls."""
    allowed: frozenset[str] | None = None
    """Names that may be called; None for all. The prompt shows all tools, so it stays equal from turn to turn. Where a
    call is not required, calls of other tools are text."""
    input_grammars: tuple[tuple[str, Grammar], ...] = ()
    """For tools that take free text: the grammar of their one parameter, `INPUT_PARAMETER`, by tool name."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Function name to the JSON schema of its parameters."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


@quickly_made
@dataclass(frozen=True, slots=True)
class Thinking:
    """How much a model should reason before it answers."""

    effort: str | None = None
    """`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`. None: the model's default."""
    budget: int | None = None
    """Reasoning tokens, after which reasoning is closed by force. None: as `effort` implies."""


@quickly_made
@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request of any dialect: one model, one or more prompts, and `n` choices for each."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling = Sampling()
    seeded: bool = False
    n: int = 1
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    """The same for requests that set none, if the model has no default either."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's own."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """The output does not end by itself before it has this many tokens."""
    logprobs: int | None = None
    """None: no logprobs. 0: those of the chosen tokens. k: also those of the k most likely at each position."""
    grammar: Grammar | None = None
    best_of: int | None = None
    """Generate this many choices per prompt, and return the `n` with the highest mean logprob."""
    echo: bool = False
    """Each choice starts with its prompt, and its logprobs with those of the prompt."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the tokens of the prompts."""
    tools: ToolUse | None = None
    thinking: Thinking = Thinking()
    unset: frozenset[str] = frozenset()
    """Fields of `sampling` that the client did not set."""
    prediction: str = ""
    """What the client expects the answer to be, or most of it: a draft. It changes nothing but speed."""
    speculate: bool = True
    """False: decode token by token, whatever drafters the model has."""
    spec_prefill: bool | None = None
    """Whether a long prompt may be read in part, if the model does that (lossy). None: yes, unless it has tools."""


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A `TokenLogprob` with its tokens as text and bytes, for clients."""

    text: str
    data: bytes
    logprob: float | None
    """None for the first token of a prompt, which has no context."""
    top: tuple[tuple[str, bytes, float], ...] = ()
    offset: int = 0
    """Where it begins in the choice's text, an echoed prompt included. Parts of one character begin where it does;
    special tokens take no room, unless they were written in the prompt's text."""


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A prompt token, and the most likely tokens at its position, for clients."""

    options: tuple[tuple[int, str, float, int], ...] = ()
    """(id, text, logprob, rank) of the token itself, then of the others. Empty for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of the tool call with number `index` in its choice. The first part has an id and a name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    void: bool = False
    """The call turned out to be invalid: its earlier parts do not count, and its text is in the content."""


@quickly_made
@dataclass(frozen=True, slots=True)
class Delta:
    """A part of the choice with number `index` (prompt * n + choice). The last part has a finish reason.

    Within one delta the order is: reasoning, text, calls. If the model writes them in another order, there are several
    deltas, so a dialect that sends its output as a sequence of blocks needs to look at nothing else.
    """

    index: int
    text: str = ""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt: tuple[PromptToken, ...] = ()
    """The prompt's logprobs, if requested: all of them, in one delta per choice."""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    stop_string: str | None = None
    """The stop string that ended the choice, in its last delta. None if something else ended it."""

    @property
    def only_text(self) -> bool:
        """True for nearly all deltas: text and nothing else, which renderers have a short way for."""
        return not (
            self.finish_reason is not None or self.logprobs or self.reasoning or self.calls or self.prompt
        ) and bool(self.text)


@dataclass(frozen=True, slots=True)
class Truncation:
    """What becomes of an input that is too long: it is cut, or refused."""

    tokens: int | None = None
    """Cut inputs to so many tokens. None: to what the model takes."""
    keep_end: bool = False
    """Cut the beginning off, not the end."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for embeddings, from any dialect. Each input is a text or its tokens."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    """Cut vectors to this size, and normalise them again."""
    input_type: str | None = None
    """`query` or `document`: add the model's prompt for it, if it has one."""
    prompt_name: str | None = None
    """Add the model's prompt of this name."""
    truncation: Truncation | None = None
    """None: refuse inputs that are too long."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of a request, in the order of its inputs."""

    model: str
    values: bytes
    """32-bit floats of this machine, one vector after the other."""
    width: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A request to score texts against each other, from any dialect."""

    model: str
    pairs: tuple[tuple[str, str], ...]
    """Query and document."""
    instruction: str | None = None
    """What makes a document relevant, for models that take it."""
    max_tokens_per_document: int | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """A probability for each pair of a request, in their order."""

    model: str
    values: tuple[float, ...]
    prompt_tokens: int
