"""Parameters of requests, from the JSON of every dialect to what the engine gets."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from support.scripted_server import ScriptedServer, scripted_server

TEXT = {"prompt": "Hi", "max_tokens": 4, "temperature": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("parameters") / "tiny") as running:
        yield running


@pytest.fixture
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    server.submits.clear()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def drawn_seeds(server: ScriptedServer, http: httpx.Client, **more: object) -> list[int]:
    """What the sampler makes of the seeds of all choices."""
    server.submits.clear()
    assert http.post("/v1/completions", json=TEXT | more).status_code == 200
    found = [submit.sampling.seed for submit in server.submits]
    return sorted((seed ^ (seed >> 32)) & 0xFFFFFFFF for seed in found)


@pytest.mark.parametrize("seed", [-128, -2, -1, 0, 7, 2**32 - 2, 2**63 - 1, -(2**63)])
def test_choices_have_seeds_of_their_own(server: ScriptedServer, http: httpx.Client, seed: int) -> None:
    found = drawn_seeds(server, http, seed=seed, n=16)
    assert len(set(found)) == 16
    assert (drawn_seeds(server, http, seed=seed, n=16) == found) is (seed != -1), "-1 is a random seed"
