"""POST /v1/realtime/client_secrets, and the beta's /sessions and /transcription_sessions: keys for browsers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Scope

from millstream.api.auth import sent_keys
from millstream.api.body import read_body
from millstream.api.errors import json_response
from millstream.api.openai.realtime.fields import Fields
from millstream.api.openai.realtime.objects import session_object
from millstream.api.openai.realtime.session_in import update_session
from millstream.realtime_types import SessionConfig
from millstream.service.ports import RealtimeService

SECONDS, LEAST_SECONDS, MOST_SECONDS = 600, 10, 7_200
BETA_SECONDS = 60


def add_routes(router: APIRouter, service: RealtimeService) -> None:
    @router.post("/realtime/client_secrets", include_in_schema=False)
    async def client_secrets(request: Request) -> Response:
        seconds, config = await read_body(request, _parse)
        config = service.resolve(config)
        made = service.issue_secret(config, seconds)
        session = session_object(config, "", beta=False)
        return json_response({"value": made.value, "expires_at": made.expires_at, "session": session})

    @router.post("/realtime/sessions", include_in_schema=False)
    async def sessions(request: Request) -> Response:
        return _beta(await read_body(request, lambda body: update_session(SessionConfig(), body, "")))

    @router.post("/realtime/transcription_sessions", include_in_schema=False)
    async def transcription_sessions(request: Request) -> Response:
        return _beta(await read_body(request, lambda body: update_session(SessionConfig("transcription"), body, "")))

    def _beta(config: SessionConfig) -> Response:
        config = service.resolve(config)
        made = service.issue_secret(config, BETA_SECONDS)
        secret = {"value": made.value, "expires_at": made.expires_at}
        return json_response({**session_object(config, "", beta=True), "client_secret": secret})


def _parse(body: dict[str, Any]) -> tuple[int, SessionConfig]:
    fields = Fields(body, "")
    expires = fields.inner("expires_after")
    seconds = None if expires is None else expires.whole("seconds", LEAST_SECONDS, MOST_SECONDS)
    config = update_session(SessionConfig(), body.get("session") or {})
    return seconds or SECONDS, config


def session_of(scope: Scope, service: RealtimeService) -> SessionConfig | None:
    """The settings that belong to the key of a handshake, if it is such a key."""
    found = (service.redeem_secret(key.decode("latin-1")) for key in sent_keys(scope))
    return next((config for config in found if config is not None), None)
