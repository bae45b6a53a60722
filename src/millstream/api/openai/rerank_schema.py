"""Requests and responses of the rerank routes (Cohere's and Jina's shape) and of /v1/score (vLLM's)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from millstream.api.numbers import Whole
from millstream.api.request_docs import Schema, complete_body
from millstream.api.response_schema import ABSENT, ResponseSchema
from millstream.errors import BadRequest

MAX_DOCUMENTS = 2048
RERANK_IGNORED = (
    "user",
    "priority",
    "truncation",
    "truncate",
    "rank_fields",
    "max_chunks_per_doc",
    "return_embeddings",
)
SCORE_IGNORED = ("user", "priority", "encoding_format")

_TEXT: Schema = {"type": "string"}
_DOCUMENT: Schema = {"anyOf": [_TEXT, {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}]}
_DOCUMENTS: Schema = {"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": MAX_DOCUMENTS}
_TEXTS: Schema = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_DOCUMENTS}],
}


def _documents(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_DOCUMENTS:
        raise BadRequest(f"documents must be a list of 1 to {MAX_DOCUMENTS} texts.", param="documents")
    return tuple(_document(index, each) for index, each in enumerate(value))


def _document(index: int, value: object) -> str:
    match value:
        case str(text) | {"text": str(text)}:
            return text
        case _:
            path = f"documents[{index}]"
            raise BadRequest(f"{path} must be a text, or an object with a text.", param=path)


def _texts(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_DOCUMENTS:
        raise BadRequest(f"text_1 and text_2 must each be a text or a list of 1 to {MAX_DOCUMENTS} texts.")
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest("text_1 and text_2 must each be a text or a list of texts.")
    return tuple(texts)


def _complete_rerank(schema: Schema) -> None:
    complete_body(schema, {}, RERANK_IGNORED)


def _complete_score(schema: Schema) -> None:
    complete_body(schema, {}, SCORE_IGNORED)


class RerankBody(BaseModel):
    """Documents to order by how well they answer a query."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete_rerank)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    query: str
    documents: Annotated[tuple[str, ...], PlainValidator(_documents), WithJsonSchema(_DOCUMENTS)]
    """Texts, or objects with a text. Those that are too long are cut."""
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    """Return the best so many. Default: all."""
    return_documents: bool = False
    """Return the texts as well."""
    max_tokens_per_doc: Annotated[Whole, Field(ge=1)] | None = None
    """Cut documents to so many tokens. Default: to what fits."""
    instruction: str | None = None
    """What makes a document relevant, for models that take it."""


class ScoreBody(BaseModel):
    """Pairs of texts to score: one against many, or each against the one at its place."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete_score)

    model: str = ""
    """The model's id or alias, as listed by /v1/models. Default: the server's first model."""
    text_1: Annotated[tuple[str, ...], PlainValidator(_texts), WithJsonSchema(_TEXTS)]
    """One text, or as many as text_2 has."""
    text_2: Annotated[tuple[str, ...], PlainValidator(_texts), WithJsonSchema(_TEXTS)]
    """One text, or several."""


class RerankedDocument(ResponseSchema):
    text: str


class Ranked(ResponseSchema):
    index: int
    """Its place among the documents of the request."""
    relevance_score: float
    """A probability."""
    document: RerankedDocument = ABSENT


class RerankUsage(ResponseSchema):
    prompt_tokens: int
    total_tokens: int


class RankedList(ResponseSchema):
    id: str
    model: str
    results: list[Ranked]
    """The best first."""
    usage: RerankUsage
    meta: dict[str, Any]
    """What Cohere's clients read."""


class Score(ResponseSchema):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(ResponseSchema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: RerankUsage


RERANK_EXAMPLES: dict[str, Any] = {
    "documents": {
        "summary": "Two documents",
        "value": {"query": "What drives a mill?", "documents": ["Water drives the wheel.", "Bread is baked."]},
    }
}
SCORE_EXAMPLES: dict[str, Any] = {
    "pair": {"summary": "One pair", "value": {"text_1": "What drives a mill?", "text_2": "Water drives the wheel."}}
}
