"""Events of clients: each calls one operation of the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from anyio import to_thread

from millstream.api.openai.realtime.fields import Fields
from millstream.api.openai.realtime.items_in import parse_item
from millstream.api.openai.realtime.session_in import update_session
from millstream.errors import BadRequest, UnsupportedParameter
from millstream.realtime_types import Item, ResponseOptions
from millstream.service.ports import RealtimeService, RealtimeSession

MAX_MS = 2**31
SMALL = 64 * 1024
"""Characters of base64 that are decoded on the event loop."""

Handler = Callable[["ClientEvents", Fields], Awaitable[None]]


class ClientEvents:
    """Carries out the events of one client, in their order."""

    def __init__(self, service: RealtimeService, session: RealtimeSession) -> None:
        self._service = service
        self._session = session

    async def handle(self, event: dict[str, Any]) -> None:
        """Raises a `MillstreamError` if the event is wrong. Then it had no effect."""
        fields = Fields(event, "")
        kind = fields.needed("type")
        handler = _HANDLERS.get(kind)
        if handler is None:
            known = ", ".join(sorted(_HANDLERS))
            raise BadRequest(f"There is no event of the type {kind[:64]!r}. There are: {known}.", param="type")
        await handler(self, fields)

    async def _update(self, fields: Fields) -> None:
        changed = update_session(self._session.config, fields.raw("session"))
        self._session.update(self._service.resolve(changed))

    async def _update_transcription(self, fields: Fields) -> None:
        """The beta's name, for transcription sessions only."""
        config = replace(self._session.config, kind="transcription")
        self._session.update(self._service.resolve(update_session(config, fields.raw("session"))))

    async def _append(self, fields: Fields) -> None:
        audio = fields.raw("audio")
        if isinstance(audio, str) and len(audio) > SMALL:
            await self._session.append(await to_thread.run_sync(fields.audio, "audio"))
        else:
            await self._session.append(fields.audio("audio"))

    async def _commit(self, fields: Fields) -> None:
        self._session.commit()

    async def _clear(self, fields: Fields) -> None:
        self._session.clear()

    async def _create_item(self, fields: Fields) -> None:
        await self._session.create_item(parse_item(fields.raw("item")), fields.text("previous_item_id"))

    async def _delete_item(self, fields: Fields) -> None:
        self._session.delete_item(fields.needed("item_id"))

    async def _retrieve_item(self, fields: Fields) -> None:
        self._session.retrieve_item(fields.needed("item_id"))

    async def _truncate_item(self, fields: Fields) -> None:
        index = fields.whole("content_index", 0, 1_000) or 0
        end = fields.whole("audio_end_ms", 0, MAX_MS)
        if end is None:
            raise BadRequest("audio_end_ms is required.", param="audio_end_ms")
        self._session.truncate_item(fields.needed("item_id"), index, end)

    async def _create_response(self, fields: Fields) -> None:
        inner = fields.inner("response")
        config = self._session.config
        if inner is None:
            self._session.create_response(ResponseOptions(config))
            return
        config = update_session(config, fields.raw("response"), "response")
        where = inner.one_of("conversation", ("auto", "none")) or "auto"
        metadata = inner.raw("metadata")
        self._session.create_response(
            ResponseOptions(
                self._service.resolve(config),
                input=self._input(inner),
                in_conversation=where == "auto",
                metadata=metadata if isinstance(metadata, dict) else None,
            )
        )

    def _input(self, fields: Fields) -> tuple[Item, ...] | None:
        if (items := fields.list("input")) is None:
            return None
        path = fields.at("input")
        found = [parse_item(item, f"{path}[{index}]", self._session.item) for index, item in enumerate(items)]
        if any(part.audio for item in found for part in item.parts):
            raise UnsupportedParameter(
                f"{path} must not have audio. Add it to the conversation first (conversation.item.create).", param=path
            )
        return tuple(found)

    async def _cancel_response(self, fields: Fields) -> None:
        self._session.cancel_response(fields.text("response_id"))

    async def _clear_output(self, fields: Fields) -> None:
        raise UnsupportedParameter(
            "output_audio_buffer.clear is for WebRTC. Over a WebSocket the client plays the audio: stop playing, and "
            "send response.cancel and conversation.item.truncate.",
            param="type",
        )


_HANDLERS: dict[str, Handler] = {
    "session.update": ClientEvents._update,
    "transcription_session.update": ClientEvents._update_transcription,
    "input_audio_buffer.append": ClientEvents._append,
    "input_audio_buffer.commit": ClientEvents._commit,
    "input_audio_buffer.clear": ClientEvents._clear,
    "conversation.item.create": ClientEvents._create_item,
    "conversation.item.delete": ClientEvents._delete_item,
    "conversation.item.retrieve": ClientEvents._retrieve_item,
    "conversation.item.truncate": ClientEvents._truncate_item,
    "response.create": ClientEvents._create_response,
    "response.cancel": ClientEvents._cancel_response,
    "output_audio_buffer.clear": ClientEvents._clear_output,
}
