"""Request models of OpenAI's text endpoints. Numbers are strict: neither a string nor true is a number."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.openai import request_docs as docs
from millstream.api.openai.fields import parse_logit_bias, parse_prompts, parse_stop
from millstream.api.openai.grammars import StructuredRequest
from millstream.api.openai.messages import Message, parse_messages
from millstream.api.openai.tools import Tools, parse_tools
from millstream.types import Prompt, Sampling

_INT32 = 2**31 - 1
_INT64 = 2**63

Messages = Annotated[tuple[Message, ...], PlainValidator(parse_messages), WithJsonSchema(docs.MESSAGES)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts), WithJsonSchema(docs.PROMPTS)]
Stop = Annotated[tuple[str, ...], PlainValidator(parse_stop), WithJsonSchema(docs.STOP)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(parse_logit_bias), WithJsonSchema(docs.BIAS)]
ToolList = Annotated[Tools, PlainValidator(parse_tools), WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[object, WithJsonSchema(docs.TOOL_CHOICE)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Limit = Annotated[int, Field(ge=1, le=_INT32)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(
        strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_stream_options
    )

    include_usage: bool = False
    """End the stream with a chunk that has the token counts."""


class TextRequest(StructuredRequest):
    """Parameters of both endpoints. An optional parameter that is null counts as not given."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=docs.complete_request)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 always picks the most likely token; higher values are more varied."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] = 0
    """Sample from this many of the most likely tokens. 0 or -1 disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Exclude tokens whose probability is below this fraction of the most likely token's."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The same seed and parameters sample the same tokens. Default: a random seed."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Above 1: tokens that are in the prompt or the output already become less likely, by division."""
    presence_penalty: Penalty = 0.0
    """Above 0: tokens that were generated before become less likely, by a fixed amount."""
    frequency_penalty: Penalty = 0.0
    """Above 0: tokens that were generated before become less likely, with each occurrence."""
    logit_bias: LogitBias = ()
    """Added to the logits of tokens, by token id: -100 bans a token, 100 all but forces it."""
    max_tokens: Limit | None = None
    """Maximum number of tokens per completion."""
    max_completion_tokens: Limit | None = None
    """The newer name of max_tokens."""
    stop: Stop = ()
    """Stop strings: the completion ends before the first of them."""
    ignore_eos: bool = False
    """Continue past the end-of-text token, up to the token limit."""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of completions per prompt."""
    stream: bool = False
    """Send the completion as server-sent events while it is generated."""
    stream_options: StreamOptions = StreamOptions()
    """Options of a stream. They have no effect without stream."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log-probability of each token of the prompt, and this many top tokens. Not with stream."""
    user: str | None = None
    """Accepted; has no effect."""
    metadata: dict[str, object] | None = None
    """Accepted; has no effect."""
    safety_identifier: str | None = None
    """Accepted; has no effect."""
    prompt_cache_key: str | None = None
    """Accepted; has no effect: the prefix cache finds shared prefixes without a key."""
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
    """A conversation to continue."""

    messages: Messages
    """The conversation so far: system, developer, user, assistant and tool messages."""
    logprobs: bool = False
    """Return the log-probability of each token of the completion."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Also return this many of the most likely tokens at each position. Needs logprobs."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Passed to the model's chat template, for example {"enable_thinking": false}."""
    tools: ToolList = ()
    """Functions that the model may call."""
    tool_choice: ToolChoice = None
    """none: no call. auto: the model decides. required: at least one call. Or the function that must be called."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per completion."""
    reasoning_effort: Effort | None = None
    """How much to reason before the final output. none: no reasoning, where the model allows that."""
    thinking_budget: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    """Maximum number of reasoning tokens; after that, the reasoning is closed by force."""


class CompletionRequest(TextRequest):
    """A text to continue."""

    prompt: Prompts
    """The text, or its token ids; or a list of such prompts, which run in parallel."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log-probability of each token, and this many of the most likely tokens at each position."""
    max_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    """Maximum number of tokens per completion. 0 needs echo or prompt_logprobs: only the prompt is evaluated."""
    echo: bool = False
    """Begin each completion with its prompt, and with the log-probabilities of the prompt if logprobs is set."""
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Generate this many completions per prompt, and return the n with the highest log-probability per token. Not with
    stream."""
