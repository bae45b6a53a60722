"""/v1/realtime over a real socket: handshake, keys, hosts, origins, limits, and the events as clients see them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

from millstream.api.app import create_app
from millstream.api.http1.limits import HttpLimits
from millstream.api.openai.realtime import connection
from millstream.types import CallDelta, Delta, FinishReason
from support.realtime import (
    END,
    FakeGenerations,
    FakeModels,
    FakeSpeeches,
    FakeTranscriptions,
    pcm16,
    said,
    segment,
    sound,
    until,
)
from support.services import services
from support.spoken import pause, spoken

WAIT = 60
PHRASE = pcm16(np.concatenate([pause(0.3, 24_000), spoken(1.5, 24_000), pause(1.0, 24_000)]))
SPEECH = pcm16(np.concatenate([pause(0.3, 24_000), spoken(1.5, 24_000)]))


class Server:
    """The services are on the server's event loop: tests set what they give before they are asked."""

    def __init__(self) -> None:
        self.reset()
        self.port = 0
        self.keyed_port = 0

    def reset(self) -> None:
        self.ears = FakeTranscriptions(steps=(segment(" Hello there."), None))
        self.brain = FakeGenerations(steps=([said("Good day. "), END], None))
        self.voice = FakeSpeeches(steps=(sound(0.25), None))

    def app(self, **options: Any) -> Any:
        fakes = {"transcription": _Current(self, "ears"), "speech": _Current(self, "voice")}
        parts = services(FakeModels(), generation=_Current(self, "brain"), **fakes)
        return create_app(parts, body_limit=10**6, **options)


class _Current:
    """The fake of the current test, for a server that all tests share."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._name = server, name

    async def start(self, request: Any) -> Any:
        return await getattr(self._server, self._name).start(request)


@pytest.fixture(scope="module")
def _server(serve_module: Callable[..., AbstractContextManager[int]]) -> Iterator[Server]:
    made = Server()
    limits = HttpLimits(write_seconds=1.0)
    keyed = made.app(api_keys=("sesame",))
    with serve_module(made.app(hosts=()), limits=limits) as made.port, serve_module(keyed) as made.keyed_port:
        yield made


@pytest.fixture
def server(_server: Server) -> Server:
    _server.reset()
    return _server


class Talker:
    """A client: sends events, and collects what comes."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def say(self, audio: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode())

    async def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), WAIT))
        self.events.append(event)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := await self.next())["type"] != kind:
            pass
        return event

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]


@asynccontextmanager
async def talking(port: int, query: str = "", **options: Any) -> AsyncIterator[Talker]:
    url = f"ws://127.0.0.1:{port}/v1/realtime{query}"
    async with connect(url, open_timeout=WAIT, compression=None, **options) as socket:
        yield Talker(socket)


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


