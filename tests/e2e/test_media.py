"""Images in requests: fetched, checked, prepared and inserted into the prompt, or refused, without blocking others.

The backend is a fake: no model encodes the images here.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from media.web import Web, running_web
from millstream.config import Settings
from millstream.engine.generation.messages import Generate
from millstream.models.source import ModelSource
from support.fake import FakeBackend, Gate
from support.server import RunningServer, running
from support.shapes import Shape, data_uri, draw

ASSET = Path(__file__).parent.parent / "assets" / "shapes-vlm"
IMAGE_TOKENS = 36
RED = draw([Shape("red", "circle", 0.5, 0.5, 0.3, paint=(230, 30, 30))])
BLUE = draw([Shape("blue", "square", 0.4, 0.6, 0.2, paint=(30, 50, 220))], 120, 90)


class Bench:
    """A server with a fake backend that records the requests of its engine."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.gate = Gate()
        self.gate.open()
        self.backends: list[FakeBackend] = []
        self._running = running(Settings((str(folder),), port=0, grace=0.0, **settings), self._make)

    def _make(self, source: ModelSource, settings: Settings) -> FakeBackend:
        self.backends.append(FakeBackend(max_rows=settings.max_batch, vocab_size=4096, gate=self.gate))
        return self.backends[-1]

    def __enter__(self) -> Bench:
        self.server: RunningServer = self._running.__enter__()
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        return self

    def __exit__(self, *error: Any) -> None:
        self.gate.open()
        self.http.close()
        self._running.__exit__(*error)

    def ask(self, *parts: Any, before: tuple[Any, ...] = (), **fields: Any) -> httpx.Response:
        messages = [*before, {"role": "user", "content": list(parts)}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4, **fields})

    def submits(self) -> list[Generate]:
        return [chunk.request for plan in self.backends[0].plans for chunk in plan.prefill if chunk.start == 0]


@pytest.fixture(scope="module")
def common() -> Iterator[Bench]:
    with Bench(ASSET) as bench:
        yield bench


@pytest.fixture
def bench(common: Bench) -> Bench:
    common.backends[0].plans.clear()
    return common


@pytest.fixture
def web() -> Iterator[Web]:
    with running_web() as server:
        yield server


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def image(source: str | Image.Image) -> dict[str, Any]:
    url = source if isinstance(source, str) else data_uri(source)
    return {"type": "image_url", "image_url": {"url": url}}


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def test_images_are_inserted_where_the_message_has_them(bench: Bench) -> None:
    earlier = {"role": "user", "content": [image(RED), text("What is in the picture?")]}
    reply_before = {"role": "assistant", "content": "red circle"}
    reply = bench.ask(text("And"), image(BLUE), image(RED), text("?"), before=(earlier, reply_before))
    assert reply.status_code == 200, reply.text
    [submit] = bench.submits()
    assert [media.length for media in submit.media] == [IMAGE_TOKENS] * 3
    token = submit.prompt[submit.media[0].start]
    assert submit.prompt.count(token) == 3 * IMAGE_TOKENS
    for media in submit.media:
        assert set(submit.prompt[media.start : media.start + media.length]) == {token}
    first, second, third = submit.media
    assert first.start + IMAGE_TOKENS < second.start
    assert second.start + IMAGE_TOKENS == third.start
    assert first.digest == third.digest != second.digest
    assert submit.contents == tuple((media.start, media.digest) for media in submit.media)
    assert reply.json()["usage"]["prompt_tokens"] == len(submit.prompt)


def test_an_image_is_prepared_for_its_model(bench: Bench) -> None:
    assert bench.ask(image(RED)).status_code == 200
    [[name, tensor]] = bench.submits()[0].media[0].tensors
    assert (name, tensor.dtype, tensor.shape) == ("pixel_values", "float32", (1, 3, 60, 60))
    pixels = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)[0]
    assert np.allclose(pixels[:, 0, 0], 1.0)
    assert np.allclose(pixels[:, 30, 30], np.array([230, 30, 30]) / 127.5 - 1, atol=1e-5)


