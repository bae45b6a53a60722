"""Endpoints that are called without a search for their route."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import PlainTextResponse, Response

from millstream.api.direct_routes import DirectRoutes, direct_endpoints

router = APIRouter()


@router.post("/plain")
async def plain(request: Request) -> Response:
    return PlainTextResponse(f"direct {(await request.body()).decode()}")


@router.get("/named/{name}")
async def named(request: Request) -> Response:
    return PlainTextResponse("routed")


@router.get("/counted")
async def counted(request: Request, limit: int = 3) -> Response:
    return PlainTextResponse("routed")


@router.get("/data")
async def data(request: Request) -> dict[str, int]:
    return {"a": 1}


@router.get("/guarded", dependencies=[Depends(lambda: None)])
async def guarded(request: Request) -> Response:
    return PlainTextResponse("routed")


@router.get("/shared")
async def shared(request: Request) -> Response:
    return PlainTextResponse("routed")


@router.get("/shared")
async def also_shared(request: Request) -> Response:
    return PlainTextResponse("routed")


def answer(method: str, path: str) -> str:
    """What a request gets, where everything but direct routes answers "routed"."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"body", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    app = DirectRoutes(PlainTextResponse("routed"), router.routes)
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    return b"".join(message.get("body", b"") for message in sent).decode()


def test_only_plain_endpoints_are_direct() -> None:
    assert set(direct_endpoints(router.routes)) == {("POST", "/plain")}


def test_a_direct_endpoint_gets_its_request() -> None:
    assert answer("POST", "/plain") == "direct body"


def test_all_else_goes_to_the_router() -> None:
    assert answer("GET", "/plain") == "routed"
    assert answer("GET", "/shared") == "routed"
    assert answer("POST", "/plain/") == "routed"
