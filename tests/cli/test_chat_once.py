"""The one-shot form of `millstream chat`: arguments, pipes, exit codes, and a private server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millstream.cli.server_client import ServerClient
from millstream.errors import BadRequest
from millstream.model_facts import ModelCard
from millstream.types import ChatPrompt, Delta, FinishReason, GenerationRequest
from support.agent_stage import Player, playing

PATIENCE = 120
CARDS = [
    ModelCard("org/talker", 1, "ready", ("talk",), context_length=4096, capabilities=("completion",)),
    ModelCard("org/other", 1, "unloaded"),
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "millstream", "chat", *arguments]


def reasons(request: GenerationRequest) -> list[Delta]:
    return [Delta(0, reasoning="Hm."), Delta(0, "An **answer"), Delta(0, "**.", finish_reason=FinishReason.STOP)]


@pytest.fixture(scope="module")
def player() -> Player:
    return Player(reasons, CARDS)


@pytest.fixture(scope="module")
def url(player: Player) -> Iterator[str]:
    with playing(player) as url:
        yield url


@pytest.fixture
def environment(url: str, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    return kept | {"MILLSTREAM_URL": url, "XDG_STATE_HOME": str(tmp_path)}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    def start(*arguments: str, pipe: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            input=pipe,
            capture_output=True,
            text=True,
            env=environment,
            timeout=PATIENCE,
            check=False,
        )

    return start


def asked(player: Player) -> tuple[str, list[tuple[str, str]]]:
    request = player.requests[-1]
    prompt = request.prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return request.model, [(message["role"], str(message["content"])) for message in prompt.messages]


def test_only_the_answer_goes_to_standard_output(run: Run, player: Player) -> None:
    done = run("talk", "Why?", "--system", "Be short.", "--temperature", "0.5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "An **answer**.\n", "")
    assert asked(player) == ("org/talker", [("system", "Be short."), ("user", "Why?")])
    assert player.requests[-1].sampling.temperature == 0.5


def test_a_pipe_is_read(run: Run, player: Player) -> None:
    assert run("Summarise", pipe="A long text.\n").stdout == "An **answer**.\n"
    assert asked(player) == ("org/talker", [("user", "Summarise\n\nA long text.")])
    run("org/other", pipe="Only a pipe.")
    assert asked(player) == ("org/other", [("user", "Only a pipe.")])
    run("-m", "talk", "two", "words", pipe="")
    assert asked(player) == ("org/talker", [("user", "two words")])


def test_a_piped_text_attaches_no_files(run: Run, player: Player, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    run("talk", "What is this?", pipe=f"{tmp_path}/secret.png")
    assert asked(player)[1] == [("user", f"What is this?\n\n{tmp_path}/secret.png")]


def test_the_whole_response_as_json(run: Run) -> None:
    response = json.loads(run("talk", "Why?", "--json").stdout)
    assert response["choices"][0]["message"]["content"] == "An **answer**."
    assert response["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tolk", "Why?"], "There is no model 'tolk'. Did you mean talk"),
        (["org/otter", "Why?"], "The server has no model 'org/otter'. Did you mean 'org/other'?"),
        (["talk"], "There is nothing to ask"),
        (["talk", "Why?", "--image", "nowhere.png"], "nowhere.png cannot be read: No such file"),
        (["talk", "Why?", "--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
    ],
)
def test_errors_go_to_standard_error(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_error_of_the_server_is_repeated(run: Run, player: Player) -> None:
    def refuse(request: GenerationRequest) -> list[Delta]:
        raise BadRequest("that is \x1b[2Jtoo much")

    player.answer = refuse
    done = run("talk", "Why?")
    player.answer = reasons
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "millstream: that is [2Jtoo much\n")


def test_without_a_server_a_private_one_is_started_and_ended(environment: dict[str, str], servable: Path) -> None:
    del environment["MILLSTREAM_URL"]
    if taken(8000):
        pytest.skip("a server runs at the usual address")
    environment |= {"MILLSTREAM_PORT": "1", "MILLSTREAM_MODELS": "nonsense"}  # of the user's own server
    child = subprocess.Popen(
        command(str(servable), "Hello", "--max-tokens", "3", "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    server = private_server(child)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, err
    assert json.loads(out)["model"] == servable.name
    gone([server])


def test_a_private_server_ends_with_a_chat_that_is_killed(environment: dict[str, str], servable: Path) -> None:
    del environment["MILLSTREAM_URL"]
    if taken(8000):
        pytest.skip("a server runs at the usual address")
    child = subprocess.Popen(command(str(servable), "Hello"), stdin=subprocess.DEVNULL, env=environment)
    server = private_server(child)
    child.send_signal(signal.SIGKILL)
    child.wait(PATIENCE)
    gone([server])


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    del environment["MILLSTREAM_URL"]
    if taken(8000):
        pytest.skip("a server runs at the usual address")
    (tmp_path / "broken").mkdir()
    done = subprocess.run(
        command(str(tmp_path / "broken"), "Hello"), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=environment, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a model folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = ServerClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(Exception, match=r"before the answer was complete|broke"):
            _answer_half(listener, client)


def _answer_half(listener: socket.socket, client: ServerClient) -> None:
    import threading

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b'HTTP/1.0 200 OK\r\n\r\ndata: {"choices": []}\n\n')

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        list(client.stream("/v1/chat/completions", {}))
    finally:
        thread.join(PATIENCE)


def taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def private_server(chat: subprocess.Popen[str] | subprocess.Popen[bytes]) -> psutil.Process:
    """The server's process, once it runs."""
    parent = psutil.Process(chat.pid)
    for _ in range(PATIENCE * 20):
        for child in parent.children():
            if re.search("private_child", " ".join(child.cmdline())):
                return child
        assert chat.poll() is None, "the chat has ended"
        psutil.wait_procs([parent], timeout=0.05)
    raise AssertionError("no server was started")


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive, "the server was left behind"
