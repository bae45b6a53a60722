"""GET /v1/models and /v1/models/{id} in Anthropic's shape, for clients that send `anthropic-version`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from millstream.api.errors import json_response
from millstream.errors import BadRequest
from millstream.model_facts import ModelCard
from millstream.service.ports import ModelService

VERSION_HEADER = b"anthropic-version"
DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


class VersionedRoute(APIRoute):
    """Matches only requests with Anthropic's header: the default dialect has routes at the same paths."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if all(name != VERSION_HEADER for name, _ in scope["headers"]):
            return Match.NONE, {}
        return super().matches(scope)


def routes(service: ModelService) -> APIRouter:
    # A document has room for one operation per path and method, and these two belong to the default dialect.
    router = APIRouter(route_class=VersionedRoute, include_in_schema=False)

    @router.get("/v1/models")
    async def anthropic_models(request: Request) -> Response:
        page, has_more = _page(service.models(), request)
        return json_response(
            {
                "data": [_fields(card) for card in page],
                "has_more": has_more,
                "first_id": page[0].name if page else None,
                "last_id": page[-1].name if page else None,
            }
        )

    @router.get("/v1/models/{model:path}")
    async def anthropic_model(model: str) -> Response:
        return json_response(_fields(service.model(model)))

    return router


def _page(cards: Sequence[ModelCard], request: Request) -> tuple[Sequence[ModelCard], bool]:
    """Returns the models of the page, and whether there are more in its direction."""
    limit = _limit(request.query_params.get("limit"))
    after, before = request.query_params.get("after_id"), request.query_params.get("before_id")
    if before is not None:
        cards = cards[: _position(cards, before, "before_id")]
        return cards[-limit:], len(cards) > limit
    if after is not None:
        cards = cards[_position(cards, after, "after_id") + 1 :]
    return cards[:limit], len(cards) > limit


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_LIMIT
    if not (value.isascii() and value.isdigit() and len(value) <= 9) or not 1 <= int(value) <= MAX_LIMIT:
        raise BadRequest(f"limit must be an integer from 1 to {MAX_LIMIT}.", param="limit")
    return int(value)


def _position(cards: Sequence[ModelCard], name: str, param: str) -> int:
    for position, card in enumerate(cards):
        if card.name == name:
            return position
    raise BadRequest(f"{param} must be the id of a model of this server.", param=param)


def _fields(card: ModelCard) -> dict[str, object]:
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
    }
