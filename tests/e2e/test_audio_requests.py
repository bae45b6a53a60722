"""Sounds over the whole server: a tiny Gemma 4 that hears answers as mlx-vlm does, and what is refused says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from millstream.config import Settings
from millstream.media.processors.base import ModelFiles
from millstream.media.processors.gemma import Gemma4Processor
from support.audio_files import audio_part, chunk, riff, tone, wav
from support.server import RunningServer, running
from support.shapes import data_uri
from support.tiny_audio import OneByOne, reference
from support.tiny_vision import AUDIO, IMAGE, VOCAB, WORDS, write_vision_model

SPECIAL = {
    IMAGE: "<|image|>",
    91: "<image|>",
    92: "<|audio>",
    93: "<|image>",
    94: "<audio|>",
    AUDIO: "<|audio|>",
    96: "<eos>",
}
TEMPLATE = (
    "{% for m in messages %}w1 {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|image|>{% elif p.type == 'audio' %}<|audio|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} w2 {% endfor %}"
)
PICTURE = Image.effect_noise((32, 32), 90).convert("RGB")


def write_hearing(folder: Path) -> Path:
    """A model with a tokenizer of words: `w3` is the token 3."""
    write_vision_model(folder, "gemma4-audio")
    words = {"<unk>": 0, **{f"w{number}": number for number in WORDS}, **{name: at for at, name in SPECIAL.items()}}
    assert sorted(words.values()) == list(range(VOCAB))
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"boa_token": "<|audio>", "eoa_token": "<audio|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>", **names})
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hearing(tmp_path_factory.mktemp("hearing") / "hearing")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running(Settings((str(folder),), port=0, max_batch=4, media_bytes=2**20)) as subject:
        yield subject


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def ask(client: openai.OpenAI, *parts: dict[str, Any], **fields: Any) -> Any:
    return client.chat.completions.create(
        model="hearing",
        messages=[{"role": "user", "content": list(parts)}],  # type: ignore[list-item, misc]
        temperature=0,
        max_tokens=10,
        **fields,
    )


@dataclass
class Asked:
    """What mlx-vlm is given for a request: its prompt as text, its audio, and its images as they are prepared."""

    tokenizer: Tokenizer
    written: str
    samples: list[np.ndarray]
    pictures: list[dict[str, np.ndarray]]
    count: int = 10

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(self.written).ids)


def answer(folder: Path, written: str, samples: list[np.ndarray], images: int = 0) -> str:
    """mlx-vlm's own, as the text that a client gets."""
    from mlx_vlm.utils import load_model

    model = load_model(folder)
    if len(samples) > 1:
        model.audio_tower = OneByOne(model.audio_tower)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    looks = Gemma4Processor(ModelFiles.read(folder), "<|image|>").prepare(PICTURE)
    tokens = reference(model, Asked(tokenizer, written, samples, [looks.tensors] * images))  # type: ignore[arg-type]
    end = tokens.index(96) if 96 in tokens else len(tokens)
    return tokenizer.decode(tokens[:end])


def places(count: int) -> str:
    return f"<|audio>{'<|audio|>' * count}<audio|>"


def test_the_official_client(client: openai.OpenAI, folder: Path) -> None:
    recording = tone(440, 3.0)
    reply = ask(client, text("w5 w6"), audio_part(wav(recording, bits=32, code=3)), text("w7"))
    written = f"w1 w5 w6{places(75)}w7 w2"
    assert reply.choices[0].message.content == answer(folder, written, [recording])
    assert reply.usage.prompt_tokens == 5 + 2 + 75
    again = ask(client, text("w5 w6"), audio_part(wav(recording, bits=32, code=3)), text("w7"))
    assert again.choices[0].message.content == reply.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_audio_images_and_text_together(client: openai.OpenAI, folder: Path) -> None:
    first, second = tone(300, 0.3), tone(900, 0.77)
    parts = [
        audio_part(wav(first, bits=32, code=3)),
        {"type": "image_url", "image_url": {"url": data_uri(PICTURE)}},
        text("w9"),
        audio_part(wav(second, bits=64, code=3)),
    ]
    stream = ask(client, *parts, stream=True)
    said = "".join(each.choices[0].delta.content or "" for each in stream if each.choices)
    image = f"<|image>{'<|image|>' * 16}<image|>"
    written = f"w1 {places(8)}{image}w9{places(19)} w2"
    assert said == answer(folder, written, [first, second], images=1)


