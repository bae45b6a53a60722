"""What Kokoro says, Whisper writes down: both by one server, over HTTP, with the official client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from millstream.config import ModelSpec, Settings
from support.real_whisper import tiny_en
from support.server import running
from support.tiers import some

__all__ = ["tiny_en"]

SENTENCE = "The quick brown fox jumps over the lazy dog, and the server answers at once."


@pytest.fixture(scope="module")
def client(kokoro: Path, tiny_en: Path) -> Iterator[openai.OpenAI]:
    models = (ModelSpec(str(kokoro), name="voice"), ModelSpec(str(tiny_en), name="ears"))
    with (
        running(Settings(models, port=0, isolation="thread")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made,
    ):
        yield made


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


@pytest.mark.parametrize("form", some(["wav", "mp3"], ["mp3"]))
def test_a_spoken_sentence_comes_back_word_for_word(client: openai.OpenAI, form: str) -> None:
    spoken = client.audio.speech.create(model="voice", voice="af_heart", input=SENTENCE, response_format=form)  # type: ignore[arg-type]
    heard = client.audio.transcriptions.create(model="ears", file=(f"speech.{form}", spoken.content))
    assert words(heard.text) == words(SENTENCE)