async def refused(port: int, query: str = "", **options: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with talking(port, query, **options):
            pass
    response = caught.value.response
    assert response.headers["x-request-id"].startswith("req_")
    return response.status_code, json.loads(response.body)["error"]


def test_a_transcription_session(server: Server) -> None:
    async def play() -> None:
        async with talking(server.port, "?intent=transcription") as client:
            created = await client.next()
            assert created["type"] == "session.created"
            assert created["session"]["type"] == "transcription"
            assert created["session"]["audio"]["input"]["transcription"]["model"] == "ears"
            turns = {"type": "server_vad", "silence_duration_ms": 400}
            await client.send(
                "session.update", session={"type": "transcription", "audio": {"input": {"turn_detection": turns}}}
            )
            updated = await client.next()
            assert updated["session"]["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 400
            await client.say(PHRASE)
            done = await client.until("conversation.item.input_audio_transcription.completed")
            assert done["transcript"] == "Hello there."
            assert done["usage"]["type"] == "duration"
            assert client.types == [
                "session.created",
                "session.updated",
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
                "conversation.item.input_audio_transcription.delta",
                "conversation.item.input_audio_transcription.completed",
            ]
            assert len({event["event_id"] for event in client.events}) == len(client.events)

    run(play())


def test_a_spoken_conversation(server: Server) -> None:
    async def play() -> None:
        async with talking(server.port, "?model=gpt-realtime") as client:
            assert (await client.next())["session"]["model"] == "chat"
            await client.say(PHRASE)
            done = await client.until("response.done")
            assert done["response"]["status"] == "completed"
            assert done["response"]["usage"]["total_tokens"] == 10
            audio = [event["delta"] for event in client.events if event["type"] == "response.output_audio.delta"]
            assert len(b"".join(base64.b64decode(piece) for piece in audio)) == 12_000
            assert done["response"]["output"][0]["content"] == [{"type": "output_audio", "transcript": "Good day. "}]
            assert client.types[client.types.index("response.created") :] == [
                "response.created",
                "response.output_item.added",
                "conversation.item.added",
                "response.content_part.added",
                "response.output_audio_transcript.delta",
                "response.output_audio.delta",
                "response.output_audio.done",
                "response.output_audio_transcript.done",
                "response.content_part.done",
                "conversation.item.done",
                "response.output_item.done",
                "response.done",
            ]

    run(play())


def test_speech_interrupts_the_voice(server: Server) -> None:
    server.voice.steps = (sound(0.25),)  # and it goes on

    async def play() -> None:
        async with talking(server.port) as client:
            await client.say(PHRASE)
            await client.until("response.output_audio.delta")
            await client.say(SPEECH)
            await client.until("input_audio_buffer.speech_started")
            done = await client.until("response.done")
            assert done["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
            item = done["response"]["output"][0]
            await client.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=100)
            await client.until("conversation.item.truncated")
            after = client.types[client.types.index("response.done") :]
            assert "response.output_audio.delta" not in after

    run(play())
    assert server.voice.all_cancelled and server.brain.all_cancelled


def test_the_beta_has_its_own_names(server: Server) -> None:
    async def play() -> None:
        headers = {"OpenAI-Beta": "realtime=v1"}
        async with talking(server.port, additional_headers=headers) as client:
            session = (await client.next())["session"]
            assert (session["modalities"], session["input_audio_format"]) == (["text", "audio"], "pcm16")
            await client.send("session.update", session={"input_audio_format": "g711_ulaw", "turn_detection": None})
            assert (await client.next())["session"]["input_audio_format"] == "g711_ulaw"
            await client.say(b"\xff" * 8000)
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.created")
            await client.send("response.create", response={"modalities": ["text"]})
            assert (await client.until("response.text.delta"))["delta"] == "Good day. "
            done = await client.until("response.done")
            assert done["response"]["output"][0]["content"] == [{"type": "text", "text": "Good day. "}]
        async with talking(server.port, "?intent=transcription", additional_headers=headers) as client:
            assert (await client.next())["type"] == "transcription_session.created"
            await client.send("transcription_session.update", session={"turn_detection": {"type": "server_vad"}})
            assert (await client.next())["type"] == "transcription_session.updated"

    run(play())
    assert len(server.ears.requests[0].audio) == 16_000


def test_wrong_events_are_errors_and_the_session_goes_on(server: Server) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"type": "nonsense"}, "There is no event"),
        ({}, "type is required"),
        ({"type": "input_audio_buffer.append", "audio": "%%%"}, "not valid base64"),
        ({"type": "input_audio_buffer.append"}, "audio is required"),
        ({"type": "input_audio_buffer.commit"}, "a commit needs at least"),
        ({"type": "response.cancel"}, "no such response"),
        ({"type": "session.update"}, "session must be an object"),
        ({"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 7}}}}}, "rate must be one of"),
        ({"type": "session.update", "session": {"instruction": "x"}}, "Did you mean session.instructions"),
        ({"type": "session.update", "session": {"model": "nope"}}, "not served"),
        ({"type": "session.update", "session": {"tools": [{"type": "function", "name": "a b"}]}}, "name must be"),
        ({"type": "session.update", "session": {"tool_choice": "required"}}, "there are no tools"),
        ({"type": "session.update", "session": {"turn_detection": {"threshold": 7}}}, "must be a number from 0 to 1"),
        ({"type": "conversation.item.create", "item": {"type": "message"}}, "item.role is required"),
        ({"type": "conversation.item.delete", "item_id": "x"}, "no item"),
        ({"type": "conversation.item.truncate", "item_id": "x"}, "audio_end_ms is required"),
        ({"type": "output_audio_buffer.clear"}, "WebRTC"),
    ]

    async def play() -> None:
        async with talking(server.port) as client:
            await client.next()
            for number, (event, message) in enumerate(wrong):
                await client.socket.send(json.dumps({"event_id": f"mine{number}", **event}))
                error = await client.next()
                assert error["type"] == "error", error
                assert message in error["error"]["message"]
                assert error["error"]["event_id"] == f"mine{number}"
            for bad in ("{", "[]", "", b"\x00\x01", '{"type": ' + "[" * 3000 + "]" * 3000 + "}"):
                await client.socket.send(bad)
                assert (await client.next())["type"] == "error"
            await client.send("response.create", response={"output_modalities": ["text"]})
            assert (await client.until("response.done"))["response"]["status"] == "completed"

    run(play())


def test_handshakes_that_are_refused(server: Server) -> None:
    async def play() -> None:
        assert (await refused(server.port, "?model=nope"))[0] == 404
        assert (await refused(server.port, "?intent=dance"))[1]["param"] == "intent"
        status, error = await refused(server.port, origin="https://evil.example")  # type: ignore[arg-type]
        assert (status, error["code"]) == (403, "origin_not_allowed")
        status, error = await refused(server.port, additional_headers={"Host": "evil.example"})
        assert status in (400, 403)

    run(play())


def test_keys(server: Server) -> None:
    async def play() -> None:
        port = server.keyed_port
        assert (await refused(port))[0] == 401
        assert (await refused(port, additional_headers={"Authorization": "Bearer wrong"}))[0] == 401
        assert (await refused(port, subprotocols=["realtime", "openai-insecure-api-key.wrong"]))[0] == 401  # type: ignore[list-item]
        async with talking(port, additional_headers={"Authorization": "Bearer sesame"}) as client:
            await client.next()
        browser = ["realtime", "openai-insecure-api-key.sesame", "openai-beta.realtime-v1"]
        async with talking(port, subprotocols=browser) as client:  # type: ignore[arg-type]
            assert client.socket.subprotocol == "realtime"
            assert "modalities" in (await client.next())["session"]
        async with talking(port, subprotocols=["openai-insecure-api-key.sesame", "x"]) as client:  # type: ignore[list-item]
            assert client.socket.subprotocol == "x"

    run(play())


def test_keys_for_browsers(server: Server) -> None:
    """They open realtime sessions with the settings that they were issued for, and nothing else."""
    url = f"http://127.0.0.1:{server.keyed_port}/v1"
    body = {"session": {"type": "realtime", "instructions": "Be kind.", "output_modalities": ["text"]}}
    assert httpx.post(f"{url}/realtime/client_secrets", json=body).status_code == 401
    with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
        made = client.realtime.client_secrets.create(session=body["session"])  # type: ignore[arg-type]
        assert made.value.startswith("ek_") and made.session.instructions == "Be kind."  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="from 10 to 7200"):
            client.realtime.client_secrets.create(expires_after={"seconds": 1})
    bearer = {"Authorization": f"Bearer {made.value}"}
    assert httpx.get(f"{url}/models", headers=bearer).status_code == 401
    assert httpx.get(f"{url}/realtime", headers=bearer).status_code == 401
    beta = httpx.post(f"{url}/realtime/sessions", json={"modalities": ["text"]}, headers={"x-api-key": "sesame"}).json()
    assert beta["modalities"] == ["text"]

    async def play() -> None:
        for secret in (made.value, beta["client_secret"]["value"]):
            protocols = ["realtime", f"openai-insecure-api-key.{secret}"]
            async with talking(server.keyed_port, subprotocols=protocols) as browser:  # type: ignore[arg-type]
                assert (await browser.next())["session"]["output_modalities"] == ["text"]
        assert (await refused(server.keyed_port, subprotocols=["openai-insecure-api-key.ek_0"]))[0] == 401  # type: ignore[list-item]

    run(play())


