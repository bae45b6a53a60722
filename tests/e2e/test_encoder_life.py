"""Kills, hangs, budget, eviction and unloads of engines that embed and rank: as for those that generate."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil

from millstream.backend.environment import YIELDING
from millstream.config import Settings
from support.server import RunningServer, running

PATIENCE = 60
INPUTS = ["the mill stands by the stream", "bread is baked"]


def embed(server: RunningServer, inputs: list[str] | None = None) -> httpx.Response:
    body = {"model": "embed", "input": inputs or INPUTS}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=PATIENCE)


def rank(server: RunningServer) -> httpx.Response:
    body = {"model": "rank", "query": "mill", "documents": INPUTS}
    return httpx.post(f"{server.url}/v1/rerank", json=body, timeout=PATIENCE)


def vectors(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]])


def card(server: RunningServer, name: str = "embed") -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/models/{name}", timeout=PATIENCE).json()
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it did not happen")


def _active(server: RunningServer) -> int:
    return int(server.call(lambda mill: mill.mill.hub.card("embed").active))


def test_an_embedders_process_leaves_the_cores_to_a_chats(three_models: tuple[str, ...]) -> None:
    with running(Settings(models=three_models[:2], port=0, isolation="process")) as server:
        chats, embeds = (psutil.Process(card(server, name)["pid"]).nice() for name in ("chat", "embed"))
        assert chats == psutil.Process().nice() and embeds == min(19, chats + YIELDING)
    with running(Settings(models=three_models[1:2], port=0, isolation="process")) as server:
        assert psutil.Process(card(server)["pid"]).nice() == chats, "there is nobody to yield to"
    assert psutil.Process().nice() == chats


def test_a_killed_engine_fails_its_requests_and_is_replaced(three_models: tuple[str, ...]) -> None:
    settings = Settings(models=three_models[1:], port=0, isolation="process")
    with running(settings) as server, ThreadPoolExecutor(4) as pool:
        expected = vectors(embed(server))
        before = card(server)["pid"]
        os.kill(before, signal.SIGSTOP)  # so that it cannot answer before it is killed
        waiting = [pool.submit(embed, server) for _ in range(3)]
        wait_for(lambda: _active(server) == 3)
        os.kill(before, signal.SIGKILL)
        for reply in (future.result(PATIENCE) for future in waiting):
            assert reply.status_code == 503 and "killed by signal 9" in reply.json()["error"]["message"]
        assert rank(server).status_code == 200
        np.testing.assert_allclose(vectors(embed(server)), expected, atol=3e-6)
        after = card(server)
        assert (after["state"], after["restarts"], card(server, "rank")["restarts"]) == ("ready", 1, 0)
        assert not psutil.pid_exists(before)


def test_a_hung_engine_is_detected_and_replaced(three_models: tuple[str, ...]) -> None:
    settings = Settings(models=three_models[1:2], port=0, isolation="process", step_timeout=4.0)
    with running(settings) as server:
        expected = vectors(embed(server))
        os.kill(card(server)["pid"], signal.SIGSTOP)
        reply = embed(server)
        assert reply.status_code == 503 and "stopped" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1
        np.testing.assert_allclose(vectors(embed(server)), expected, atol=3e-6)
        assert card(server)["restarts"] == 1


def test_models_take_turns_in_a_budget_for_one(three_models: tuple[str, ...]) -> None:
    settings = Settings(models=three_models[1:], port=0, isolation="thread", load="use", memory=400 * 2**20)
    with running(settings) as server:
        expected = vectors(embed(server))
        assert card(server)["reserved_bytes"] > 256 * 2**20
        for _ in range(2):
            assert rank(server).status_code == 200
            assert (card(server)["state"], card(server, "rank")["state"]) == ("unloaded", "ready")
            np.testing.assert_allclose(vectors(embed(server)), expected, atol=3e-6)
            assert (card(server)["state"], card(server, "rank")["state"]) == ("ready", "unloaded")


def test_a_budget_that_is_too_small_is_said(three_models: tuple[str, ...]) -> None:
    settings = Settings(models=three_models[1:2], port=0, isolation="thread", load="use", memory=100 * 2**20)
    with running(settings) as server:
        reply = embed(server)
        assert reply.status_code == 507, reply.text
        assert "needs at least 0.25 GiB; the budget is 100.0 MiB" in reply.json()["error"]["message"]


def test_unloads_that_race_with_requests_never_give_a_500(three_models: tuple[str, ...]) -> None:
    settings = Settings(models=three_models[1:2], port=0, isolation="thread")
    with running(settings) as server, ThreadPoolExecutor(5) as pool:
        expected = vectors(embed(server))

        def ask(_: int) -> int:
            reply = embed(server)
            if reply.status_code == 200:
                np.testing.assert_allclose(vectors(reply), expected, atol=3e-6)
            return reply.status_code

        def unload() -> None:
            for _ in range(5):
                reply = httpx.post(f"{server.url}/v1/models/embed/unload", timeout=PATIENCE)
                assert reply.status_code == 200, reply.text

        unloads = pool.submit(unload)
        statuses = list(pool.map(ask, range(40)))
        unloads.result(PATIENCE)
        assert set(statuses) <= {200, 409, 503} and 200 in statuses
        assert embed(server).status_code == 200