def test_many_at_once_each_with_its_own_audio(client: openai.OpenAI, folder: Path) -> None:
    """Equal texts and equal lengths: only the audio differs."""
    recordings = [tone(150 + 400 * number, 0.6) for number in range(6)]
    asked = [[audio_part(wav(recording, bits=32, code=3)), text("w3 w4")] for recording in recordings]
    asked += [[text(f"w{number} w8")] for number in range(10, 14)]
    with ThreadPoolExecutor(len(asked)) as pool:
        said = [reply.choices[0].message.content for reply in pool.map(lambda parts: ask(client, *parts), asked)]
    right = [answer(folder, f"w1 {places(15)}w3 w4 w2", [recording]) for recording in recordings]
    assert len(set(right)) > 1, "audio makes no difference here"
    assert said[: len(recordings)] == right
    assert said == [ask(client, *parts).choices[0].message.content for parts in asked], "alone, with the caches warm"


def test_any_rate_and_any_number_of_channels(client: openai.OpenAI) -> None:
    counts = set()
    for rate, channels in ((16_000, 1), (8_000, 2), (44_100, 2), (48_000, 1)):
        recording = np.stack([tone(440, 0.5, rate)] * channels, axis=1)
        counts.add(ask(client, audio_part(wav(recording, rate, bits=24)), text("w3")).usage.prompt_tokens)
    assert len(counts) == 1


HALF = tone(440, 0.5)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MP3": (
        audio_part(b"ID3\x04" + bytes(200), "mp3"),
        "this audio file is damaged",
    ),
    "MP3 that is called WAV": (audio_part(b"\xff\xfb\x90\x64" + bytes(200)), "this audio file is damaged"),
    "no audio": (audio_part(b"hello"), "not audio in a supported format; send WAV"),
    "nothing": (audio_part(b""), "the media file is empty"),
    "no base64": ({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}, "not valid base64"),
    "cut off": (audio_part(wav(HALF)[:-10]), "The file is truncated"),
    "4 GB": (
        audio_part(riff(wav(HALF)[12:36], chunk(b"data", bytes(8), 2**32 - 1))),
        "should have 4294967295 bytes but only 8",
    ),
    "NaN": (audio_part(wav(np.array([np.nan] * 999), bits=32, code=3)), "samples that are NaN or infinite"),
    "rate 0": (audio_part(wav(HALF, 0)), "0 samples per second; supported are 1000 to 192000"),
    "too short": (audio_part(wav(HALF[:100])), "too short for this model"),
    "too long": (audio_part(wav(tone(440, 31, 8_000), 8_000)), "31.00 s long; this model takes at most 30 s per file"),
    "too large": (audio_part(wav(tone(440, 34))), "this server takes at most 1048576 (--media-bytes)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_where(name: str, client: openai.OpenAI) -> None:
    part, words = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, text("w3"), part)
    problem = refused.value.body
    assert isinstance(problem, dict)
    assert words in problem["message"]
    assert (problem["code"], problem["param"]) == ("invalid_media", "messages[0].content[1]")


def test_the_models_own_names_in_a_text(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="from the text of messages"):
        ask(client, text("w3 <|audio|>"), audio_part(wav(HALF)))


def test_the_operator_may_take_less(folder: Path) -> None:
    with running(Settings((str(folder),), port=0, media_seconds=0.25, isolation="thread")) as subject:
        body = {"messages": [{"role": "user", "content": [audio_part(wav(HALF))]}], "max_tokens": 2}
        reply = httpx.post(f"{subject.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "0.50 s long; this server takes at most 0.25 s (--media-seconds)" in reply.json()["error"]["message"]


def test_a_tower_that_is_named_and_not_there(tmp_path: Path) -> None:
    """mlx-vlm leaves such a tower out: the audio is refused, not prefilled as tokens without features."""
    import mlx.core as mx

    folder = write_hearing(tmp_path / "deaf")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    without_audio = {name: value for name, value in weights.items() if "audio" not in name}
    assert len(without_audio) < len(weights)
    mx.eval(without_audio)
    mx.save_safetensors(str(folder / "model.safetensors"), without_audio)
    with running(Settings((str(folder),), port=0, isolation="thread")) as subject:
        body = {"messages": [{"role": "user", "content": [audio_part(wav(HALF))]}], "max_tokens": 2}
        reply = httpx.post(f"{subject.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("This model takes text and images only")
