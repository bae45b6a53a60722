"""The request bodies of OpenAI's text endpoints. Numbers are strict: a string is no number, and neither is true."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.openai import request_docs as docs
from millstream.api.openai.fields import read_logit_bias, read_prompts, read_stop
from millstream.api.openai.grammars import FormRequest
from millstream.api.openai.messages import Message, read_messages
from millstream.api.openai.tools import Tools, read_tools
from millstream.types import Prompt, Sampling

_INT32 = 2**31 - 1
_INT64 = 2**63

Messages = Annotated[tuple[Message, ...], PlainValidator(read_messages), WithJsonSchema(docs.MESSAGES)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(read_prompts), WithJsonSchema(docs.PROMPTS)]
Stop = Annotated[tuple[str, ...], PlainValidator(read_stop), WithJsonSchema(docs.STOP)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(read_logit_bias), WithJsonSchema(docs.BIAS)]
ToolList = Annotated[Tools, PlainValidator(read_tools), WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[object, WithJsonSchema(docs.TOOL_CHOICE)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Limit = Annotated[int, Field(ge=1, le=_INT32)]


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(
        strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_stream_options
    )

    include_usage: bool = False
    """End the stream with a chunk that counts the tokens."""


class TextRequest(FormRequest):
    """What both endpoints take. An optional parameter that is null counts as not given."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_request)

    model: str = ""
    """The model that answers, as listed by /v1/models. Left out: the server's first."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 picks the likeliest token every time; higher is more varied."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Pick among the likeliest tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] = 0
    """Pick among this many of the likeliest tokens. 0 or -1: no such limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The same seed and parameters sample the same tokens. Left out: different every time."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Over 1: tokens that stand in the text already become less likely, by division."""
    presence_penalty: Penalty = 0.0
    """Over 0: tokens that were generated already become less likely, once."""
    frequency_penalty: Penalty = 0.0
    """Over 0: tokens that were generated already become less likely, each time again."""
    logit_bias: LogitBias = ()
    """Added to the logits of tokens, by token id: -100 forbids one, 100 all but demands it."""
    max_tokens: Limit | None = None
    """At most this many tokens an answer."""
    max_completion_tokens: Limit | None = None
    """The newer name of max_tokens."""
    stop: Stop = ()
    """Ends an answer where one of these strings would begin."""
    ignore_eos: bool = False
    """Go on past the model's own end of text, up to the token limit."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """How many answers to each prompt."""
    stream: bool = False
    """Send the answer as server-sent events while it is written."""
    stream_options: StreamOptions = StreamOptions()
    """Of use with stream alone."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log-probability of each token of the prompt, and of this many of the likeliest. Not with stream."""
    user: str | None = None
    """Accepted; has no effect."""
    metadata: dict[str, object] | None = None
    """Accepted; has no effect."""
    safety_identifier: str | None = None
    """Accepted; has no effect."""
    prompt_cache_key: str | None = None
    """Accepted; has no effect: prompts that begin alike are found without a key."""
    prompt_cache_retention: str | None = None
    """Accepted; has no effect."""
    service_tier: str | None = None
    """Accepted; has no effect."""

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed or 0,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
        )


class ChatRequest(TextRequest):
    """A conversation to be continued."""

    messages: Messages
    """The conversation so far: system, developer, user, assistant and tool messages."""
    logprobs: bool = False
    """Return the log-probability of each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """And of this many of the likeliest tokens at each place. Needs logprobs."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Handed to the model's chat template, for example {"enable_thinking": false}."""
    tools: ToolList = ()
    """Functions that the model may call."""
    tool_choice: ToolChoice = None
    """none: call nothing. auto: as the model likes. required: some function. Or the one that must be called."""
    parallel_tool_calls: bool | None = None
    """False: at most one call an answer."""
    reasoning_effort: Effort | None = None
    """How much to think before the answer. none: not at all, where the model allows that."""
    thinking_budget: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    """At most this many tokens of thought; then the model must answer."""


class CompletionRequest(TextRequest):
    """A text to be continued."""

    prompt: Prompts
    """The text, or its token ids; or a list of such prompts, which are answered side by side."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log-probability of each token, and of this many of the likeliest at each place."""
    max_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    """At most this many tokens an answer. 0 with echo or prompt_logprobs: only look at the prompt."""
    echo: bool = False
    """Begin each answer with its prompt, and its log-probabilities if there are any."""
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Write this many answers to each prompt, and return the n whose tokens are likeliest. Not with stream."""
