"""/v1/realtime on a whole server with real weights: the official client hears the words of a real recording."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from millstream.config import ModelSpec, Settings
from millstream.engine.generation.plan import Plan, StepResult
from millstream.loading.settings import EngineSettings
from millstream.models.source import ModelSource
from support.real_whisper import tiny_en  # noqa: F401
from support.realtime import pcm16
from support.recording import JFK_WORDS, jfk_samples
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
from support.spoken import pause
from support.tiny_kokoro import write_kokoro

CHUNK = 1600
WAIT = 120


@pytest.fixture(scope="module")
def server(tiny_en: Path, servable: Path) -> Iterator[RunningServer]:  # noqa: F811
    models = (ModelSpec(str(tiny_en), name="ears", aliases=("whisper-1",)), ModelSpec(str(servable), name="chat"))
    with running(Settings(models, port=0, disabled=frozenset({"calibration"}))) as made:
        yield made


async def speak(connection: Any) -> None:
    """Faster than anybody speaks, in pieces as a microphone gives them."""
    for samples in (jfk_samples(), pause(1.5)):
        for start in range(0, len(samples), CHUNK):
            piece = base64.b64encode(pcm16(samples[start : start + CHUNK])).decode()
            await connection.input_audio_buffer.append(audio=piece)


INPUT_ANY = {"format": {"type": "audio/pcm", "rate": 16000}}
INPUT = {"format": {"type": "audio/pcm", "rate": 16000}, "transcription": {"model": "whisper-1", "language": "en"}}


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def test_a_recording_is_transcribed_whole(server: RunningServer) -> None:
    async def play() -> tuple[str, str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-")
        deltas, transcripts, open_items = [], [], set()
        async with client.realtime.connect(extra_query={"intent": "transcription"}, model="whisper-1") as connection:
            await connection.session.update(session={"type": "transcription", "audio": {"input": INPUT}})  # type: ignore[typeddict-item]
            await speak(connection)
            async for event in connection:
                assert event.type != "error", event
                if event.type == "input_audio_buffer.speech_started":
                    open_items.add(event.item_id)
                elif event.type == "conversation.item.input_audio_transcription.delta":
                    deltas.append(event.delta or "")
                elif event.type == "conversation.item.input_audio_transcription.completed":
                    transcripts.append(event.transcript)
                    open_items.discard(event.item_id)
                    if not open_items:
                        break
        await client.close()
        return " ".join(transcripts), "".join(deltas)

    whole, streamed = asyncio.run(asyncio.wait_for(play(), WAIT))
    assert words(whole) == JFK_WORDS
    assert words(streamed) == JFK_WORDS


def test_a_phrase_is_answered_in_text_without_a_voice(server: RunningServer) -> None:
    async def play() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-")
        async with client.realtime.connect(model="chat") as connection:
            created = await connection.recv()
            assert created.session.output_modalities == ["text"]  # type: ignore[union-attr]
            await connection.session.update(
                session={"type": "realtime", "max_output_tokens": 8, "audio": {"input": INPUT}}  # type: ignore[typeddict-item]
            )
            await speak(connection)
            text = ""
            async for event in connection:
                assert event.type != "error", event
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.done":
                    assert event.response.status in ("completed", "incomplete"), event
                    assert event.response.usage is not None and event.response.usage.output_tokens
                    break
        await client.close()
        assert text

    asyncio.run(asyncio.wait_for(play(), WAIT))


class Paced(ScriptedBackend):
    """Writes long answers, slowly enough to be interrupted."""

    def step(self, plan: Plan) -> StepResult:
        time.sleep(0.01)
        return super().step(plan)


ANSWER = "The wheel turns in the stream. It drives the stones of the mill. "


@pytest.fixture
def speaking(tiny_en: Path, servable: Path, tmp_path: Path) -> Iterator[RunningServer]:  # noqa: F811
    voice = write_kokoro(tmp_path / "kokoro")
    ears = ModelSpec(str(tiny_en), name="ears")
    models = (ModelSpec(str(servable), name="chat"), ears, ModelSpec(str(voice), name="voice"))
    tokenizer = tokenizers.Tokenizer.from_file(str(servable / "tokenizer.json"))
    tokens = tokenizer.encode(ANSWER * 200, add_special_tokens=False).ids

    def make(source: ModelSource, settings: EngineSettings) -> Paced:
        return Paced(lambda _: tokens, vocab=tokenizer.get_vocab_size(), context_length=65_536)

    with running(Settings(models, port=0, disabled=frozenset({"calibration"})), make) as made:
        yield made


def test_a_spoken_answer_is_interrupted_by_the_person(speaking: RunningServer) -> None:
    async def play() -> None:
        client = openai.AsyncOpenAI(base_url=f"{speaking.url}/v1", api_key="-")
        async with client.realtime.connect(model="chat") as connection:
            await connection.session.update(session={"type": "realtime", "audio": {"input": INPUT_ANY}})  # type: ignore[typeddict-item]
            await speak(connection)
            heard, interrupted, done = b"", False, None
            async for event in connection:
                assert event.type != "error", event
                if event.type == "response.output_audio.delta":
                    assert not done, "the voice goes on"
                    heard += base64.b64decode(event.delta)
                    if not interrupted and heard:
                        interrupted = True
                        await speak(connection)
                elif event.type == "response.done":
                    done = event.response
                    break
            assert done is not None and done.status == "cancelled" and done.status_details is not None
            assert done.status_details.reason == "turn_detected"
            message = done.output[0]  # type: ignore[index]
            said = message.content[0].transcript  # type: ignore[union-attr,index]
            assert said and (ANSWER * 200).startswith(said) and len(said) < len(ANSWER) * 100
            played = len(heard) // 2 * 1000 // 24_000
            await connection.conversation.item.truncate(
                item_id=message.id or "", content_index=0, audio_end_ms=played // 2
            )
            async for event in connection:
                assert event.type != "error", event
                if event.type == "conversation.item.truncated":
                    break
        await client.close()

    asyncio.run(asyncio.wait_for(play(), WAIT))


def test_stopping_the_server_closes_the_session(tiny_en: Path) -> None:  # noqa: F811
    async def play(made: RunningServer) -> int:
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed

        async with connect(f"ws://127.0.0.1:{made.port}/v1/realtime") as socket:
            await socket.recv()
            made.stop_soon()
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), WAIT)
            assert closed.value.rcvd is not None
            return closed.value.rcvd.code

    with running(Settings((ModelSpec(str(tiny_en), name="ears"),), port=0)) as made:
        assert asyncio.run(play(made)) == 1012
        assert made.join() == (0, True)
