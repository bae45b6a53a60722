"""The chat page with a voice: answers are read aloud, and messages are spoken into the microphone.

The routes of audio are played by the test, so that it knows every byte; the chat behind them is real.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, Request, Route, expect

from millstream.config import ModelSpec
from millstream.media.wav import open_wav
from support.browser import LAN_NAME, PATIENCE, Opener, Watch, serious_findings
from support.chat_page import ChatPage
from support.scripted_server import ScriptedServer, scripted_server

expect.set_options(timeout=PATIENCE)
SHORT, LONG = 0.2, 60
"""Seconds of a speech that a test waits for, and of one that it does not."""

NOTE_SOUND = """() => {
    window.played = [];
    const start = AudioBufferSourceNode.prototype.start;
    AudioBufferSourceNode.prototype.start = function (at) {
        const samples = this.buffer.getChannelData(0);
        window.played.push({at, seconds: this.buffer.duration, peak: Math.max(...samples.slice(0, 1000))});
        return start.call(this, at);
    };
    window.recorded = 0;
    const record = MediaRecorder.prototype.start;
    MediaRecorder.prototype.start = function (...options) {
        this.addEventListener("dataavailable", (event) => (window.recorded += event.data.size > 0));
        return record.apply(this, options);
    };
}"""


class Voice:
    """A page whose server has a voice and an ear."""

    def __init__(self, page: Page, watch: Watch) -> None:
        self.page, self.watch = page, watch
        self.models = [_model("voice", "speech"), _model("ear", "transcription")]
        self.seconds = SHORT
        self.text = " So my fellow Americans. "
        self.status = 200
        self.spoken: list[dict[str, Any]] = []
        self.recordings: list[Request] = []
        page.add_init_script(f"({NOTE_SOUND})()")
        page.route("**/v1/models", self._list)
        page.route("**/v1/audio/speech", self._speak)
        page.route("**/v1/audio/transcriptions", self._transcribe)
        self.chat = ChatPage(page)
        self.read = page.get_by_role("button", name="Read aloud")
        self.stop_reading = page.get_by_role("button", name="Stop reading")
        self.record = page.get_by_role("button", name="Speak a message")
        self.finish = page.get_by_role("button", name="Finish recording")

    def open(self) -> Voice:
        self.chat.open()
        return self

    def wait_for_sound(self) -> None:
        """Until the recorder has some."""
        self.page.wait_for_function("() => window.recorded > 2", timeout=PATIENCE)

    def _list(self, route: Route) -> None:
        answer = route.fetch(url=route.request.url.replace(LAN_NAME, "127.0.0.1"))
        listed = answer.json()
        listed["data"] += self.models
        route.fulfill(response=answer, json=listed)

    def _speak(self, route: Route) -> None:
        self.spoken.append(route.request.post_data_json)
        if self.status != 200:
            route.fulfill(status=self.status, json={"error": {"message": "The voice is hoarse.", "code": "x"}})
            return
        samples = np.full(int(24_000 * self.seconds), 0.5 * 32768, "<i2")
        route.fulfill(body=samples.tobytes(), content_type="audio/pcm")

    def _transcribe(self, route: Route) -> None:
        self.recordings.append(route.request)
        route.fulfill(json={"text": self.text})


def _model(name: str, capability: str) -> dict[str, Any]:
    return {"id": name, "state": "unloaded", "progress": None, "error": None, "capabilities": [capability]}


@pytest.fixture
def voice(open_page: Opener, scripted: ScriptedServer) -> Voice:
    return Voice(*open_page(scripted.url))


def test_an_answer_is_read_aloud(voice: Voice, scripted: ScriptedServer) -> None:
    scripted.answer = (
        "# Mills\n\nA **mill** by the [stream](https://x.test).\n\n```python\nprint(1)\n```\n\n- Wheel\n- Stone $x^2$"
    )
    voice.open().chat.ask("Hello")
    voice.chat.finished()
    voice.read.click()
    expect(voice.read).to_be_visible()  # again, once it was heard
    (asked,) = voice.spoken
    assert asked["model"] == "voice" and asked["response_format"] == "pcm"
    spoken = [line.strip() for line in asked["input"].splitlines() if line.strip()]
    assert spoken == ["Mills", "A mill by the stream.", "(Code.)", "Wheel", "Stone"]
    played = voice.page.evaluate("window.played")
    assert sum(each["seconds"] for each in played) == pytest.approx(SHORT)
    assert played[0]["peak"] == pytest.approx(0.5, abs=1e-3)


def test_a_real_model_reads_aloud(open_page: Opener, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Nothing is played by the test here: the page finds the model, and plays what it says."""
    kokoro = ModelSpec(str(tiny_model("kokoro")), name="voice", load="use")
    with scripted_server(tmp_path / "example-model", kokoro) as server:
        page, _ = open_page(server.url)
        page.add_init_script(f"({NOTE_SOUND})()")
        chat = ChatPage(page).open()
        chat.ask("Hello")
        chat.finished()
        page.get_by_role("button", name="Read aloud").click()
        page.wait_for_function("() => window.played.length > 0", timeout=PATIENCE)
        expect(page.get_by_role("button", name="Read aloud")).to_be_visible()
        assert sum(each["seconds"] for each in page.evaluate("window.played")) > 0.01
        page.close()  # it polls the server


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_reading_is_stopped(voice: Voice, how: str) -> None:
    voice.seconds = LONG
    voice.open().chat.ask("Hello")
    voice.chat.finished()
    voice.read.focus()
    voice.page.keyboard.press("Enter")
    expect(voice.stop_reading).to_be_focused()
    if how == "button":
        voice.page.keyboard.press("Enter")
        expect(voice.read).to_be_focused()
    elif how == "escape":
        voice.page.keyboard.press("Escape")
        expect(voice.read).to_be_visible()
    else:
        voice.page.get_by_role("button", name="New chat").click()
        voice.chat.ask("Again")
        voice.chat.finished()
        expect(voice.read).to_have_count(1)


