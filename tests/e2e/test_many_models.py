"""Several models in one server: they do not affect each other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.config import ModelSpec, Settings
from millstream.models.source import ModelSource
from support.scripted import ScriptedBackend
from support.server import RunningServer, running
from support.tiers import some
from support.tiny import write_servable

PATIENCE = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of the same size with different answers."""
    root = tmp_path_factory.mktemp("three")
    return [write_servable(root / name, seed=seed) for seed, name in enumerate(("one", "two", "three"), 1)]


def ask(url: str, model: str, prompt: str = "hello", **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def text(url: str, model: str, prompt: str = "hello", **more: Any) -> str:
    reply = ask(url, model, prompt, **more)
    assert reply.status_code == 200, reply.text
    answer: str = reply.json()["choices"][0]["text"]
    return answer


def cards(url: str) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]}


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> dict[tuple[str, str], str]:
    """The answers of each model when it is served alone."""
    answers = {}
    for folder in folders:
        with running(Settings(models=(str(folder),), port=0, isolation="thread")) as server:
            for prompt in ("hello", "mill", "a longer prompt about a stream"):
                answers[folder.name, prompt] = text(server.url, folder.name, prompt)
    assert len(set(answers.values())) == len(answers), "all answers must differ for the comparison to be meaningful"
    return answers


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_concurrent_engines_answer_as_each_does_alone(
    isolation: str, folders: list[Path], alone: dict[tuple[str, str], str]
) -> None:
    settings = Settings(models=tuple(map(str, folders[:2])), port=0, isolation=isolation)
    with running(settings) as server, ThreadPoolExecutor(16) as pool:
        wanted = [key for key in alone if key[0] != "three"] * 5
        answers = list(pool.map(lambda key: text(server.url, *key), wanted))
        by_name = cards(server.url)
    assert answers == [alone[key] for key in wanted]
    assert {card["isolation"] for card in by_name.values()} == {isolation}
    assert len({card["thread"] for card in by_name.values()}) == 2


def test_a_hundred_first_requests_load_a_model_once(folders: list[Path], alone: dict[tuple[str, str], str]) -> None:
    settings = Settings(models=(str(folders[0]),), port=0, load="use", isolation="thread")
    with running(settings) as server, ThreadPoolExecutor(100) as pool:
        before = cards(server.url)["one"]
        assert (before["state"], before["thread"], before["memory_bytes"]) == ("unloaded", None, 0)
        answers = set(pool.map(lambda _: text(server.url, "one"), range(100)))
        assert answers == {alone["one", "hello"]}
        card = cards(server.url)["one"]
        engines = [thread for thread in threading.enumerate() if thread.name == "engine-one"]
        assert (card["state"], len(engines)) == ("ready", 1)
        loads = server.call(lambda server: server.mill.hub._models["one"].loads)
    assert loads == 1


def test_admin_routes(folders: list[Path]) -> None:
    spec = ModelSpec(str(folders[0]), name="org/one", aliases=("gpt-4o",), sampling=(("temperature", 0.0),))
    with running(Settings(models=(spec, str(folders[1])), port=0, isolation="thread", load="use")) as server:
        loaded = httpx.post(f"{server.url}/v1/models/org/one/load", timeout=PATIENCE)
        card = loaded.json()
        assert (loaded.status_code, card["id"], card["state"], card["aliases"]) == (200, "org/one", "ready", ["gpt-4o"])
        assert card["memory_bytes"] > 0
        assert card["kv_bytes_per_token"] > 0
        assert (card["active"], card["waiting"], card["context_length"]) == (0, 0, 512)
        assert (card["pid"] is not None, card["thread"] is not None) == (True, True)
        assert httpx.get(f"{server.url}/v1/models/gpt-4o").json()["id"] == "org/one"
        first = ask(server.url, "gpt-4o", temperature=None).json()
        assert first["model"] == "org/one"
        assert first["choices"][0]["text"] == text(server.url, "org/one"), "the model's default temperature is 0"
        unloaded = httpx.post(f"{server.url}/v1/models/gpt-4o/unload", timeout=PATIENCE).json()
        assert (unloaded["state"], unloaded["memory_bytes"], unloaded["thread"]) == ("unloaded", 0, None)
        assert not [thread for thread in threading.enumerate() if thread.name == "engine-org/one"]
        missing = httpx.post(f"{server.url}/v1/models/nothing/load")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        page = httpx.get(f"{server.url}/metrics").text
        assert 'millstream_model_ready{model="org/one"} 0.0' in page


