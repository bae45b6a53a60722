"""Kills, hangs, budget, eviction and unloads of transcription engines: as for those that generate."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from millstream.config import ModelSpec, Settings
from millstream.errors import EngineBusy, EngineGone, LoadCancelled, MillstreamError, WrongModelKind
from millstream.model_facts import ModelCard
from millstream.server import MillServer
from millstream.speech_types import Samples, TranscriptionRequest
from support.recording import jfk_samples
from support.server import RunningServer, running
from support.tiny_whisper import write_whisper
from support.transcribing import PATIENCE, Transcript, transcribed, transcript


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, ...]:
    root = tmp_path_factory.mktemp("transcribers")
    return (
        ModelSpec(str(write_whisper(root / "one")), name="one"),
        ModelSpec(str(write_whisper(root / "two", "npz", multilingual=False, seed=1)), name="two"),
    )


@pytest.fixture(scope="module")
def speech() -> Samples:
    return jfk_samples()[: 16_000 * 4]


def card(server: RunningServer, name: str = "one") -> ModelCard:
    found: ModelCard = server.call(lambda running: running.mill.hub.card(name))
    return found


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def at_once(server: RunningServer, requests: int, audio: Samples, between: Callable[[], None]) -> list[Any]:
    """Starts transcriptions, calls `between` once the engine has them, and returns what became of each."""

    async def run(running: MillServer) -> list[Any]:
        asked = TranscriptionRequest("one", audio)
        tasks = [asyncio.ensure_future(transcript(running, asked)) for _ in range(requests)]
        await until(lambda: running.mill.hub.card("one").active == requests)
        between()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found: list[Any] = server.call(run, PATIENCE)
    return found


def test_a_killed_engine_fails_its_requests_and_is_replaced(models: tuple[ModelSpec, ...], speech: Samples) -> None:
    with running(Settings(models=models[:1], port=0, isolation="process")) as server:
        expected = transcribed(server, speech)
        assert expected.segments and expected.language
        pid = card(server).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
        for failed in at_once(server, 3, speech, lambda: os.kill(pid, signal.SIGKILL)):
            assert isinstance(failed, EngineGone) and "killed by signal 9" in failed.message
        assert transcribed(server, speech).text == expected.text
        after = card(server)
        assert (after.state, after.restarts, psutil.pid_exists(pid)) == ("ready", 1, False)


def test_a_hung_engine_is_detected_and_replaced(models: tuple[ModelSpec, ...], speech: Samples) -> None:
    with running(Settings(models=models[:1], port=0, isolation="process", step_timeout=5.0)) as server:
        expected = transcribed(server, speech)
        pid = card(server).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineGone, match="stopped"):
            transcribed(server, speech)
        assert transcribed(server, speech).text == expected.text
        assert card(server).restarts == 1


def test_models_take_turns_in_a_budget_for_one(models: tuple[ModelSpec, ...], speech: Samples) -> None:
    settings = Settings(models=models[:2], port=0, isolation="thread", load="use", memory=400 * 2**20)
    with running(settings) as server:
        expected = [transcribed(server, speech, name).text for name in ("one", "two")]
        assert expected[0] != expected[1]
        reserved = card(server, "two").reserved_bytes
        assert reserved is not None and reserved > 256 * 2**20
        assert (card(server, "one").state, card(server, "two").state) == ("unloaded", "ready")
        assert transcribed(server, speech, "one").text == expected[0]
        assert (card(server, "one").state, card(server, "two").state) == ("ready", "unloaded")
        small = Settings(models=models[:1], port=0, isolation="thread", load="use", memory=100 * 2**20)
    with running(small) as server, pytest.raises(MillstreamError, match=r"the budget is 100\.0 MiB") as caught:
        transcribed(server, speech)
    assert caught.value.status == 507


def test_unloads_race_with_requests(models: tuple[ModelSpec, ...], speech: Samples) -> None:
    with running(Settings(models=models[:1], port=0, isolation="thread")) as server:
        expected = transcribed(server, speech)

        async def race(running: MillServer) -> list[Any]:
            async def ask() -> Any:
                try:
                    return await transcript(running, TranscriptionRequest("one", speech))
                except (EngineGone, EngineBusy, LoadCancelled) as error:
                    return error

            asked = [asyncio.ensure_future(ask()) for _ in range(10)]
            for _ in range(3):
                await running.mill.hub.unload("one")
            return await asyncio.gather(*asked)

        for found in server.call(race, PATIENCE):
            assert not isinstance(found, Transcript) or found.text == expected.text
        assert transcribed(server, speech).text == expected.text


def test_a_client_that_leaves_frees_its_windows(models: tuple[ModelSpec, ...], speech: Samples) -> None:
    with running(Settings(models=models[:1], port=0, isolation="thread")) as server:

        async def leave(running: MillServer) -> None:
            services = running.mill.services
            started = await services.transcription.start(TranscriptionRequest("one", speech))
            async for _ in started:
                break
            started.cancel()
            started.cancel()
            never = await services.transcription.start(TranscriptionRequest("one", speech))
            never.cancel()
            await until(lambda: running.mill.hub.card("one").active == 0)
            _, ended = services.state.requests(2)
            assert [request.state for request in ended] == ["cancelled", "cancelled"]

        server.call(leave, PATIENCE)
        assert transcribed(server, speech).segments


def test_kinds_are_told_apart(models: tuple[ModelSpec, ...], three_models: tuple[str, ...], speech: Samples) -> None:
    with running(Settings(models=(three_models[1], models[0]), port=0, isolation="thread")) as server:
        found = card(server)
        assert found.capabilities == ("transcription", "translation", "word_timestamps")
        assert (found.family, found.format, found.languages) == ("whisper", "safetensors", ("en", "zh", "de"))
        assert transcribed(server, speech).segments, "the first model of the kind answers if none is named"
        with pytest.raises(WrongModelKind, match=r"'embed' is a model for \w+; this request needs one for transc"):
            transcribed(server, speech, "embed")
        metrics, _ = server.call(lambda running: running.mill.services.models.render_metrics())
        assert b'millstream_transcribed_seconds_total{model="one"}' in metrics
