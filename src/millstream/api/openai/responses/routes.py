"""POST /v1/responses and /v1/responses/input_tokens; GET, DELETE, cancel and the input items of a stored response."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from millstream.api.auth import owner_of
from millstream.api.body import read_body
from millstream.api.errors import json_response
from millstream.api.hosted_tools import HostedTools
from millstream.api.openai.responses import docs
from millstream.api.openai.responses.background import SERVER_STOPPED, BackgroundRuns
from millstream.api.openai.responses.counting import count_input
from millstream.api.openai.responses.frame import ENDED
from millstream.api.openai.responses.listing import page, truth, whole_number
from millstream.api.openai.responses.request import count_plan, response_plan
from millstream.api.openai.responses.run import ResponseRun
from millstream.api.openai.responses.send import (
    EventsResponse,
    FollowingResponse,
    WholeResponse,
    encoded,
    replayed,
)
from millstream.api.openai.responses.stored import StoredResponses
from millstream.api.response import Responder
from millstream.errors import BadRequest
from millstream.service.ports import Services

log = logging.getLogger(__name__)


class ResponseIdConvertor(Convertor[str]):
    """Matches any id, but not the name of another route, so each URL has one route."""

    regex = "(?!input_tokens$)[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("response_id", ResponseIdConvertor())

ResponseId = Annotated[
    str,
    Path(description="The id of a stored response.", examples=["resp_0123456789abcdef0123456789abcdef"]),
]


class Responses:
    """The stored and running responses of one owner, as the routes see them."""

    def __init__(self, responder: Responder, services: Services, hosted: HostedTools) -> None:
        self._responder = responder
        self._services = services
        self._stored = StoredResponses(services.records)
        self._runs = BackgroundRuns(responder.background, self._stored, encoded)
        self._hosted = hosted

    async def create(self, http: Request) -> Response:
        request, plan = await read_body(http, partial(response_plan, seal=self._services.seal))
        self._hosted.tell(plan.tools.left_out)
        run = ResponseRun(self._services, self._stored, request, plan)
        await run.prepare()
        if request.background:
            background = self._runs.start(run)
            following = FollowingResponse(self._responder, background, after=-1)
            return following if request.stream else json_response(run.snapshot())
        return EventsResponse(self._responder, run) if request.stream else WholeResponse(self._responder, run)

    async def count(self, http: Request) -> Response:
        plan = await read_body(http, partial(count_plan, seal=self._services.seal))
        self._hosted.tell(plan.tools.left_out)
        tokens = await count_input(self._services, self._stored, plan)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, response_id: str, http: Request) -> Response:
        params = http.query_params
        after = whole_number(params, "starting_after")
        if not truth(params, "stream"):
            return json_response(await self._find(response_id))
        after = -1 if after is None else after
        running = self._runs.find(response_id)
        if running is not None:
            return FollowingResponse(self._responder, running, after)
        await self._stored.get(response_id)
        events = await self._stored.events(response_id)
        if events is None:
            raise BadRequest("Only the events of a background response can be streamed again.", param="stream")
        return replayed(events, after)

    async def delete(self, response_id: str) -> Response:
        await self._runs.cancel(response_id)
        await self._stored.get(response_id)
        await self._stored.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """A response that has ended stays as it is."""
        await self._runs.cancel(response_id)
        response = await self._find(response_id)
        if not response["background"]:
            raise BadRequest("Only background responses can be cancelled.", param="response_id")
        return json_response(response)

    async def input_items(self, response_id: str, http: Request) -> Response:
        found = await self._stored.get(response_id)
        return json_response(page(found.input, http.query_params))

    async def _find(self, response_id: str) -> dict[str, Any]:
        running = await self._runs.working(response_id)
        if running is not None:
            return running.run.snapshot()
        response = (await self._stored.get(response_id)).response
        if response["status"] not in ENDED:  # the server that ran it has stopped
            error = {"code": "server_error", "message": SERVER_STOPPED}
            response |= {"status": "failed", "error": error}
        return response


def routes(responder: Responder) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["responses"], default_response_class=Response)
    hosted = HostedTools("OpenAI")
    owned: dict[str, Responses] = {}

    def responses_of(request: Request) -> Responses:
        """There are as many owners as API keys."""
        owner = owner_of(request.scope)
        if owner not in owned:
            owned[owner] = Responses(responder, responder.services.of(owner), hosted)
        return owned[owner]

    @router.post("/responses", summary="Respond to an input", openapi_extra=docs.CREATE)
    async def create_response(request: Request) -> Response:
        return await responses_of(request).create(request)

    @router.post("/responses/input_tokens", summary="Count the tokens of an input", openapi_extra=docs.COUNT)
    async def count_input_tokens(request: Request) -> Response:
        return await responses_of(request).count(request)

    @router.get(
        "/responses/{response_id:response_id}", summary="Retrieve a stored response", openapi_extra=docs.RETRIEVE
    )
    async def retrieve_response(response_id: ResponseId, request: Request) -> Response:
        return await responses_of(request).retrieve(response_id, request)

    @router.delete(
        "/responses/{response_id:response_id}", summary="Delete a stored response", openapi_extra=docs.DELETE
    )
    async def delete_response(response_id: ResponseId, request: Request) -> Response:
        return await responses_of(request).delete(response_id)

    @router.post(
        "/responses/{response_id:response_id}/cancel",
        summary="Cancel a background response",
        openapi_extra=docs.CANCEL,
    )
    async def cancel_response(response_id: ResponseId, request: Request) -> Response:
        return await responses_of(request).cancel(response_id)

    @router.get(
        "/responses/{response_id:response_id}/input_items",
        summary="List the input items of a stored response",
        openapi_extra=docs.INPUT_ITEMS,
    )
    async def list_input_items(response_id: ResponseId, request: Request) -> Response:
        return await responses_of(request).input_items(response_id, request)

    return router