def test_text_only_requests_have_no_media(bench: Bench) -> None:
    assert bench.ask(text("Say"), text(" hello.")).status_code == 200
    [submit] = bench.submits()
    assert (submit.media, submit.contents) == ((), ())


def test_the_official_clients_example(bench: Bench) -> None:
    with openai.OpenAI(base_url=f"{bench.server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="shapes-vlm",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What's in this image?"},
                        {"type": "image_url", "image_url": {"url": data_uri(RED, "jpeg"), "detail": "high"}},
                    ],
                }
            ],
            max_tokens=4,
        )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > IMAGE_TOKENS


@pytest.mark.parametrize(
    "part, words",
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "takes text and images only"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "takes text and images only"),
        (image("http://127.0.0.1:9/x.png"), "not a public address"),
        (image("http://169.254.169.254/latest/meta-data"), "not a public address"),
        (image("/etc/passwd"), "reads no local files"),
        (image("data:image/png;base64,aGVsbG8="), "not in a supported image format; send a PNG, JPEG"),
        (image("data:image/png;base64,%"), "not valid base64"),
        (image("ftp://host/a.png"), "send an http:// or https:// URL or a data URI"),
    ],
)
def test_refusals_say_what_and_where(bench: Bench, part: Any, words: str) -> None:
    problem = error(bench.ask(text("x"), part))
    assert words in problem["message"]
    assert problem["param"] == "messages[0].content[1]"
    assert bench.submits() == []


def test_the_models_own_placeholder_in_a_text_is_plain_text(bench: Bench) -> None:
    answer = bench.ask(text("What is <image> here?"), image(RED))
    assert answer.status_code == 200, answer.text
    (submit,) = bench.submits()
    assert len(submit.media) == 1


def test_the_models_own_placeholder_is_refused_if_special_tokens_are_allowed() -> None:
    with Bench(ASSET, allow_special_tokens=True) as bench:
        problem = error(bench.ask(text("What is <image> here?"), image(RED)))
        assert "Remove '<image>' from the text of messages" in problem["message"]


def test_a_text_model_refuses_images(servable: Path) -> None:
    with Bench(servable) as bench:
        problem = error(bench.ask(text("x"), image(RED)))
        assert (problem["code"], problem["param"]) == ("unsupported_parameter", "messages[0].content[1]")
        assert problem["message"].startswith("This model takes text only")
        assert bench.ask(text("x")).status_code == 200


def test_limits_and_permissions_of_the_operator(web: Web, tmp_path: Path) -> None:
    RED.save(tmp_path / "a.png")
    limits: dict[str, Any] = {"media_count": 2, "media_pixels": 9500, "media_timeout": 0.3}
    with Bench(ASSET, allow_private_media=True, media_folders=(tmp_path,), **limits) as bench:
        url = web.body("/a.png", (tmp_path / "a.png").read_bytes())
        assert bench.ask(image(url), image(f"file://{tmp_path}/a.png")).status_code == 200
        first, second = bench.submits()[0].media
        assert first.digest == second.digest
        assert "takes at most 2 (--media-count)" in error(bench.ask(image(url), image(url), image(url)))["message"]
        assert "--media-pixels" in error(bench.ask(image(BLUE)))["message"]
        assert "--media-timeout" in error(bench.ask(image(web.silent("/slow"))))["message"]