def test_a_context_that_was_cut_stays_on_the_card_after_an_unload(folders: list[Path]) -> None:
    """Its files promise 512 tokens; the engine has found out that memory is for 300."""

    def short(source: ModelSource, settings: object) -> ScriptedBackend:
        return ScriptedBackend(lambda submit: (), vocab=259, context_length=300)

    with running(Settings(models=(str(folders[0]),), port=0), short) as server:
        assert cards(server.url)["one"]["context_length"] == 300
        unloaded = httpx.post(f"{server.url}/v1/models/one/unload", timeout=PATIENCE).json()
        assert (unloaded["state"], unloaded["context_length"]) == ("unloaded", 300)


@pytest.mark.parametrize("isolation", some(["thread", "process"], ["process"]))
def test_a_prompt_is_not_read_twice(isolation: str, folders: list[Path]) -> None:
    def cached(**more: Any) -> tuple[str, int]:
        reply = ask(server.url, "one", "the stream turns the mill " * 4, **more).json()
        return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(Settings(models=(str(folders[0]),), port=0, isolation=isolation)) as server:
        fresh, none = cached()
        again, some = cached()
        assert (fresh, none) == (again, 0)
        assert some >= 64
        cleared = httpx.post(f"{server.url}/v1/models/one/cache/clear")
        assert (cleared.status_code, cleared.json()["id"]) == (200, "one")
        assert cached() == (fresh, 0)
        assert "millstream_cached_prompt_tokens_total" in httpx.get(f"{server.url}/metrics").text
    with running(Settings(models=(str(folders[0]),), port=0, isolation=isolation, prefix_cache_memory=0)) as server:
        assert [cached(), cached()] == [(fresh, 0), (fresh, 0)]


def corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "perpetuum-mobile"}))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


DAMAGES = {corrupt: "safetensors", remove: "safetensors", change_type: "perpetuum-mobile", truncate: ""}


@pytest.mark.parametrize(
    ("damage", "words", "isolation"),
    some(
        [(damage, words, isolation) for damage, words in DAMAGES.items() for isolation in ("thread", "process")],
        [*((damage, words, "thread") for damage, words in DAMAGES.items()), (corrupt, "safetensors", "process")],
    ),
)
def test_a_model_that_cannot_be_loaded_is_a_clear_error_and_the_others_serve(
    damage: Callable[[Path], None], words: str, isolation: str, folders: list[Path], tmp_path: Path
) -> None:
    broken = write_servable(tmp_path / "broken")
    damage(broken)
    settings = Settings(models=(str(folders[0]), str(broken)), port=0, isolation=isolation)
    with running(settings) as server:
        card = cards(server.url)["broken"]
        assert card["state"] == "failed"
        assert words in card["error"]
        refused = ask(server.url, "broken")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert card["error"] in refused.json()["error"]["message"]
        assert text(server.url, "one")


@pytest.fixture
def budget(folders: list[Path]) -> int:
    """Enough memory for two of the three models, but not even for the weights of the third."""
    with running(Settings(models=(str(folders[0]),), port=0, isolation="thread", memory=2**30)) as server:
        one: int = cards(server.url)["one"]["reserved_bytes"]
    return 2 * one + 100_000


@pytest.fixture
def memory(budget: int, folders: list[Path]) -> Iterator[tuple[RunningServer, list[int]]]:
    """Three models in a memory budget for two; their memory use is sampled all the time."""
    settings = Settings(models=tuple(map(str, folders)), port=0, load="use", isolation="thread", memory=budget)
    with running(settings) as server:
        samples: list[int] = []
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.01):
                samples.append(sum(card["memory_bytes"] for card in cards(server.url).values()))

        watcher = threading.Thread(target=sample)
        watcher.start()
        yield server, samples
        done.set()
        watcher.join()


def test_three_models_in_a_budget_for_two(
    memory: tuple[RunningServer, list[int]], budget: int, alone: dict[tuple[str, str], str], whole: bool
) -> None:
    server, samples = memory
    wanted = [*alone] * (4 if whole else 2)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda key: text(server.url, *key), wanted))
    assert answers == [alone[key] for key in wanted]
    loads = server.call(lambda server: [entry.loads for entry in server.mill.hub._models.values()])
    assert sum(loads) > 3, "no model was evicted"
    assert samples
    assert max(samples) <= budget
    states = [card["state"] for card in cards(server.url).values()]
    assert states.count("ready") == 2


def test_a_model_that_cannot_fit_is_507_and_evicts_no_other(folders: list[Path], budget: int, tmp_path: Path) -> None:
    large = write_servable(tmp_path / "large", hidden_size=512, intermediate_size=4096, num_hidden_layers=8)
    settings = Settings(models=(str(folders[0]), str(large)), port=0, load="use", isolation="thread", memory=budget)
    with running(settings) as server:
        assert text(server.url, "one")
        refused = ask(server.url, "large")
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "insufficient_memory")
        assert "--memory" in refused.json()["error"]["message"]
        assert {name: card["state"] for name, card in cards(server.url).items()} == {
            "one": "ready",
            "large": "unloaded",
        }
