"""`millstream ps`, against a real server and one that plays models in all states."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from millstream.cli import main
from millstream.cli.ps import cells
from millstream.model_facts import DraftCount, ModelCard, SpeculationCard
from support.agent_stage import Player, playing
from support.terminal import CTRL_C, terminal

CARDS = [
    ModelCard(
        "org/ready", 1, "ready", memory_bytes=3_200_000_000, active=2, waiting=5, max_batch=16,
        capabilities=("completion", "vision"), expires=time.time() + 3500,
        speculation=SpeculationCard(("prompt-lookup",), 5, (DraftCount("prompt-lookup", 20, 15),)),
    ),
    ModelCard("org/loading", 1, "loading", progress=0.42),
    ModelCard("org/broken", 1, "failed", error="its file is damaged"),
    ModelCard("org/later", 1, "unloaded"),
]  # fmt: skip


@pytest.fixture(scope="module")
def player() -> Player:
    return Player(cards=CARDS)


@pytest.fixture(scope="module")
def url(player: Player) -> Iterator[str]:
    with playing(player) as url:
        yield url


def test_the_loaded_models_in_plain_lines(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url]) == 0
    heading, ready, loading, broken = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "STATE", "KIND", "MEMORY", "ROWS", "QUEUE", "DRAFTS", "UNTIL"]
    *shown, left, unit = ready.split()
    assert shown == ["org/ready", "ready", "text,", "images", "3.2", "GB", "2/16", "5", "75%", "right"]
    assert unit == "min" and 1 <= int(left) <= 58  # it shrinks while the test waits for its turn
    assert loading.split()[:3] == ["org/loading", "loading", "42%"]
    assert "failed: its file is damaged" in broken
    assert main(["ps", "--url", url, "--all"]) == 0
    assert "org/later" in capsys.readouterr().out


def test_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url, "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["id"] for model in models] == ["org/ready", "org/loading", "org/broken"]
    assert models[0]["expires_at"].startswith("20")


def test_until_when_a_model_stays() -> None:
    now = time.time()

    def until(expires: str | None) -> str:
        return cells({"id": "m", "state": "ready", "expires_at": expires}, now)[-1]

    assert until(None) == "-"
    assert until("2318-01-01T00:00:00.000000Z") == "always"
    assert until("2020-01-01T00:00:00.000000Z") == "under a minute"


def test_a_server_without_models_and_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with playing(Player(cards=CARDS[3:])) as url:
        assert main(["ps", "--url", url]) == 0
        assert "No model is loaded." in capsys.readouterr().out
    assert main(["ps", "--url", url]) == 1
    assert f"No server answers at {url}" in capsys.readouterr().err


def test_watching_in_a_terminal_shows_changes_until_ctrl_c(player: Player, url: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with terminal("ps", "--watch", "--url", url, environment=environment) as screen:
        screen.wait_for("loading 42%")
        player.cards = [ModelCard("org/loading", 1, "loading", progress=0.77)]
        screen.wait_for("loading 77%")
        screen.send(CTRL_C)
        assert screen.wait_exit() == 0
        assert "\x1b[33m" in screen.raw, "a terminal has colours"
    player.cards = CARDS
    with terminal("ps", "--watch", "--url", url, environment={**environment, "NO_COLOR": "1"}) as plain:
        plain.wait_for("loading 42%")
        plain.send(CTRL_C)
        assert plain.wait_exit() == 0
        assert "\x1b[33m" not in plain.raw
