"""Requests and responses of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.numbers import Whole, token_ids
from millstream.api.request_docs import Schema, complete_body
from millstream.api.response_schema import ResponseSchema
from millstream.errors import BadRequest

MAX_INPUTS = 2048
_TEXT: Schema = {"type": "string"}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUTS: Schema = {
    "anyOf": [
        _TEXT,
        _TOKENS,
        {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}
UNSUPPORTED: dict[str, tuple[object, ...]] = {"messages": (), "normalize": (True,), "add_special_tokens": (True,)}
IGNORED = ("user", "priority", "metadata", "safety_identifier", "store")

Input = str | tuple[int, ...]


def parse_inputs(value: object) -> tuple[Input, ...]:
    """A string, a list of token ids, or a list of either."""
    if isinstance(value, list) and value and not set(map(type, value)) <= {int, float}:
        if len(value) > MAX_INPUTS:
            raise BadRequest(f"input has {len(value)} inputs; at most {MAX_INPUTS} are allowed.", param="input")
        return tuple(_input(item, f"input[{index}]") for index, item in enumerate(value))
    return (_input(value, "input"),)


def _input(value: object, path: str) -> Input:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and (tokens := token_ids(value)) is not None:
        return tokens
    expected = "a string or a non-empty list of token ids"
    if path == "input":
        expected += ", or a list of such inputs"
    raise BadRequest(f"{path} must be {expected}.", param=path)


def _complete(schema: Schema) -> None:
    complete_body(schema, UNSUPPORTED, IGNORED)


class EmbeddingsRequest(BaseModel):
    """Texts to embed."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    input: Annotated[tuple[Input, ...], PlainValidator(parse_inputs), WithJsonSchema(_INPUTS)]
    """A text, its token ids, or a list of texts or token ids."""
    dimensions: Annotated[Whole, Field(ge=1, le=2**20)] | None = None
    """Cut vectors to this size and normalise them again. Default: all that the model has."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: the bytes of 32-bit floats, little-endian."""
    input_type: str | None = None
    """`query` or `document`: adds the model's prompt for it, if it has one."""
    prompt_name: str | None = None
    """Adds the model's prompt of this name."""
    truncate_prompt_tokens: (
        Annotated[Whole, Field(ge=-1, le=2**31 - 1, json_schema_extra={"not": {"const": 0}})] | None
    ) = None
    """Cut longer inputs to so many tokens; -1: to what the model takes. Default: they are an error."""
    truncation_side: Literal["left", "right"] = "right"
    """Which end is cut off."""
    truncate: bool | None = None
    """True: the same as truncate_prompt_tokens -1."""


class Embedding(ResponseSchema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or their bytes in base64."""


class EmbeddingUsage(ResponseSchema):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseSchema):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


EXAMPLES: dict[str, Any] = {
    "text": {"summary": "One text", "value": {"input": "The mill stands by the stream."}},
    "texts": {
        "summary": "Several texts, in base64",
        "value": {"input": ["A mill.", "A stream."], "encoding_format": "base64"},
    },
}
