"""Request models of OpenAI's text endpoints. Numbers are strict: neither a string nor true is a number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.numbers import Whole
from millstream.api.openai import request_docs as docs
from millstream.api.openai.fields import (
    parse_logit_bias,
    parse_prediction,
    parse_prompts,
    parse_stop,
    parse_stop_token_ids,
)
from millstream.api.openai.grammars import StructuredRequest
from millstream.api.openai.messages import Message, parse_messages
from millstream.api.openai.thinking import ThinkingRequest
from millstream.api.openai.tools import Choice, ToolSet, parse_choice, parse_function_call, parse_functions, parse_tools
from millstream.types import Prompt, Sampling

_INT32 = 2**31 - 1
_INT64 = 2**63

Messages = Annotated[tuple[Message, ...], PlainValidator(parse_messages), WithJsonSchema(docs.MESSAGES)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts), WithJsonSchema(docs.PROMPTS)]
Stop = Annotated[tuple[str, ...], PlainValidator(parse_stop), WithJsonSchema(docs.STOP)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(parse_logit_bias), WithJsonSchema(docs.BIAS)]
StopTokens = Annotated[tuple[int, ...], PlainValidator(parse_stop_token_ids), WithJsonSchema(docs.STOP_TOKENS)]
Prediction = Annotated[str, PlainValidator(parse_prediction), WithJsonSchema(docs.PREDICTION)]
ToolList = Annotated[ToolSet, PlainValidator(parse_tools), WithJsonSchema(docs.TOOLS)]
ToolChoice = Annotated[Choice, PlainValidator(parse_choice), WithJsonSchema(docs.TOOL_CHOICE)]
Functions = Annotated[ToolSet, PlainValidator(parse_functions), WithJsonSchema(docs.FUNCTIONS)]
FunctionCall = Annotated[Choice, PlainValidator(parse_function_call), WithJsonSchema(docs.FUNCTION_CALL)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
NOT_ZERO: dict[str, Any] = {"not": {"const": 0}}
Limit = Annotated[Whole, Field(ge=-1, le=_INT32, json_schema_extra=NOT_ZERO)]
"""-1 stands for "no limit"."""
Top = Annotated[Whole, Field(ge=0, le=20)]

_MIN_TOP_P = 1e-9
"""What a `top_p` of 0 means: the most likely token only."""


def _switch(value: object) -> object:
    """For `logprobs`, which is a number in one API and a flag in the other: 0 switches it off."""
    return False if type(value) is int and value == 0 else value


def _number(value: object) -> object:
    return None if value is False else value


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
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Sample from the most likely tokens that together reach this probability. 0: from the most likely one."""
    top_k: Annotated[Whole, Field(ge=-1, le=_INT32)] = 0
    """Sample from this many of the most likely tokens. 0 or -1 disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Exclude tokens whose probability is below this fraction of the most likely token's."""
    seed: Annotated[Whole, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The same seed and parameters sample the same tokens. -1, as without it: a random seed."""
    repetition_penalty: RepetitionPenalty | None = None
    """Above 1: tokens that are in the prompt or the output already become less likely, by division. Default: 1."""
    repeat_penalty: RepetitionPenalty | None = None
    """llama.cpp's name for repetition_penalty."""
    presence_penalty: Penalty = 0.0
    """Above 0: tokens that were generated before become less likely, by a fixed amount."""
    frequency_penalty: Penalty = 0.0
    """Above 0: tokens that were generated before become less likely, with each occurrence."""
    logit_bias: LogitBias = ()
    """Added to the logits of tokens, by token id: -100 bans a token, 100 all but forces it."""
    max_tokens: Limit | None = None
    """Maximum number of tokens per completion. -1: no limit but the context length."""
    max_completion_tokens: Limit | None = None
    """The newer name of max_tokens."""
    n_predict: Limit | None = None
    """llama.cpp's name for max_tokens."""
    min_tokens: Annotated[Whole, Field(ge=0, le=_INT32)] = 0
    """The completion does not end by itself before it has this many tokens. Stop strings count from there on."""
    stop: Stop = ()
    """Stop strings: the completion ends before the first of them."""
    stop_token_ids: StopTokens = ()
    """Token ids that end the completion, besides the model's own."""
    ignore_eos: bool = False
    """Continue past the end-of-text token, up to the token limit."""
    n: Annotated[Whole, Field(ge=1, le=128)] = 1
    """Number of completions per prompt."""
    stream: bool = False
    """Send the completion as server-sent events while it is generated."""
    stream_options: StreamOptions = StreamOptions()
    """Options of a stream. They have no effect without stream."""
    prompt_logprobs: Top | None = None
    """Return the log-probability of each token of the prompt, and this many top tokens. Not with stream."""
    prediction: Prediction = ""
    """What the completion will mostly be, such as the file that it edits: {"type": "content", "content": text}.
    Where it is right, tokens come several at a time. It never changes the completion."""
    speculation: bool = True
    """False: no speculative decoding for this request. It changes how fast tokens come, never which."""
    spec_prefill: bool | None = None
    """Where the server reads long prompts in part (--spec-prefill): false to read all of this one, true to read it in
    part even if it has tools. Without it, prompts with tools are read as a whole."""

    @property
    def repetition(self) -> float | None:
        """The repetition penalty, under either name. None if it is not given."""
        return self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=max(self.top_p, _MIN_TOP_P),
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed or 0,
            repetition_penalty=1.0 if self.repetition is None else self.repetition,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
        )


class ChatRequest(TextRequest, ThinkingRequest):
    """A conversation to continue."""

    messages: Messages
    """The conversation so far: system, developer, user, assistant and tool messages."""
    logprobs: Annotated[bool, BeforeValidator(_switch), WithJsonSchema(docs.SWITCH)] = False
    """Return the log-probability of each token of the completion."""
    top_logprobs: Top = 0
    """Also return this many of the most likely tokens at each position. Needs logprobs."""
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    """Passed to the model's chat template, for example {"enable_thinking": false}."""
    continue_final_message: bool = False
    """Continue the last message, which must be an assistant's, instead of answering it."""
    add_generation_prompt: bool = True
    """False only together with continue_final_message, which implies it."""
    tools: ToolList | None = None
    """Functions that the model may call, and custom tools, which take free text."""
    tool_choice: ToolChoice | None = None
    """none: no call. auto: the model decides. required: at least one call. Or the function that must be called, or the
    tools that may be called."""
    functions: Functions | None = None
    """The older form of tools. Calls come back in its form, too."""
    function_call: FunctionCall | None = None
    """The older form of tool_choice."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per completion."""


class CompletionRequest(TextRequest):
    """A text to continue."""

    prompt: Prompts
    """The text, or its token ids; or a list of such prompts, which run in parallel."""
    suffix: str = ""
    """Text after the completion, for models that can fill in the middle."""
    logprobs: Annotated[Top | None, BeforeValidator(_number), WithJsonSchema(docs.NUMBER_OR_OFF)] = None
    """Return the log-probability of each token, and this many of the most likely tokens at each position."""
    max_tokens: Annotated[Whole, Field(ge=-1, le=_INT32)] | None = None
    """Maximum number of tokens per completion. -1: no limit but the context length. 0 needs echo or prompt_logprobs:
    only the prompt is evaluated."""
    echo: bool = False
    """Begin each completion with its prompt, and with the log-probabilities of the prompt if logprobs is set."""
    best_of: Annotated[Whole, Field(ge=1, le=128)] | None = None
    """Generate this many completions per prompt, and return the n with the highest log-probability per token. Not with
    stream."""