def test_http_stays_as_it_is(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}"
    plain = httpx.get(f"{url}/v1/realtime")
    assert plain.status_code == 400 and "WebSocket" in plain.json()["error"]["message"]
    for path in ("/v1/realtime", "/v1/realtime/calls"):
        answer = httpx.post(f"{url}{path}", content=b"v=0")
        assert answer.status_code == 400 and "WebRTC" in answer.json()["error"]["message"]
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = base64.b64encode(b"k" * 16).decode()
    assert httpx.get(f"{url}/health", headers=upgrade).status_code == 200
    assert httpx.get(f"{url}/v1/nothing", headers=upgrade).status_code == 404
    del upgrade["Sec-WebSocket-Key"]
    assert httpx.get(f"{url}/v1/realtime", headers=upgrade).status_code == 400
    upgrade["Sec-WebSocket-Key"] = "x" * 9000
    assert httpx.get(f"{url}/v1/realtime", headers=upgrade).status_code == 400
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_that_leaves_ends_all_work(server: Server) -> None:
    server.voice.steps = ()

    async def play() -> None:
        async with talking(server.port) as client:
            await client.say(PHRASE)
            await client.until("response.output_audio_transcript.delta")
            client.socket.transport.abort()
        await until(lambda: server.voice.works and server.voice.all_cancelled and server.brain.all_cancelled)

    run(play())


