"""/v1/realtime: the WebSocket, and what clients try beside it."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Scope
from starlette.websockets import WebSocket

from millstream.api.auth import KEY_PROTOCOL
from millstream.api.openai.realtime.client_secrets import add_routes, session_of
from millstream.api.openai.realtime.connection import Connection
from millstream.api.response import Responder
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.realtime_types import InputTranscription, SessionConfig
from millstream.service.ports import RealtimeService

PATH = "/v1/realtime"
BETA_HEADER, BETA_VALUE = "openai-beta", "realtime=v1"
BETA_PROTOCOL = "openai-beta.realtime-v1"
PROTOCOL = "realtime"
"""The WebSocket subprotocol that browsers offer beside their key."""
INTENTS = ("transcription", "conversation")


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["realtime"], default_response_class=Response)
    service = responder.services.realtime

    @router.websocket("/realtime")
    async def realtime(socket: WebSocket) -> None:
        config = session_of(socket.scope, service) or _config(socket)
        await Connection(socket, service, beta=_is_beta(socket)).run(config, _subprotocol(socket))

    @router.get("/realtime", include_in_schema=False)
    async def not_a_websocket(request: Request) -> Response:
        raise BadRequest("/v1/realtime speaks WebSocket: connect with ws:// and the header 'Upgrade: websocket'.")

    @router.post("/realtime", include_in_schema=False)
    @router.post("/realtime/calls", include_in_schema=False)
    async def webrtc(request: Request) -> Response:
        raise UnsupportedParameter("WebRTC is not supported. Connect to /v1/realtime with a WebSocket.")

    add_routes(router, service)
    return router


def opens_session(service: RealtimeService) -> Callable[[Scope], bool]:
    """Tells of a request whether its key was issued for realtime sessions. Such a key opens nothing else."""

    def opens(scope: Scope) -> bool:
        return scope["type"] == "websocket" and scope["path"] == PATH and session_of(scope, service) is not None

    return opens


def _config(socket: WebSocket) -> SessionConfig:
    """What the address asks for. Everything else comes as an event."""
    query = socket.query_params
    intent = query.get("intent")
    if intent is not None and intent not in INTENTS:
        raise BadRequest(f"intent must be one of {', '.join(INTENTS)}.", param="intent")
    if intent == "transcription":
        return SessionConfig("transcription", model=query.get("model", ""), transcription=InputTranscription())
    return SessionConfig(model=query.get("model", ""))


def _is_beta(socket: WebSocket) -> bool:
    return BETA_VALUE in socket.headers.get(BETA_HEADER, "") or BETA_PROTOCOL in socket.scope["subprotocols"]


def _subprotocol(socket: WebSocket) -> str | None:
    """The one to accept: browsers fail if none of theirs is. Never the one that is a key."""
    offered: list[str] = socket.scope["subprotocols"]
    if PROTOCOL in offered:
        return PROTOCOL
    return next((name for name in offered if not name.startswith(KEY_PROTOCOL.decode())), None)
