"""POST /v1/rerank, /v2/rerank and /rerank, in Cohere's and Jina's shape; POST /v1/score and /score, in vLLM's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from millstream.api.body import read_body, validated
from millstream.api.error_docs import SERVICE
from millstream.api.openai import docs
from millstream.api.openai.encoded import EncodedResponse
from millstream.api.openai.rerank_schema import (
    RERANK_EXAMPLES,
    RERANK_IGNORED,
    SCORE_EXAMPLES,
    SCORE_IGNORED,
    RankedList,
    RerankBody,
    ScoreBody,
    ScoreList,
)
from millstream.api.openapi import documented
from millstream.api.params import supported
from millstream.api.response import Responder
from millstream.errors import BadRequest
from millstream.types import RerankRequest, Scores

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")

_RERANK = documented(
    RankedList,
    "The documents in order, the best first.",
    errors=docs.ERRORS.references(SERVICE),
    body=RerankBody,
    examples=RERANK_EXAMPLES,
)
_SCORE = documented(
    ScoreList,
    "A score for each pair, in their order.",
    errors=docs.ERRORS.references(SERVICE),
    body=ScoreBody,
    examples=SCORE_EXAMPLES,
)


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(tags=["rerank"], default_response_class=Response)

    async def rerank(request: Request) -> Response:
        body = await read_body(request, _rerank_body)
        pairs = tuple((body.query, document) for document in body.documents)
        asked = RerankRequest(body.model, pairs, body.instruction, body.max_tokens_per_doc)
        return _respond(responder, asked, lambda scores: _ranked(body, scores))

    async def score(request: Request) -> Response:
        body = await read_body(request, _score_body)
        asked = RerankRequest(body.model, _pairs(body))
        return _respond(responder, asked, _scored)

    for path in RERANK_PATHS:
        first = path == RERANK_PATHS[0]
        router.add_api_route(
            path, rerank, methods=["POST"], summary="Order documents", openapi_extra=_RERANK, include_in_schema=first
        )
    for path in SCORE_PATHS:
        first = path == SCORE_PATHS[0]
        router.add_api_route(
            path, score, methods=["POST"], summary="Score pairs of texts", openapi_extra=_SCORE, include_in_schema=first
        )
    return router


def _respond(responder: Responder, asked: RerankRequest, render: Callable[[Scores], bytes]) -> Response:
    encoding = responder.services.encoding
    return EncodedResponse(lambda: encoding.score(asked), render, write_timeout=responder.write_timeout)


def _rerank_body(body: dict[str, object]) -> RerankBody:
    return validated(RerankBody, supported(body, RerankBody.model_fields, {}, RERANK_IGNORED))


def _score_body(body: dict[str, object]) -> ScoreBody:
    return validated(ScoreBody, supported(body, ScoreBody.model_fields, {}, SCORE_IGNORED))


def _pairs(body: ScoreBody) -> tuple[tuple[str, str], ...]:
    first, second = body.text_1, body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise BadRequest(
            f"text_1 has {len(first)} texts and text_2 has {len(second)}: text_1 must have one, or as many as text_2.",
            param="text_1",
        )
    return tuple(zip(first, second, strict=True))


def _ranked(body: RerankBody, scores: Scores) -> bytes:
    order = sorted(range(len(scores.values)), key=lambda index: -scores.values[index])
    results = []
    for index in order[: body.top_n]:
        result: dict[str, object] = {"index": index, "relevance_score": scores.values[index]}
        if body.return_documents:
            result["document"] = {"text": body.documents[index]}
        results.append(result)
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": scores.prompt_tokens}}
    return orjson.dumps(
        {"id": _id("rerank"), "model": scores.model, "results": results, "usage": _usage(scores), "meta": meta}
    )


def _scored(scores: Scores) -> bytes:
    data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores.values)]
    return orjson.dumps(
        {
            "id": _id("score"),
            "object": "list",
            "created": int(time.time()),
            "model": scores.model,
            "data": data,
            "usage": _usage(scores),
        }
    )


def _usage(scores: Scores) -> dict[str, int]:
    return {"prompt_tokens": scores.prompt_tokens, "total_tokens": scores.prompt_tokens}


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
