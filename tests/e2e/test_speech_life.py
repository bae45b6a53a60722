"""Kills, hangs, budget, eviction and unloads of engines that speak: as for those that generate. And readers that are
slow, or leave."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from millstream.config import ModelSpec, Settings
from millstream.errors import BadRequest, EngineGone, MillstreamError, WrongModelKind
from millstream.loading.inspection import inspect
from millstream.models.source import find_local
from millstream.server import MillServer
from millstream.speech_types import SpeechRequest
from support.server import RunningServer, running
from support.speech_calls import outcome_of, say, say_soon
from support.tiny import write_servable
from support.tiny_kokoro import VOICES, write_kokoro

PATIENCE = 60
TEXT = "Hello there. The mill stands by the stream, and its wheel turns."
LONG = "This is one of many sentences of a very long text that nobody reads to its end. " * 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("speech")
    return write_kokoro(root / "speak"), write_kokoro(root / "other", seed=1)


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    chat = tmp_path_factory.mktemp("chat") / "chat"
    write_servable(chat)
    models = (str(chat), *map(str, folders))
    with running(Settings(models=models, port=0, isolation="thread")) as found:
        yield found


def card(server: RunningServer, name: str = "speak") -> Any:
    return server.call(lambda mill: mill.mill.hub.card(name))


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it did not happen")


def test_a_model_speaks_and_says_that_it_can(server: RunningServer) -> None:
    sound = say(server, TEXT)
    assert len(sound) > 1000 and np.abs(sound).max() > 1e-3
    np.testing.assert_array_equal(say(server, TEXT, "speak"), sound)
    other = say(server, TEXT, "other")
    assert other.shape != sound.shape or np.abs(other - sound).max() > 1e-4
    shown = httpx.get(f"{server.url}/v1/models/speak", timeout=PATIENCE).json()
    assert "speech" in shown["capabilities"] and shown["state"] == "ready"
    voices = server.call(lambda mill: mill.mill.services.speech.voices(""))
    assert [voice.name for voice in voices] == ["af_heart", *sorted(set(VOICES) - {"af_heart"})]
    assert (voices[-1].language, voices[-1].gender) == ("en-gb", "female")
    assert "millstream_spoken_seconds_total" in httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"text": "  "}, "input"),
        ({"text": "🎉🎉"}, "input"),
        ({"text": "a" * 200_001}, "input"),
        ({"speed": 9.0}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"voice": "nobody"}, "voice"),
        ({"language": "xx"}, "language"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_spoken(
    options: dict[str, Any], param: str, server: RunningServer
) -> None:
    with pytest.raises(BadRequest) as raised:
        say(server, **{"text": TEXT, "model": "speak", **options})
    assert raised.value.param == param
    assert card(server).active == 0


def test_other_models_do_not_speak(server: RunningServer) -> None:
    with pytest.raises(WrongModelKind, match="this request needs one for speech"):
        say(server, TEXT, "chat")


def test_a_slow_reader_holds_back_the_engine(server: RunningServer) -> None:
    """Of a text of many pieces, no more than a few are spoken ahead."""

    async def run(mill: MillServer) -> tuple[int, int]:
        speech = await mill.mill.services.speech.start(SpeechRequest("speak", LONG))
        parts = aiter(speech)
        await anext(parts)
        inbox = speech._inbox  # type: ignore[attr-defined]
        for _ in range(200):
            await asyncio.sleep(0.005)
        waiting = len(inbox._batches) + len(inbox._events)
        speech.cancel()
        await parts.aclose()  # type: ignore[attr-defined]
        return waiting, speech.usage.prompt_tokens

    waiting, tokens = server.call(lambda mill: run(mill))
    assert waiting <= 4  # two pieces, each with its end
    assert tokens < 2000
    wait_for(lambda: card(server).active == 0)


def test_a_reader_that_leaves_frees_the_engine(server: RunningServer) -> None:
    async def run(mill: MillServer) -> None:
        speech = await mill.mill.services.speech.start(SpeechRequest("speak", LONG))
        async for _ in speech:
            break

    server.call(lambda mill: run(mill))
    wait_for(lambda: card(server).active == 0)
    recent = server.call(lambda mill: mill.mill.services.state.requests(1)[1][0])
    assert recent.state == "cancelled" and recent.first_token is not None
    assert len(say(server, TEXT)) > 0


def test_a_killed_engine_fails_its_requests_and_is_replaced(folders: tuple[Path, Path]) -> None:
    settings = Settings(models=(str(folders[0]),), port=0, isolation="process", step_timeout=5.0)
    with running(settings) as server:
        expected = say(server, TEXT)
        before = card(server).pid
        os.kill(before, signal.SIGSTOP)  # so that it cannot answer before it is killed
        tasks = [say_soon(server, TEXT) for _ in range(3)]
        wait_for(lambda: card(server).active == 3)
        os.kill(before, signal.SIGKILL)
        for error in (outcome_of(server, task) for task in tasks):
            assert isinstance(error, EngineGone) and "killed by signal 9" in error.message
        np.testing.assert_array_equal(say(server, TEXT), expected)
        assert (card(server).state, card(server).restarts) == ("ready", 1)
        assert not psutil.pid_exists(before)
        os.kill(card(server).pid, signal.SIGSTOP)
        hung = outcome_of(server, say_soon(server, TEXT))
        assert isinstance(hung, EngineGone) and "stopped" in hung.message
        np.testing.assert_array_equal(say(server, TEXT), expected)
        assert card(server).restarts == 2


def test_models_take_turns_in_a_budget_for_one(folders: tuple[Path, Path]) -> None:
    models = tuple(map(str, folders))
    settings = Settings(models=models, port=0, isolation="thread", load="use", memory=1200 * 2**20)
    with running(settings) as server:
        expected = say(server, TEXT, "speak")
        assert card(server).reserved_bytes > 768 * 2**20
        assert len(say(server, TEXT, "other")) > 0
        assert (card(server).state, card(server, "other").state) == ("unloaded", "ready")
        np.testing.assert_array_equal(say(server, TEXT, "speak"), expected)
        assert (card(server).state, card(server, "other").state) == ("ready", "unloaded")


def test_a_model_is_described_before_it_is_loaded(folders: tuple[Path, Path]) -> None:
    spec = ModelSpec(str(folders[0]), name="voice", load="use")
    with running(Settings(models=(spec,), port=0, isolation="thread")) as server:
        wait_for(lambda: card(server, "voice").capabilities == ("speech",))
        assert (card(server, "voice").family, card(server, "voice").state) == ("kokoro", "unloaded")


def test_what_its_files_say_is_shown(folders: tuple[Path, Path]) -> None:
    source = find_local(str(folders[0]))
    assert source is not None
    shown = inspect(source)
    assert (shown.kind, shown.capabilities, shown.notes) == ("audio", ("speech",), ())
    assert shown.files is not None and shown.files.parameters > 1000


def test_unloads_that_race_with_requests_end_in_sound_or_in_a_clear_error(folders: tuple[Path, Path]) -> None:
    with running(Settings(models=(str(folders[0]),), port=0, isolation="thread")) as server:
        expected = say(server, TEXT).tobytes()
        tasks = [say_soon(server, TEXT) for _ in range(12)]
        for _ in range(3):
            server.call(lambda mill: mill.mill.services.models.unload("speak"))
            tasks += [say_soon(server, TEXT) for _ in range(3)]
        outcomes = [outcome_of(server, task) for task in tasks]
        for outcome in outcomes:
            assert outcome == expected or (isinstance(outcome, MillstreamError) and outcome.status in (409, 503))
        assert expected in outcomes
        assert say(server, TEXT).tobytes() == expected
