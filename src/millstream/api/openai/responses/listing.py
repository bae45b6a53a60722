"""Lists of input items, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import QueryParams

from millstream.errors import BadRequest

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
ORDERS = ("asc", "desc")


def whole_number(params: QueryParams, name: str) -> int | None:
    text = params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest(f"{name} must be a whole number.", param=name)
    return int(text)


def truth(params: QueryParams, name: str) -> bool:
    text = params.get(name, "false")
    if text not in ("true", "false"):
        raise BadRequest(f"{name} must be true or false.", param=name)
    return text == "true"


def page(items: Sequence[dict[str, Any]], params: QueryParams) -> dict[str, Any]:
    """One page of items: newest first, unless `order` is asc. `after` is the id of the last item of the page before."""
    limit = whole_number(params, "limit")
    limit = DEFAULT_LIMIT if limit is None else limit
    if not 1 <= limit <= MAX_LIMIT:
        raise BadRequest(f"limit must be from 1 to {MAX_LIMIT}.", param="limit")
    order = params.get("order", "desc")
    if order not in ORDERS:
        raise BadRequest(f"order must be one of {', '.join(ORDERS)}.", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = params.get("after")
    if after:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise BadRequest("after must be the id of an item of this response.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": len(ordered) > limit,
    }