def test_a_busy_engine_rejects_before_fetching_and_names_active_requests(web: Web) -> None:
    url = web.body("/a.png", b"never asked for")
    with Bench(ASSET, max_batch=1, fail_fast=True, allow_private_media=True) as bench, ThreadPoolExecutor(1) as pool:
        bench.gate._open.clear()
        running = pool.submit(bench.ask, text("What is in the picture?"), image(RED))
        bench.gate.wait_entered()
        refused = bench.ask(text("What is in the picture?"), image(url))
        problem = error(refused, 503)
        assert problem["code"] == "engine_busy"
        assert "1 active (request 1 for " in problem["message"]
        assert "retry-after" in refused.headers
        assert web.asked == []
        bench.gate.open()
        assert running.result(30).status_code == 200
        assert bench.ask(text("again"), image(BLUE)).status_code == 200


def test_a_slow_media_host_does_not_block_text_prompts(web: Web) -> None:
    """More fetches hang than the pool for prompts has threads."""
    with Bench(ASSET, allow_private_media=True) as bench, ThreadPoolExecutor(6) as pool:
        url = web.silent("/slow")
        slow = [pool.submit(bench.ask, image(url)) for _ in range(6)]
        while len(web.asked) < 6:
            threading.Event().wait(0.01)
        assert bench.ask(text("Say hello.")).status_code == 200
        assert not any(reply.done() for reply in slow)
        web.release.set()
        assert {reply.result(30).status_code for reply in slow} == {400}


def test_the_event_loop_responds_while_a_large_image_is_prepared(bench: Bench) -> None:
    large = data_uri(Image.effect_noise((500, 500), 50).resize((6000, 6000)).convert("RGB"), "jpeg")
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(bench.ask, image(large))
        waits = []
        while not pending.done():
            began = time.monotonic()
            assert bench.http.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
        assert pending.result().status_code == 200
    assert len(waits) > 5, "the image was prepared too quickly for this test"
    # A busy machine may delay single responses; a loop that waits for the image would delay one almost all the time.
    assert max(waits) < 0.8 * sum(waits)


def test_slow_preparation_is_logged_with_counts(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    buffer = io.BytesIO()
    RED.save(buffer, "png")
    quick = web.body("/quick", buffer.getvalue())

    def respond_late(request: Any) -> None:
        web.release.wait(1.2)
        web.answers["/quick"](request)

    web.answers["/late"] = respond_late
    with Bench(ASSET, allow_private_media=True) as bench, caplog.at_level(logging.WARNING):
        assert bench.ask(image(quick), image(f"{web.url}/late")).status_code == 200
    [line] = [record.message for record in caplog.records if "; slow prepare" in record.message]
    assert "prompt tokens, 2 media files, 4 tokens out" in line


SMALL = RED.resize((60, 60))
BUDGET = 80_000
"""Bytes: enough for one such image, which takes 43,200 once prepared, but not for two."""


def test_media_of_running_requests_count_towards_the_budget_until_they_end() -> None:
    with Bench(ASSET, media_memory=BUDGET) as bench, ThreadPoolExecutor(1) as pool:
        bench.gate._open.clear()
        running = pool.submit(bench.ask, image(SMALL))
        bench.gate.wait_entered()
        refused = bench.ask(image(SMALL))
        problem = error(refused, 503)
        assert problem["code"] == "engine_busy"
        assert "(--media-memory)" in problem["message"]
        assert int(refused.headers["retry-after"]) > 0
        bench.gate.open()
        assert running.result(30).status_code == 200
        assert bench.ask(image(SMALL)).status_code == 200
        memory = bench.server.call(lambda server: server.mill.services.generation._files._memory)
        assert (memory.used, memory.prepared, memory.waiting) == (0, 0, 0)


def test_media_that_can_never_fit_are_refused() -> None:
    with Bench(ASSET, media_memory=BUDGET) as bench:
        assert "--media-memory" in error(bench.ask(image(SMALL), image(SMALL)))["message"]
        assert "--media-memory" in error(bench.ask(image(SMALL), n=2))["message"]
        problem = error(bench.ask(image(SMALL.resize((200, 200)))))
        assert "decoding this file takes about" in problem["message"]
        assert problem["param"] == "messages[0].content[0]"
        assert bench.ask(image(SMALL)).status_code == 200