def test_a_client_that_leaves_while_its_audio_waits_ends_all_work(server: Server) -> None:
    """The session takes no more audio, so the connection is not read: it must notice all the same."""
    server.ears.steps = ()
    minute = pcm16(np.concatenate([np.tile(spoken(10.0, 24_000), 6), pause(1.0, 24_000)]))

    async def play() -> None:
        async with talking(server.port, "?intent=transcription") as client:
            for _ in range(3):
                await client.say(minute)
            await until(lambda: server.ears.works)
            client.socket.transport.abort()
        await until(lambda: server.ears.all_cancelled)

    run(play())


def test_a_client_that_does_not_read_is_cut_off(server: Server) -> None:
    server.voice.steps = tuple(sound(60.0) for _ in range(20))

    async def play() -> None:
        async with talking(server.port, max_queue=1) as client:
            await client.say(PHRASE)
            await client.until("response.output_audio.delta")
            client.socket.transport.pause_reading()
            await until(lambda: server.voice.all_cancelled)
            client.socket.transport.abort()

    run(play())


def test_a_client_that_sends_and_does_not_read_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded, and it is cut off in the end."""
    monkeypatch.setattr(connection, "MAX_UNREAD", 10_000)

    async def play() -> None:
        async with talking(server.port, max_queue=1) as client:
            client.socket.transport.pause_reading()
            with pytest.raises(websockets.ConnectionClosed):
                async with asyncio.timeout(WAIT):
                    while True:
                        await client.send("nonsense", padding="x" * 10_000)
            client.socket.transport.abort()

    run(play())


def test_a_client_that_sends_nothing_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.2)

    async def play() -> None:
        async with talking(server.port) as client:
            await client.next()
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await client.next()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "no event for 0.2 s")

    run(play())


def test_messages_that_are_too_large_end_the_connection(server: Server) -> None:
    async def play() -> None:
        async with talking(server.port) as client:
            await client.next()
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await client.socket.send("x" * (17 * 2**20))
                await client.next()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009

    run(play())


def test_the_official_client(server: Server) -> None:
    async def play() -> None:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="-")
        async with client.realtime.connect(model="gpt-realtime") as talk:
            await talk.session.update(
                session={
                    "type": "realtime",
                    "instructions": "Be brief.",
                    "output_modalities": ["audio"],
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 24000},
                            "transcription": {"model": "whisper-1"},
                            "turn_detection": {"type": "server_vad"},
                        }
                    },
                }
            )
            await talk.input_audio_buffer.append(audio=base64.b64encode(PHRASE).decode())
            kinds, texts = [], []
            async for event in talk:
                kinds.append(event.type)
                assert event.type != "error", event
                if event.type == "response.output_audio_transcript.delta":
                    texts.append(event.delta)
                if event.type == "conversation.item.input_audio_transcription.completed":
                    assert event.transcript == "Hello there."
                if event.type == "response.done":
                    assert event.response.status == "completed"
                    break
            assert "".join(texts) == "Good day. "
            assert "conversation.item.input_audio_transcription.completed" in kinds
            await talk.conversation.item.create(
                item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]}
            )
            await talk.response.create(response={"output_modalities": ["text"]})
            async for event in talk:
                assert event.type != "error", event
                if event.type == "response.output_text.done":
                    assert event.text == "Good day. "
                if event.type == "response.done":
                    break
        await client.close()

    run(play())
    assert server.brain.requests[1].prompts[0].messages[-1]["content"] == "And?"


def test_openais_agents_sdk(server: Server) -> None:
    """Its own client checks every event, runs tools, and truncates what was not played when it interrupts."""
    agents = pytest.importorskip("agents", reason="needs openai-agents (the extra clients)")
    realtime = pytest.importorskip("agents.realtime")

    def clock(zone: str) -> str:
        """The time there."""
        return f"noon in {zone}"

    tool = Delta(0, calls=(CallDelta(0, "c1", "clock", '{"zone": "UTC"}'),), finish_reason=FinishReason.TOOL_CALLS)
    server.brain.script = [([said("Good day. "), END], None), ([tool], None)]
    server.brain.script += [([said("It is noon. "), END], None), ([said("A long story. ")],)]
    settings: dict[str, Any] = {"model_name": "gpt-realtime"}
    settings |= {"input_audio_transcription": {"model": "whisper-1"}, "turn_detection": {"type": "semantic_vad"}}
    url = f"ws://127.0.0.1:{server.port}/v1/realtime?model=gpt-realtime"

    async def until_event(session: Any, kind: str) -> Any:
        async for event in session:
            assert event.type != "error", event
            if event.type == kind:
                return event
        raise AssertionError(f"no {kind}")

    async def play() -> None:
        agent = realtime.RealtimeAgent(name="miller", instructions="Be brief.", tools=[agents.function_tool(clock)])
        runner = realtime.RealtimeRunner(starting_agent=agent, config={"model_settings": settings})
        async with await runner.run(model_config={"url": url, "api_key": "-"}) as session:
            await session.send_audio(PHRASE)
            await until_event(session, "audio_end")
            await session.send_message("What time is it?")
            ended = await until_event(session, "tool_end")
            assert ended.output == "noon in UTC"
            await until_event(session, "audio_end")
            server.voice.steps = (sound(3.0),)
            await session.send_message("Tell me a story.")
            await until_event(session, "audio")
            await session.interrupt()
            await until_event(session, "audio_interrupted")

    run(play())
    contents = [message["content"] for message in server.brain.requests[-1].prompts[0].messages]
    assert contents == [
        "Be brief.",
        "Hello there.",
        "Good day. ",
        "What time is it?",
        None,
        "noon in UTC",
        "It is noon. ",
        "Tell me a story.",
    ]