def test_another_answer_is_read_instead(voice: Voice) -> None:
    voice.seconds = LONG
    voice.open().chat.ask("One")
    voice.chat.finished()
    voice.chat.ask("Two")
    voice.chat.finished(2)
    voice.read.first.click()
    expect(voice.stop_reading).to_have_count(1)
    voice.chat.answer(1).get_by_role("button", name="Read aloud").click()
    expect(voice.chat.answer(1).get_by_role("button", name="Stop reading")).to_be_visible()
    expect(voice.stop_reading).to_have_count(1)


def test_a_voice_that_fails_says_so(voice: Voice) -> None:
    voice.status = 500
    voice.watch.expected.append("500")
    voice.open().chat.ask("Hello")
    voice.chat.finished()
    voice.read.click()
    expect(voice.chat.notice).to_contain_text("The voice is hoarse.")
    expect(voice.read).to_be_visible()


def test_without_speech_models_nothing_is_offered(voice: Voice) -> None:
    voice.models = []
    voice.open().chat.ask("Hello")
    voice.chat.finished()
    assert not voice.read.is_visible() and not voice.record.is_visible()


def test_speech_models_are_no_choice_for_a_chat(voice: Voice) -> None:
    voice.open()
    expect(voice.record).to_be_visible()
    assert voice.page.locator("#model option").all_inner_texts() == ["example-model"]


def test_a_message_is_spoken(voice: Voice) -> None:
    voice.open()
    voice.chat.field.fill("Who said:")
    voice.record.focus()
    voice.page.keyboard.press("Enter")
    expect(voice.finish).to_be_focused()
    voice.wait_for_sound()
    voice.page.keyboard.press("Enter")
    expect(voice.chat.field).to_have_value("Who said: So my fellow Americans.")
    expect(voice.chat.field).to_be_focused()
    expect(voice.record).to_be_visible()
    expect(voice.page.locator("#live")).to_have_text("Transcribed: So my fellow Americans.")
    (request,) = voice.recordings
    body = request.post_data_buffer
    assert body is not None
    assert b'name="model"\r\n\r\near\r\n' in body and b'filename="speech.wav"' in body
    start = body.index(b"RIFF")
    wav = open_wav(body[start : start + 8 + int.from_bytes(body[start + 4 : start + 8], "little")])
    assert wav.rate == 16_000 and wav.seconds > 0.1


def test_a_recording_is_thrown_away(voice: Voice) -> None:
    voice.open()
    voice.record.click()
    expect(voice.finish).to_be_visible()
    voice.page.keyboard.press("Escape")
    expect(voice.record).to_be_visible()
    assert voice.chat.field.input_value() == "" and voice.recordings == []


def test_a_recording_without_words(voice: Voice) -> None:
    voice.text = " "
    voice.open()
    voice.record.click()
    expect(voice.finish).to_be_visible()
    voice.wait_for_sound()
    voice.finish.click()
    expect(voice.chat.notice).to_contain_text("No words were heard")
    expect(voice.record).to_be_visible()


def test_a_blocked_microphone(voice: Voice) -> None:
    voice.page.add_init_script(
        'navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException("", "NotAllowedError"))'
    )
    voice.open()
    voice.record.click()
    expect(voice.chat.notice).to_contain_text("The microphone is blocked")
    expect(voice.record).to_be_visible()


def test_browsers_record_on_secure_pages_only(open_page: Opener, scripted: ScriptedServer) -> None:
    """On another machine without HTTPS there is no microphone, so none is offered; answers can be read aloud."""
    voice = Voice(*open_page(scripted.url.replace("127.0.0.1", LAN_NAME)))
    voice.open().chat.ask("Hello")
    voice.chat.finished()
    expect(voice.read).to_be_visible()
    assert not voice.page.evaluate("isSecureContext") and not voice.record.is_visible()


def test_people_with_disabilities_can_use_it(voice: Voice) -> None:
    voice.seconds = LONG
    voice.open().chat.ask("Hello")
    voice.chat.finished()
    voice.read.click()
    expect(voice.stop_reading).to_be_visible()
    voice.record.click()
    expect(voice.finish).to_be_visible()
    assert serious_findings(voice.page) == [], json.dumps(serious_findings(voice.page))
