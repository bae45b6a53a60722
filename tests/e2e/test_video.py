"""Videos over the whole server: tiny random models of two families that take them, real files, real decoding."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from media.web import running_web
from millstream.config import Settings
from support.server import running
from support.tiny_vision import write_servable_qwen
from support.video_files import LOSSLESS, animated, audio_only, encode_video, pictures

COUNT = 15
DRAWN = pictures(COUNT)


def uri(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class Asker:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def __call__(self, source: str) -> httpx.Response:
        parts = [{"type": "video_url", "video_url": {"url": source}}, {"type": "text", "text": "What happens?"}]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "max_tokens": 10, "temperature": 0}
        return self._http.post("/v1/chat/completions", json={**body, "logprobs": True})

    def answer(self, source: str) -> tuple[int, list[tuple[str, float]]]:
        """The tokens of the prompt, and what was said, with how sure the model was."""
        reply = self(source)
        assert reply.status_code == 200, reply.text
        said = reply.json()["choices"][0]["logprobs"]["content"]
        return reply.json()["usage"]["prompt_tokens"], [(each["token"], each["logprob"]) for each in said]

    def refusal(self, source: str) -> str:
        reply = self(source)
        assert reply.status_code == 400, reply.text
        problem = reply.json()["error"]
        assert (problem["code"], problem["param"]) == ("invalid_media", "messages[0].content[0]")
        message: str = problem["message"]
        return message

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    folder = write_servable_qwen(tmp_path_factory.mktemp("video") / "tiny", request.param)
    settings = Settings((str(folder),), port=0, max_batch=4, allow_private_media=True, media_timeout=60.0)
    with running(settings) as server:
        asker = Asker(server.url)
        yield asker
        asker.close()


def close(one: tuple[int, Any], other: tuple[int, Any]) -> bool:
    """The same prompt and the same words; how sure the model was, but for rounding in other company."""
    words = [token for token, _ in one[1]] == [token for token, _ in other[1]]
    sure = [logprob for _, logprob in one[1]] == pytest.approx([logprob for _, logprob in other[1]], abs=1e-3)
    return one[0] == other[0] and words and sure


def test_a_file_is_answered_as_the_same_frames_in_an_animated_picture(ask: Asker) -> None:
    file = ask.answer(uri(encode_video(DRAWN, g="4", **LOSSLESS)))
    assert close(file, ask.answer(uri(animated(DRAWN), "image/png")))
    assert close(file, ask.answer(uri(encode_video(DRAWN, "mov", **LOSSLESS), "video/quicktime")))
    turned = encode_video(list(reversed(DRAWN)), **LOSSLESS)
    assert not close(file, ask.answer(uri(turned))), "the model does not look"


def test_longer_videos_have_more_places(ask: Asker) -> None:
    short, long = (ask.answer(uri(encode_video(pictures(count), "webm", codec="libvpx")))[0] for count in (20, 60))
    assert long > short


def test_a_file_that_is_fetched(ask: Asker) -> None:
    data = encode_video(DRAWN, **LOSSLESS)
    with running_web() as web:
        assert close(ask.answer(web.body("/a.mp4", data, kind="video/mp4")), ask.answer(uri(data)))


def test_several_at_once(ask: Asker) -> None:
    sources = [uri(encode_video([image] * 5, **LOSSLESS)) for image in (DRAWN[3], DRAWN[9], DRAWN[3])]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(ask.answer, sources))
    assert close(together[0], together[2])
    assert all(close(one, ask.answer(source)) for one, source in zip(together, sources, strict=True))


def test_what_cannot_be_read_is_refused_and_the_server_goes_on(ask: Asker) -> None:
    whole = encode_video(DRAWN)
    assert "damaged" in ask.refusal(uri(whole[: len(whole) // 2]))
    assert "no video stream" in ask.refusal(uri(audio_only()))
    assert "send MP4, MOV, WebM" in ask.refusal(uri(b"#EXTM3U\n/etc/passwd\n"))
    assert ask(uri(whole)).status_code == 200
