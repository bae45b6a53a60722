"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import functools
import sys

import numpy as np
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body, validated
from millstream.api.error_docs import SERVICE
from millstream.api.openai import docs
from millstream.api.openai.embedding_schema import EXAMPLES, IGNORED, UNSUPPORTED, EmbeddingList, EmbeddingsRequest
from millstream.api.openai.encoded import EncodedResponse
from millstream.api.openapi import documented
from millstream.api.params import supported
from millstream.api.response import Responder
from millstream.errors import BadRequest
from millstream.types import EmbeddingRequest, Embeddings, Truncation

LARGE = 2**16
"""Numbers that are rendered on the event loop: some milliseconds."""

_DOCS = documented(
    EmbeddingList,
    "One vector for each input, in their order.",
    errors=docs.ERRORS.references(SERVICE),
    body=EmbeddingsRequest,
    examples=EXAMPLES,
)


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["embeddings"], default_response_class=Response)

    @router.post("/embeddings", summary="Embed texts", openapi_extra=_DOCS)
    async def embeddings(request: Request) -> Response:
        parsed = await read_body(request, _parse)
        asked = embedding_request(parsed)
        return EncodedResponse(
            lambda: responder.services.encoding.embed(asked),
            functools.partial(render, as_base64=parsed.encoding_format == "base64"),
            write_timeout=responder.write_timeout,
            is_large=lambda result: len(result.values) // 4 > LARGE,
        )

    return router


def _parse(body: dict[str, object]) -> EmbeddingsRequest:
    return validated(EmbeddingsRequest, supported(body, EmbeddingsRequest.model_fields, UNSUPPORTED, IGNORED))


def embedding_request(parsed: EmbeddingsRequest) -> EmbeddingRequest:
    return EmbeddingRequest(
        parsed.model,
        parsed.input,
        dimensions=parsed.dimensions,
        input_type=parsed.input_type,
        prompt_name=parsed.prompt_name,
        truncation=_truncation(parsed),
    )


def _truncation(parsed: EmbeddingsRequest) -> Truncation | None:
    tokens = parsed.truncate_prompt_tokens
    if tokens is None and not parsed.truncate:
        return None
    if tokens == 0:
        raise BadRequest("truncate_prompt_tokens must be above 0, or -1", param="truncate_prompt_tokens")
    return Truncation(tokens if tokens is not None and tokens > 0 else None, parsed.truncation_side == "left")


def render(result: Embeddings, as_base64: bool) -> bytes:
    vectors = np.frombuffer(result.values, np.float32).reshape(-1, result.width)
    if as_base64 and sys.byteorder == "big":
        vectors = vectors.astype("<f4")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if as_base64 else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens}
    body = {"object": "list", "data": data, "model": result.model, "usage": usage}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
